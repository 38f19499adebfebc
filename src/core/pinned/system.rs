//! Memory of this process that GPUs reach through the CPU's page tables.

use std::panic::Location as Caller;

use super::pages::{PageSize, Pages};
use super::{entry, not_empty};
use crate::driver::{Access, DeviceAttribute, DevicePtr, Driver, Location};
use crate::ledger::{AllocPath, Entry, Label, NewEntry};
use crate::memory::{AccessChecks, CpuMemory, CpuView, Engine, Memory};
use crate::{Error, Result};

/// Plain memory of this process, as from `malloc`, which GPUs reach through the CPU's page tables (ATS): on Grace machines.
/// Nothing is pinned, and the kernel may move pages between nodes.
///
/// Source: `mmap`; the attribute `PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`.
#[derive(Debug)]
pub struct SystemMemory {
    driver: Driver,
    len: u64,
    entry: Entry,
    pages: Pages,
}

impl SystemMemory {
    /// Maps `bytes` of zeros.
    ///
    /// # Errors
    /// [`Error::PlatformUnsupported`] unless all GPUs use the CPU's page tables; [`Error::InvalidArgument`] for 0 bytes;
    /// [`Error::System`] if there are no such pages; the driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, bytes: u64, size: PageSize) -> Result<Self> {
        not_empty(bytes)?;
        let gpus = 0..driver.device_count()?;
        let attribute = DeviceAttribute::PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
        for gpu in gpus.clone() {
            if driver.device_attribute(gpu, attribute)? != 1 {
                return Err(Error::PlatformUnsupported {
                    what: "GPUs that use the CPU's page tables (ATS), which memory that is not pinned needs",
                    source: None,
                });
            }
        }
        let pages = Pages::anonymous(bytes, size)?;
        let new = NewEntry {
            driver,
            bytes,
            location: Location::Host,
            path: AllocPath::System,
            label: None,
            site: Some(Caller::caller()),
        };
        let who = std::iter::once(Location::Host).chain(gpus.map(Location::Device));
        Ok(Self {
            entry: entry(new, pages.start(), who),
            driver: driver.clone(),
            len: bytes,
            pages,
        })
    }

    /// Sets the memory's name in the [ledger](crate::ledger).
    pub fn labelled(self, label: impl Into<Label>) -> Self {
        self.entry.set_label(label.into());
        self
    }

    /// Returns the CPU's view of the bytes.
    pub fn cpu(&self) -> CpuView<'_> {
        // SAFETY: the pages are mapped, whole, until this is dropped; safe code reaches them through atomic views only.
        unsafe { CpuView::new(self.pages.start(), self.len, true) }
    }
}

impl CpuMemory for SystemMemory {
    fn cpu(&self) -> Result<CpuView<'_>> {
        Ok(self.cpu())
    }
}

// SAFETY: every GPU uses the page tables of this process, where the range is mapped until this is dropped.
unsafe impl AccessChecks for SystemMemory {
    fn gpu_access(&self, _: i32, _: Engine, _: u64, _: u64) -> Result<Access> {
        Ok(Access::ReadWrite)
    }
}

impl Memory for SystemMemory {
    fn driver(&self) -> &Driver {
        &self.driver
    }
    fn device_ptr(&self) -> DevicePtr {
        self.pages.start()
    }
    fn len(&self) -> u64 {
        self.len
    }
    fn location(&self) -> Location {
        Location::Host
    }
}
