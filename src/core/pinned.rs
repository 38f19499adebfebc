//! Other memory behind the same interfaces: the older allocators and the system's own.
//!
//! For comparison with EGM, for the other end of copies, and where one of them is right:
//!
//! | type | memory | right for |
//! |---|---|---|
//! | [`PinnedHost`] | `cudaHostAlloc`: pinned, on no chosen node | small things that live as long as the program |
//! | [`RegisteredHost`] | this process's own pages, pinned later: huge pages, files | memory that must be of a kind, such as a file's |
//! | [`SystemMemory`] | plain pages that GPUs reach as the CPU does, on Grace | data that seldom meet a GPU |
//! | [`ManagedMemory`] | pages that migrate to the CPU or GPU that touches them | data that one side uses for a long time, then the other |
//! | [`DeviceMemory`] | `cudaMalloc`: one GPU's | data that only this GPU uses |
//!
//! The example `host-memory` measures them beside EGM.

mod managed;
mod pages;
mod registered;
mod system;

pub use managed::ManagedMemory;
pub use pages::PageSize;
pub(crate) use pages::huge_page_of;
pub use registered::RegisteredHost;
pub use system::SystemMemory;

use std::sync::Arc;

use crate::driver::{Access, AccessDesc, Code, DeviceAttribute, DevicePtr, Driver, Location};
use crate::explain::name_missing_gpu;
use crate::ledger::{AllocPath, Entry, Grants, NewEntry, Site};
use crate::memory::{AccessChecks, Engine, impl_memory};
use crate::size::not_empty;
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

/// Refuses a feature that a GPU says it lacks. An attribute that the driver does not know says nothing.
fn is_supported(
    driver: &Driver,
    device: i32,
    attribute: DeviceAttribute,
    what: &'static str,
) -> Result<()> {
    match driver.device_attribute(device, attribute) {
        Ok(0) => Err(Error::unsupported(what, None)),
        Err(error) if error.code() != Some(Code::INVALID_VALUE) => {
            Err(name_missing_gpu(driver, error, device))
        }
        _ => Ok(()),
    }
}

/// The common part of the types here: the driver, its addresses, and its entry in the ledger.
#[derive(Debug)]
struct Owned {
    driver: Driver,
    start: DevicePtr,
    len: u64,
    path: AllocPath,
    location: Location,
    writable: bool,
    entry: Entry,
}

impl Owned {
    /// Takes memory that was allocated; `gpus` and, unless it is a GPU's own, the host may read and write it.
    fn new(
        driver: &Driver,
        (path, location): (AllocPath, Location),
        (start, len): (DevicePtr, u64),
        gpus: impl IntoIterator<Item = i32>,
        site: Site,
    ) -> Self {
        let host = (path != AllocPath::Device).then_some(Location::Host);
        let locations = host
            .into_iter()
            .chain(gpus.into_iter().map(Location::Device));
        let access = locations.map(|location| AccessDesc::new(location, Access::ReadWrite));
        let new = NewEntry {
            driver,
            bytes: len,
            location,
            path,
            label: None,
            site,
        };
        Self {
            entry: Entry::mapped(new, start, Arc::new(Grants::of(access.collect()))),
            driver: driver.clone(),
            start,
            len,
            path,
            location,
            writable: true,
        }
    }

    /// Gives the memory back by `free`, for `Drop`. Returns whether it is lost.
    fn give_back(
        &self,
        what: &'static str,
        mut free: impl FnMut(&Driver, DevicePtr) -> Result<()>,
    ) -> bool {
        let mut is_lost = false;
        self.entry.give_back(&self.driver, || {
            is_lost = give_back_or_log(&self.driver, what, || free(&self.driver, self.start));
            is_lost
        });
        is_lost
    }
}

impl_memory! { for Owned, |this| &this.driver, this.start, this.len, this.location }

// SAFETY: the memory is given back when its owner is dropped. Until then host memory is all GPUs', for reading alone
// if it is not writable: pinned and registered memory is PORTABLE and DEVICEMAP, and for `SystemMemory` every GPU
// uses this process's page tables (ATS). A GPU's memory is open to its own kernels and to every copy engine; kernels
// of other GPUs have no access, because this crate enables no peer access.
unsafe impl AccessChecks for Owned {
    fn gpu_access(&self, gpu: i32, engine: Engine, _: u64, _: u64) -> Result<Access> {
        Ok(match self.location {
            Location::Device(own) if engine == Engine::Kernel && own != gpu => Access::None,
            _ if self.writable => Access::ReadWrite,
            _ => Access::Read,
        })
    }

    fn is_read_only_for_cpu(&self, _: u64, _: u64) -> bool {
        !self.writable
    }

    fn may_be_on_host(&self, _: u64, _: u64) -> bool {
        self.path != AllocPath::Device
    }

    fn of_one_mapping(&self, _offset: u64, len: u64) -> Option<u64> {
        matches!(self.path, AllocPath::Pinned | AllocPath::Device).then_some(len)
    }
}

/// Implements the common part of all types here, by their field `memory`.
macro_rules! owned {
    ($name:ident) => {
        impl $name {
            /// Sets the memory's name in the [ledger](crate::ledger).
            pub fn labelled(self, label: impl Into<$crate::ledger::Label>) -> Self {
                self.memory.entry.set_label(label.into());
                self
            }
        }

        $crate::memory::memory_through!(unsafe impl for $name, |this| this.memory);
    };
    ($name:ident, for the CPU) => {
        owned!($name);

        impl $name {
            /// Returns the CPU's view of the bytes.
            pub fn cpu(&self) -> $crate::memory::CpuView<'_> {
                let memory = &self.memory;
                // SAFETY: the memory is mapped for the CPU, in whole pages, also while GPUs work, until this is
                // dropped. A registered file keeps its pages: by the contract of `of_file`, or by its seals. Safe
                // code reaches the bytes through atomic views only.
                unsafe { $crate::memory::CpuView::new(memory.start, memory.len, memory.writable) }
            }
        }

        impl $crate::memory::CpuMemory for $name {
            fn cpu(&self) -> $crate::Result<$crate::memory::CpuView<'_>> {
                Ok(self.cpu())
            }
        }
    };
}
use owned;

/// Pinned host memory on no particular node, usable by the CPU and every GPU; freed when dropped.
///
/// Source: `cuMemHostAlloc` with PORTABLE and DEVICEMAP, which is `cudaHostAlloc`.
#[derive(Debug)]
pub struct PinnedHost {
    memory: Owned,
    device: i32,
}

impl PinnedHost {
    /// Allocates `bytes` in the primary context of GPU `device`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes, [`Error::NoSuchGpu`], or the driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, device: i32, bytes: u64) -> Result<Self> {
        not_empty(bytes)?;
        // Every GPU may access it; asked first, so that nothing is allocated if the driver does not say.
        let gpus = 0..driver.device_count()?;
        let start = driver
            .mem_host_alloc(device, bytes)
            .map_err(|error| name_missing_gpu(driver, error, device))?;
        let kind = (AllocPath::Pinned, Location::Host);
        let memory = Owned::new(driver, kind, (start, bytes), gpus, Site::here());
        Ok(Self { memory, device })
    }
}

impl Drop for PinnedHost {
    fn drop(&mut self) {
        self.memory
            .give_back("pinned host memory", |driver, start| {
                // SAFETY: owned by `self`; views of it borrow `self`, so none exist.
                unsafe { driver.mem_free_host(self.device, start) }
            });
    }
}

/// Memory of one GPU; freed when dropped.
///
/// Source: `cuMemAlloc`.
#[derive(Debug)]
pub struct DeviceMemory {
    memory: Owned,
    device: i32,
}

impl DeviceMemory {
    /// Allocates `bytes` of GPU `device`'s memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes, [`Error::NoSuchGpu`], or the driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, device: i32, bytes: u64) -> Result<Self> {
        not_empty(bytes)?;
        let start = driver
            .mem_alloc(device, bytes)
            .map_err(|error| name_missing_gpu(driver, error, device))?;
        let kind = (AllocPath::Device, Location::Device(device));
        let memory = Owned::new(driver, kind, (start, bytes), [device], Site::here());
        Ok(Self { memory, device })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.memory.give_back("device memory", |driver, start| {
            // SAFETY: owned by `self`; the driver waits for work that uses it.
            unsafe { driver.mem_free(self.device, start) }
        });
    }
}

owned!(PinnedHost, for the CPU);
owned!(DeviceMemory);
