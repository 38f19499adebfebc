//! Trials and their answers.

use serde::{Deserialize, Serialize};

use crate::driver::{Code, DeviceAttribute, Driver, HandleTypes, Location};
use crate::{Error, Result};

/// A way to allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Path {
    /// Virtual memory management: `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`.
    Vmm,
    /// Stream-ordered: `cuMemPoolCreate`, `cuMemAllocFromPoolAsync`.
    Pool,
}

impl Path {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Vmm, Self::Pool];
}

crate::driver::display_texts! {
    Path {
        Self::Vmm => "VMM",
        Self::Pool => "pool",
    }
}

/// The sets of handle types to try.
pub const HANDLE_TYPES: [HandleTypes; 4] = [
    HandleTypes::NONE,
    HandleTypes::POSIX_FD,
    HandleTypes::FABRIC,
    HandleTypes::from_bits(HandleTypes::FABRIC.bits() | HandleTypes::POSIX_FD.bits()),
];

/// One combination to try: memory at a location, for a GPU (and the CPU, for the CPU's memory), on a path,
/// with handle types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Trial {
    /// Where the memory lies.
    pub location: Location,
    /// The ordinal of the GPU that reads and writes it.
    pub gpu: i32,
    /// How it is allocated.
    pub path: Path,
    /// How it can be shared.
    pub handle_types: HandleTypes,
}

impl std::fmt::Display for Trial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            location,
            gpu,
            path,
            handle_types,
        } = self;
        write!(
            f,
            "{path} memory on {location} for GPU {gpu} (handle types: {handle_types})"
        )
    }
}

/// The result of a trial.
#[derive(Clone, Debug, PartialEq)]
pub enum Support {
    /// It worked.
    Yes,
    /// It does not work here, with the reason.
    No(Error),
    /// The trial was inconclusive, with the reason: there was no memory for it, or the GPU's context is lost.
    /// The next request tries again.
    Unknown(Error),
}

impl Support {
    /// Returns whether it worked.
    pub const fn is_yes(&self) -> bool {
        matches!(self, Self::Yes)
    }

    /// Returns the reason, if it did not work.
    pub const fn error(&self) -> Option<&Error> {
        match self {
            Self::Yes => None,
            Self::No(error) | Self::Unknown(error) => Some(error),
        }
    }

    /// Returns `Ok` if it worked, for use with `?`.
    ///
    /// # Errors
    /// The reason, if it did not.
    pub fn require(self) -> Result<()> {
        match self {
            Self::Yes => Ok(()),
            Self::No(error) | Self::Unknown(error) => Err(error),
        }
    }

    pub(super) fn of(result: Result<()>) -> Self {
        match result {
            Ok(()) => Self::Yes,
            Err(error) if is_passing(&error) => Self::Unknown(error),
            Err(error) => Self::No(error),
        }
    }
}

/// Returns whether an error says nothing about the machine's abilities.
fn is_passing(error: &Error) -> bool {
    match error {
        Error::OutOfMemory { .. } | Error::NodeTooFull { .. } | Error::ContextLost { .. } => true,
        other => other.code() == Some(Code::OUT_OF_MEMORY),
    }
}

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
        HOST_NUMA_ID NUMA_ID HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED HOST_NUMA_MEMORY_POOLS_SUPPORTED
        HOST_NUMA_MULTINODE_IPC_SUPPORTED HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        HANDLE_TYPE_FABRIC_SUPPORTED MEMPOOL_SUPPORTED_HANDLE_TYPES PAGEABLE_MEMORY_ACCESS
        PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
    ]
    .into_iter()
    .map(|(name, attribute)| Hint {
        name,
        value: driver.device_attribute(gpu, attribute).ok(),
    })
    .collect()
}
