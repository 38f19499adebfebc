//! Memory that the driver moves between the CPU and a GPU.

use super::{Owned, is_supported, owned};
use crate::driver::{DeviceAttribute, Driver, Location};
use crate::explain::name_missing_gpu;
use crate::ledger::{AllocPath, Site};
use crate::size::not_empty;
use crate::{Error, Result};

/// Managed memory: its pages move to the CPU or the GPU that touches them.
///
/// For comparison. It is not shared with other processes. Each allocation is at most the GPU's free memory at that
/// time. Several allocations together may exceed the GPU's memory, because pages take none before a GPU touches them:
/// the driver then evicts pages to the CPU's memory.
///
/// Source: `cuMemAllocManaged` with ATTACH_GLOBAL.
///
/// ```
/// use egmem::pinned::ManagedMemory;
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::h200x8())?; // Driver::open() on a real machine
/// let memory = ManagedMemory::new(&driver, 0, 4 << 20)?;
/// memory.cpu().put(0, 7_u64)?; // the page is the CPU's
/// assert_eq!(egmem::proof::Prover::new(&driver, 0)?.read(&memory)?, 7); // and the GPU's now
/// assert_eq!(memory.cpu().get::<u64>(0)?, 7); // and the CPU's again
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Debug)]
pub struct ManagedMemory {
    memory: Owned,
    device: i32,
}

impl ManagedMemory {
    /// Allocates `bytes` in the primary context of GPU `device`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes and for more than the GPU has free; [`Error::NoSuchGpu`];
    /// [`Error::PlatformUnsupported`] where the CPU may not touch managed memory while a GPU works, or there is none;
    /// the driver's error.
    #[track_caller]
    pub fn new(driver: &Driver, device: i32, bytes: u64) -> Result<Self> {
        not_empty(bytes)?;
        let site = Site::here();
        let attribute = DeviceAttribute::MANAGED_MEMORY;
        is_supported(driver, device, attribute, "managed memory")?;
        // Of every GPU: with one that cannot, the CPU must not touch managed memory while that one works.
        for gpu in 0..driver.device_count()? {
            let attribute = DeviceAttribute::CONCURRENT_MANAGED_ACCESS;
            let what = "managed memory that CPU and GPU use at the same time";
            is_supported(driver, gpu, attribute, what)?;
        }
        let (free, _) = driver.mem_info(device)?;
        if bytes > free {
            let why = format!("{bytes} bytes of managed memory exceed what GPU {device} has free");
            let valid = format!("up to {free} bytes");
            return Err(Error::invalid_of("size", why, valid));
        }
        let start = driver
            .mem_alloc_managed(device, bytes)
            .map_err(|error| name_missing_gpu(driver, error, device))?;
        let kind = (AllocPath::Managed, Location::Device(device));
        let memory = Owned::new(driver, kind, (start, bytes), [device], site);
        Ok(Self { memory, device })
    }
}

impl Drop for ManagedMemory {
    fn drop(&mut self) {
        self.memory.give_back("managed memory", |driver, start| {
            // SAFETY: owned by `self`; views of it borrow `self`, so none exist.
            unsafe { driver.mem_free(self.device, start) }
        });
    }
}

owned!(ManagedMemory, for the CPU);
