//! Other memory behind the same interfaces: the older allocators and what the system has.
//!
//! For comparison with EGM, for the other end of copies, and where one of them is right:
//!
//! | type | memory | right for |
//! |---|---|---|
//! | [`PinnedHost`] | `cudaHostAlloc`: pinned, on no chosen node | small things that live as long as the program |
//! | [`RegisteredHost`] | this process's own pages, pinned later: huge pages, files | memory that must be of a kind, such as a file's |
//! | [`SystemMemory`] | plain pages that GPUs reach as the CPU does, on Grace | data that seldom meet a GPU |
//! | [`ManagedMemory`] | pages that migrate to the CPU or GPU that touches them | data that one side uses for long, then the other |
//! | [`DeviceMemory`] | `cudaMalloc`: one GPU's | data that only this GPU uses |
//!
//! The example `host-memory` measures them beside EGM.

mod managed;
mod pages;
mod registered;
mod system;

pub use managed::ManagedMemory;
pub use pages::PageSize;
pub use registered::RegisteredHost;
pub use system::SystemMemory;

use std::panic::Location as Caller;
use std::sync::Arc;

use crate::driver::{Access, AccessDesc, Code, DeviceAttribute, DevicePtr, Driver, Location};
use crate::explain::name_missing_gpu;
use crate::ledger::{AllocPath, Entry, Grants, Label, NewEntry};
use crate::memory::{AccessChecks, CpuMemory, CpuView, Engine, Memory};
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

fn not_empty(bytes: u64) -> Result<()> {
    match bytes {
        0 => Err(Error::invalid_of(
            "size",
            "0 bytes cannot be allocated",
            "1 byte or more",
        )),
        _ => Ok(()),
    }
}

/// Refuses what a GPU says that it does not support. An attribute that the driver does not know says nothing.
fn is_supported(
    driver: &Driver,
    device: i32,
    attribute: DeviceAttribute,
    what: &'static str,
) -> Result<()> {
    match driver.device_attribute(device, attribute) {
        Ok(0) => Err(Error::PlatformUnsupported { what, source: None }),
        Err(error) if error.code() != Some(Code::INVALID_VALUE) => {
            Err(name_missing_gpu(driver, error, device))
        }
        _ => Ok(()),
    }
}

/// Returns the ledger's entry of memory at `start`, which `who` may read and write.
fn entry(new: NewEntry<'_>, start: DevicePtr, who: impl IntoIterator<Item = Location>) -> Entry {
    let access = who
        .into_iter()
        .map(|who| AccessDesc::new(who, Access::ReadWrite));
    Entry::mapped(new, start, Arc::new(Grants::of(access.collect())))
}

/// Pinned host memory on no particular node, usable by the CPU and every GPU; freed when dropped.
///
/// Source: `cuMemHostAlloc` with PORTABLE and DEVICEMAP, which is `cudaHostAlloc`.
#[derive(Debug)]
pub struct PinnedHost {
    driver: Driver,
    device: i32,
    start: DevicePtr,
    len: u64,
    entry: Entry,
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
        let gpus = (0..driver.device_count()?).map(Location::Device);
        let start = driver
            .mem_host_alloc(device, bytes)
            .map_err(|error| name_missing_gpu(driver, error, device))?;
        let new = NewEntry {
            driver,
            bytes,
            location: Location::Host,
            path: AllocPath::Pinned,
            label: None,
            site: Some(Caller::caller()),
        };
        Ok(Self {
            entry: entry(new, start, std::iter::once(Location::Host).chain(gpus)),
            start,
            driver: driver.clone(),
            device,
            len: bytes,
        })
    }

    /// Sets the memory's name in the [ledger](crate::ledger).
    pub fn labelled(self, label: impl Into<Label>) -> Self {
        self.entry.set_label(label.into());
        self
    }

    /// Returns the CPU's view of the bytes.
    pub fn cpu(&self) -> CpuView<'_> {
        // SAFETY: pinned memory is mapped for the CPU, in whole pages, until freed, which needs `self`; safe code
        // reaches it through atomic views only.
        unsafe { CpuView::new(self.start, self.len, true) }
    }
}

impl Drop for PinnedHost {
    fn drop(&mut self) {
        self.entry.give_back(&self.driver, || {
            give_back_or_log(&self.driver, "pinned host memory", || {
                // SAFETY: owned by `self`; views of it borrow `self`, so none exist.
                unsafe { self.driver.mem_free_host(self.device, self.start) }
            })
        });
    }
}

/// Memory of one GPU; freed when dropped.
///
/// Source: `cuMemAlloc`.
#[derive(Debug)]
pub struct DeviceMemory {
    driver: Driver,
    device: i32,
    start: DevicePtr,
    len: u64,
    entry: Entry,
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
        let new = NewEntry {
            driver,
            bytes,
            location: Location::Device(device),
            path: AllocPath::Device,
            label: None,
            site: Some(Caller::caller()),
        };
        Ok(Self {
            entry: entry(new, start, [Location::Device(device)]),
            start,
            driver: driver.clone(),
            device,
            len: bytes,
        })
    }

    /// Sets the memory's name in the [ledger](crate::ledger).
    pub fn labelled(self, label: impl Into<Label>) -> Self {
        self.entry.set_label(label.into());
        self
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.entry.give_back(&self.driver, || {
            give_back_or_log(&self.driver, "device memory", || {
                // SAFETY: owned by `self`; the driver waits for work that uses it.
                unsafe { self.driver.mem_free(self.device, self.start) }
            })
        });
    }
}

macro_rules! memory {
    ($name:ident, $location:expr) => {
        impl Memory for $name {
            fn driver(&self) -> &Driver {
                &self.driver
            }
            fn device_ptr(&self) -> DevicePtr {
                self.start
            }
            fn len(&self) -> u64 {
                self.len
            }
            fn location(&self) -> Location {
                let location: fn(&Self) -> Location = $location;
                location(self)
            }
        }
    };
}

impl CpuMemory for PinnedHost {
    fn cpu(&self) -> Result<CpuView<'_>> {
        Ok(self.cpu())
    }
}

// SAFETY: the memory is freed when this is dropped; CUDA grants it to all GPUs or to its own.
unsafe impl AccessChecks for PinnedHost {
    /// Pinned memory is portable and mapped for every GPU.
    fn gpu_access(&self, _: i32, _: Engine, _: u64, _: u64) -> Result<Access> {
        Ok(Access::ReadWrite)
    }
}

// SAFETY: the memory is freed when this is dropped; CUDA grants it to all GPUs or to its own.
unsafe impl AccessChecks for DeviceMemory {
    /// This crate enables no peer access, so kernels of other GPUs have none.
    fn gpu_access(&self, gpu: i32, engine: Engine, _: u64, _: u64) -> Result<Access> {
        Ok(match engine {
            Engine::Copy => Access::ReadWrite,
            Engine::Kernel if gpu == self.device => Access::ReadWrite,
            Engine::Kernel => Access::None,
        })
    }

    fn may_be_on_host(&self, _: u64, _: u64) -> bool {
        false
    }
}

memory!(PinnedHost, |_| Location::Host);
memory!(DeviceMemory, |this| Location::Device(this.device));
