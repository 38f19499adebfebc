//! Memory of this process that GPUs reach through the CPU's page tables.

use super::pages::{PageSize, Pages};
use super::{Owned, owned};
use crate::driver::{DeviceAttribute, Driver, Location};
use crate::ledger::{AllocPath, Site};
use crate::size::not_empty;
use crate::{Error, Result};

/// Plain memory of this process, as from `malloc`, which GPUs reach through the CPU's page tables (ATS): on Grace
/// machines. Nothing is pinned, and the kernel may move pages between nodes.
///
/// Source: `mmap`; the attribute `PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`.
///
/// ```
/// use egmem::pinned::{PageSize, PinnedHost, SystemMemory};
/// use egmem::{Driver, Error, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let memory = SystemMemory::new(&driver, 4 << 20, PageSize::Base)?;
/// memory.cpu().put(0, 7_u64)?;
/// assert_eq!(egmem::proof::Prover::new(&driver, 0)?.read(&memory)?, 7); // by a kernel
///
/// // Other machines have none: use pinned memory there.
/// let driver = Driver::simulated(Machine::h200x8())?;
/// match SystemMemory::new(&driver, 4 << 20, PageSize::Base) {
///     Err(Error::PlatformUnsupported { what, .. }) => println!("without {what}"),
///     other => panic!("{other:?}"),
/// }
/// PinnedHost::new(&driver, 0, 4 << 20)?;
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Debug)]
pub struct SystemMemory {
    // Removed from the ledger before the addresses are given back.
    memory: Owned,
    _pages: Pages,
}

impl SystemMemory {
    /// Maps `bytes` of zeros.
    ///
    /// # Errors
    /// [`Error::PlatformUnsupported`] unless all GPUs use the CPU's page tables; [`Error::InvalidArgument`] for 0
    /// bytes; [`Error::System`] if there are no such pages; the driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, bytes: u64, size: PageSize) -> Result<Self> {
        not_empty(bytes)?;
        let gpus = 0..driver.device_count()?;
        let attribute = DeviceAttribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
        for gpu in gpus.clone() {
            if driver.device_attribute(gpu, attribute)? != 1 {
                let what = "GPUs that use the CPU's page tables (ATS), which memory that is not pinned needs";
                return Err(Error::unsupported(what, None));
            }
        }
        let pages = Pages::anonymous(bytes, size)?;
        let kind = (AllocPath::System, Location::Host);
        let range = (pages.start(), bytes);
        Ok(Self {
            memory: Owned::new(driver, kind, range, gpus, Site::here()),
            _pages: pages,
        })
    }
}

owned!(SystemMemory, for the CPU);
