//! The claims of the driver's attributes: shown beside the results of trials, never used to decide.

use serde::Serialize;

use crate::Driver;
use crate::driver::DeviceAttribute;

/// An attribute that claims something about host-NUMA memory or sharing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Hint {
    /// CUDA's name without `CU_DEVICE_ATTRIBUTE_`.
    pub name: &'static str,
    /// The driver's answer; `None` if it does not know the attribute, which does not mean "no".
    pub value: Option<i32>,
}

/// Returns the claims of GPU `gpu`'s attributes.
pub fn hints(driver: &Driver, gpu: i32) -> Vec<Hint> {
    macro_rules! attributes {
        ($($name:ident)*) => {
            [$((stringify!($name), DeviceAttribute::$name),)*]
        };
    }
    attributes![
        HOST_NUMA_ID
        NUMA_ID
        HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        HOST_NUMA_MEMORY_POOLS_SUPPORTED
        HOST_NUMA_MULTINODE_IPC_SUPPORTED
        HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        HANDLE_TYPE_FABRIC_SUPPORTED
        MEMPOOL_SUPPORTED_HANDLE_TYPES
        PAGEABLE_MEMORY_ACCESS
        PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
    ]
    .into_iter()
    .map(|(name, attribute)| Hint {
        name,
        value: driver.device_attribute(gpu, attribute).ok(),
    })
    .collect()
}
