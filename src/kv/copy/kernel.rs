//! Copies by a kernel.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::{Arc, Mutex};

use super::launch::{Group, Launch};
use crate::driver::{Code, FunctionHandle, LaunchDims, ModuleHandle};
use crate::memory::Memory;
use crate::{Driver, MemoryError};
use egmem_core::per_driver::lock;
use egmem_core::pinned::PinnedHost;
use egmem_core::teardown::give_back_or_log;

/// The threads of a block.
const THREADS: u32 = 512;
/// The bytes that a warp moves at a time: as in pages.cu.
const CHUNK: u64 = 4096;
/// The most blocks of a launch.
pub(crate) const MAX_BLOCKS: u32 = 1024;
/// The alignment of addresses and sizes, in bytes.
pub(crate) const ALIGN: u64 = 16;
/// How many lists are kept for later jobs.
const SPARES: usize = 16;
/// The most bytes of a list that is kept: of a job of 2^18 pages.
const SPARE: u64 = 4 << 20;
/// The least bytes of a list.
const LIST: u64 = 64 << 10;

const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("pages.ptx"), "\0").as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("pages.ptx holds a NUL"),
    };
const NAME: &CStr = c"egmem_kv_copy";

/// The kernel on each GPU that has been asked for it, or why it cannot run there; and lists for its jobs.
#[derive(Debug, Default)]
pub(crate) struct Kernels {
    /// By GPU.
    loaded: Mutex<HashMap<i32, Loaded>>,
    spares: Mutex<Vec<Arc<PinnedHost>>>,
}

type Loaded = Result<Arc<Kernel>, MemoryError>;

/// A kernel, loaded on one GPU.
#[derive(Debug)]
pub(crate) struct Kernel {
    driver: Driver,
    device: i32,
    module: ModuleHandle,
    function: FunctionHandle,
}

impl Kernels {
    /// Returns the kernel on a GPU, loaded at the first call.
    ///
    /// # Errors
    /// [`PlatformUnsupported`](MemoryError::PlatformUnsupported) if the GPU or the driver cannot run it, the same at
    /// each call. The driver's errors otherwise: the next call loads it again.
    pub(crate) fn on(&self, driver: &Driver, device: i32) -> Result<Arc<Kernel>, MemoryError> {
        let mut loaded = lock(&self.loaded);
        if let Some(known) = loaded.get(&device) {
            return known.clone();
        }
        let kernel = match Kernel::load(driver, device) {
            Ok(kernel) => Ok(Arc::new(kernel)),
            Err(error) if never_runs(&error) => Err(no_kernel(driver, &error)),
            Err(error) => return Err(error),
        };
        loaded.insert(device, kernel.clone());
        kernel
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

/// Returns whether an error of loading a kernel says that this GPU or this driver cannot run it, now or later.
fn never_runs(error: &MemoryError) -> bool {
    matches!(
        error,
        MemoryError::PlatformUnsupported { .. }
            | MemoryError::DriverTooOld { .. }
            | MemoryError::MissingSymbol { .. }
    ) || matches!(
        error.code(),
        Some(
            Code::NOT_SUPPORTED
                | Code::INVALID_IMAGE
                | Code::NO_BINARY_FOR_GPU
                | Code::INVALID_PTX
                | Code::JIT_COMPILER_NOT_FOUND
                | Code::UNSUPPORTED_PTX_VERSION
                | Code::JIT_COMPILATION_DISABLED
        )
    )
}

fn no_kernel(driver: &Driver, error: &MemoryError) -> MemoryError {
    let what = match driver.is_simulated() {
        true => "a simulated GPU runs no kernels",
        false => "the GPU or its driver cannot run the kernel that copies pages",
    };
    let source = error.driver_error();
    MemoryError::PlatformUnsupported { what, source }
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
        kernel.function = unsafe { driver.module_function(device, module, NAME)? };
        Ok(kernel)
    }

    /// Starts the copies.
    ///
    /// # Errors
    /// The driver's. Some of the copies may have begun then.
    ///
    /// # Safety
    /// - The stream is of this kernel's GPU and driver. The GPU may access
    ///   pages and blocks: read those that are copied from, and write the others.
    /// - Each pair's page and block have all parts of all groups, of `part_bytes` bytes each. They, `list` and this
    ///   kernel live until the work has ended.
    /// - Addresses and sizes are multiples of [`ALIGN`]; `list` has room for [`Launch::list_bytes`].
    pub(crate) unsafe fn launch(
        &self,
        launch: &Launch<'_>,
        list: &PinnedHost,
    ) -> Result<(), MemoryError> {
        let view = list.cpu();
        let mut at = 0;
        for group in &launch.groups {
            // The bases come after the entries of all pairs.
            let bases_at = at + group.entries(launch.pairs.len()) * 16;
            view.write_at(bases_at, &group.bases)?;
            for pairs in group.launches(launch.pairs.len()) {
                let entries = group.entries(pairs.len());
                let list_at = at + group.entries(pairs.start) * 16;
                launch.write(&view, list_at, group, pairs)?;
                let at = [list_at, bases_at].map(|at| list.device_ptr().add(at).0);
                // SAFETY: the caller's promise; this part of the list is written, and the bases are.
                unsafe { self.launch_part(launch, group, entries, at)? };
            }
            at = (bases_at + size_of_val(&*group.bases) as u64).next_multiple_of(16);
        }
        Ok(())
    }

    /// Launches the copies of some entries of a group, whose list and bases lie at `at`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch); `at` has the list and the bases, which stay unchanged until the work has
    /// ended.
    unsafe fn launch_part(
        &self,
        launch: &Launch<'_>,
        group: &Group,
        entries: u64,
        at: [u64; 2],
    ) -> Result<(), MemoryError> {
        let parts = group.bases.len() as u64;
        let [list, bases] = at;
        let args = [
            list,
            entries,
            bases,
            parts,
            group.part_bytes,
            launch.is_load.into(),
        ];
        // At most 2^24 × 2^32 / 2^4.
        let chunks = entries * parts * group.part_bytes.div_ceil(CHUNK);
        let useful = chunks.div_ceil(u64::from(THREADS / 32));
        let dims = LaunchDims {
            blocks: useful.clamp(1, u64::from(launch.blocks.clamp(1, MAX_BLOCKS))) as u32,
            threads: THREADS,
        };
        // SAFETY: the arguments are the kernel's: it reads the list, and copies `part_bytes` bytes for each entry and
        // base, which by the caller's promise lie in live memory that the GPU may access, at multiples of 16. The
        // CPU's writes to the list come before the launch.
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
    use crate::driver::Call;
    use egmem_core::Machine;

    /// The simulator knows no kernel of the tier's: once it is asked, it refuses for good.
    #[test]
    fn a_kernel_that_could_not_be_loaded_for_want_of_memory_is_loaded_again() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let sim = driver.sim().unwrap();
        let kernels = Kernels::default();
        sim.fail(Call::ModuleLoadData, 1, Code::OUT_OF_MEMORY);
        let code = || kernels.on(&driver, 0).unwrap_err().code();
        assert_eq!(code(), Some(Code::OUT_OF_MEMORY));
        for _ in 0..2 {
            assert_eq!(code(), Some(Code::INVALID_PTX));
            assert_eq!(sim.count(Call::ModuleLoadData), 2, "a refusal is kept");
        }
    }

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
