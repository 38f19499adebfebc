//! Copies by a kernel.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::{Arc, Mutex};

use crate::driver::{FunctionHandle, LaunchDims, ModuleHandle};
use crate::memory::Memory;
use crate::{Driver, MemoryError, Stream};
use egmem_core::per_driver::lock;
use egmem_core::pinned::PinnedHost;
use egmem_core::teardown::give_back_or_log;

/// The threads of a block.
const THREADS: u32 = 512;
/// The most blocks of a launch.
pub(crate) const MAX_BLOCKS: u32 = 1024;
/// What addresses and sizes must be multiples of, in bytes.
pub(crate) const ALIGN: u64 = 16;
/// How many lists are kept for later jobs.
const SPARES: usize = 16;
/// The most bytes of a list that is kept: of a job of 2^18 pages.
const SPARE: u64 = 4 << 20;
/// The least bytes of a list.
const LIST: u64 = 64 << 10;
/// The pairs of the first of two launches.
const FIRST: usize = 2048;

const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("pages.ptx"), "\0").as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("pages.ptx holds a NUL"),
    };

/// The kernel on each GPU that has been asked for it, or why it cannot run there; and lists for its jobs.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    loaded: Mutex<HashMap<i32, Result<Arc<Kernel>, MemoryError>>>,
    spares: Mutex<Vec<Arc<PinnedHost>>>,
}

/// The kernel, loaded on one GPU.
#[derive(Debug)]
pub(crate) struct Kernel {
    driver: Driver,
    device: i32,
    module: ModuleHandle,
    function: FunctionHandle,
}

/// What a launch copies.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    /// For each pair the address of the page and where its block lies in each part, in bytes.
    pub(crate) pairs: Vec<[u64; 2]>,
    pub(crate) bases: Vec<u64>,
    pub(crate) part_bytes: u64,
    /// From pages to blocks.
    pub(crate) is_load: bool,
    pub(crate) blocks: u32,
    pub(crate) stream: &'a Stream,
}

impl Kernels {
    /// Returns the kernel on a GPU, loaded at the first call.
    ///
    /// # Errors
    /// The driver's, the same at each call.
    pub(crate) fn on(&self, driver: &Driver, device: i32) -> Result<Arc<Kernel>, MemoryError> {
        let mut loaded = lock(&self.loaded);
        let kernel = loaded.entry(device);
        kernel
            .or_insert_with(|| Kernel::load(driver, device).map(Arc::new))
            .clone()
    }

    /// Returns a list for a job of `bytes` bytes, which the kernel reads.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn list(
        &self,
        driver: &Driver,
        device: i32,
        bytes: u64,
    ) -> Result<Arc<PinnedHost>, MemoryError> {
        let mut spares = lock(&self.spares);
        if let Some(at) = spares.iter().position(|list| list.len() >= bytes) {
            return Ok(spares.swap_remove(at));
        }
        drop(spares);
        let bytes = bytes.max(LIST).next_power_of_two();
        Ok(Arc::new(PinnedHost::new(driver, device, bytes)?))
    }

    /// Keeps the list of a job that has ended for a later one.
    pub(crate) fn keep(&self, list: Arc<PinnedHost>) {
        let mut spares = lock(&self.spares);
        if spares.len() < SPARES && list.len() <= SPARE {
            spares.push(list);
        }
    }
}

impl Kernel {
    fn load(driver: &Driver, device: i32) -> Result<Self, MemoryError> {
        // SAFETY: the text is the crate's own PTX.
        let module = unsafe { driver.module_load(device, PTX)? };
        // Owned from here on, so that a missing function unloads the module.
        let mut kernel = Self {
            driver: driver.clone(),
            device,
            module,
            function: FunctionHandle(0),
        };
        // SAFETY: `kernel` keeps the module loaded.
        kernel.function = unsafe { driver.module_function(device, module, c"egmem_kv_copy")? };
        Ok(kernel)
    }

    /// Starts the copies.
    ///
    /// # Errors
    /// The driver's. Some of the copies may have begun then.
    ///
    /// # Safety
    /// - The stream is of this kernel's GPU and driver. The GPU may access pages and blocks: read those that are copied from, and
    ///   write the others.
    /// - Each pair's page and block, in each part, are memory of `part_bytes` × parts and of `part_bytes` bytes. They, `list` and this
    ///   kernel live until the work has ended.
    /// - Addresses and sizes are multiples of [`ALIGN`]; `list` has room for the pairs and bases.
    pub(crate) unsafe fn launch(
        &self,
        launch: &Launch<'_>,
        list: &PinnedHost,
    ) -> Result<(), MemoryError> {
        let all = launch.pairs.len();
        let view = list.cpu();
        let bases_at = all as u64 * 16;
        view.write_at(bases_at, &launch.bases)?;
        // The first launch begins while the CPU writes the rest of the list.
        let first = if all > 2 * FIRST { FIRST } else { all };
        for range in [0..first, first..all] {
            let pairs = &launch.pairs[range.clone()];
            if pairs.is_empty() {
                continue;
            }
            let at = range.start as u64 * 16;
            view.write_at(at, pairs.as_flattened())?;
            let at = [
                list.device_ptr().add(at).0,
                list.device_ptr().add(bases_at).0,
            ];
            // SAFETY: the caller's promise; this part of the list is written, and the bases are.
            unsafe { self.launch_part(launch, pairs.len() as u64, at)? };
        }
        Ok(())
    }

    /// Launches the copies of some pairs, whose list and bases lie at `at`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch); `at` has the list and the bases, which nobody writes until the work has ended.
    unsafe fn launch_part(
        &self,
        launch: &Launch<'_>,
        pairs: u64,
        at: [u64; 2],
    ) -> Result<(), MemoryError> {
        let parts = launch.bases.len() as u64;
        let [list, bases] = at;
        let args = [
            list,
            pairs,
            bases,
            parts,
            launch.part_bytes,
            launch.is_load.into(),
        ];
        // Of each warp's 4 KiB, at most 2^24 × 2^32 / 2^12.
        let chunks = pairs * parts * launch.part_bytes.div_ceil(4096);
        let useful = chunks.div_ceil(u64::from(THREADS / 32));
        let dims = LaunchDims {
            blocks: useful.clamp(1, u64::from(launch.blocks.clamp(1, MAX_BLOCKS))) as u32,
            threads: THREADS,
        };
        // SAFETY: the arguments are the kernel's: it reads the list, and copies `part_bytes` bytes for each pair and part, which by the
        // caller's promise lie in live memory that the GPU may access, at multiples of 16. The CPU's writes to the list come before
        // the launch.
        unsafe {
            self.driver
                .launch_kernel(self.function, dims, &args, launch.stream.handle())
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        give_back_or_log(&self.driver, "a module", || {
            // SAFETY: owned by `self`; the tier keeps it, and jobs keep the tier until their launches have ended.
            unsafe { self.driver.module_unload(self.device, self.module) }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egmem_core::Machine;

    #[test]
    fn few_and_small_lists_are_kept() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let kernels = Kernels::default();
        let list = |bytes| kernels.list(&driver, 0, bytes).unwrap();
        kernels.keep(list(SPARE + 1));
        assert_eq!(lock(&kernels.spares).len(), 0);
        let lists: Vec<_> = (0..=SPARES).map(|_| list(SPARE)).collect();
        lists.into_iter().for_each(|list| kernels.keep(list));
        assert_eq!(lock(&kernels.spares).len(), SPARES);
        assert!(list(1).len() >= SPARE, "one that was kept");
    }
}
