//! Memory that the driver moves between the CPU and a GPU.

use std::panic::Location as Caller;

use super::{entry, is_supported, not_empty};
use crate::driver::{Access, DeviceAttribute, DevicePtr, Driver, Location};
use crate::explain::name_missing_gpu;
use crate::ledger::{AllocPath, Entry, Label, NewEntry};
use crate::memory::{AccessChecks, CpuMemory, CpuView, Engine, Memory};
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

/// Managed memory: its pages move to the CPU or the GPU that touches them.
///
/// For comparison. It is not shared with other processes. Each allocation is at most what the GPU has free at that time.
/// Several allocations together may exceed the GPU's memory, because pages take none before a GPU touches them: the driver
/// then evicts pages to the CPU's memory.
///
/// Source: `cuMemAllocManaged` with ATTACH_GLOBAL.
#[derive(Debug)]
pub struct ManagedMemory {
    driver: Driver,
    device: i32,
    start: DevicePtr,
    len: u64,
    entry: Entry,
}

impl ManagedMemory {
    /// Allocates `bytes` in the primary context of GPU `device`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes and for more than the GPU has free; [`Error::NoSuchGpu`];
    /// [`Error::PlatformUnsupported`] where the CPU may not touch managed memory while a GPU works, or there is none; the
    /// driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, device: i32, bytes: u64) -> Result<Self> {
        not_empty(bytes)?;
        let site = Caller::caller();
        is_supported(
            driver,
            device,
            DeviceAttribute::MANAGED_MEMORY,
            "managed memory",
        )?;
        // Of every GPU: with one that cannot, the CPU must not touch managed memory while that one works.
        for gpu in 0..driver.device_count()? {
            let what = "managed memory that CPU and GPU use at the same time";
            is_supported(
                driver,
                gpu,
                DeviceAttribute::CONCURRENT_MANAGED_ACCESS,
                what,
            )?;
        }
        let (free, _) = driver.mem_info(device)?;
        if bytes > free {
            let why = format!("{bytes} bytes of managed memory exceed what GPU {device} has free");
            return Err(Error::invalid_of(
                "size",
                why,
                format!("up to {free} bytes"),
            ));
        }
        let start = driver
            .mem_alloc_managed(device, bytes)
            .map_err(|error| name_missing_gpu(driver, error, device))?;
        let new = NewEntry {
            driver,
            bytes,
            location: Location::Device(device),
            path: AllocPath::Managed,
            label: None,
            site: Some(site),
        };
        Ok(Self {
            entry: entry(new, start, [Location::Host, Location::Device(device)]),
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
        // SAFETY: the driver maps it for the CPU, also while GPUs work, until it is freed, which needs `self`; safe code
        // reaches it through atomic views only.
        unsafe { CpuView::new(self.start, self.len, true) }
    }
}

impl Drop for ManagedMemory {
    fn drop(&mut self) {
        self.entry.give_back(&self.driver, || {
            give_back_or_log(&self.driver, "managed memory", || {
                // SAFETY: owned by `self`; views of it borrow `self`, so none exist.
                unsafe { self.driver.mem_free(self.device, self.start) }
            })
        });
    }
}

impl CpuMemory for ManagedMemory {
    fn cpu(&self) -> Result<CpuView<'_>> {
        Ok(self.cpu())
    }
}

// SAFETY: the memory is freed when this is dropped.
unsafe impl AccessChecks for ManagedMemory {
    /// Copies reach it from any GPU. Kernels of other GPUs are not asked about.
    fn gpu_access(&self, gpu: i32, engine: Engine, _: u64, _: u64) -> Result<Access> {
        Ok(match engine {
            Engine::Copy => Access::ReadWrite,
            Engine::Kernel if gpu == self.device => Access::ReadWrite,
            Engine::Kernel => Access::None,
        })
    }
}

impl Memory for ManagedMemory {
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
        Location::Device(self.device)
    }
}
