//! Launches of the shapes' kernels.

use std::ffi::CStr;

use egmem::driver::{FunctionHandle, LaunchDims, ModuleHandle};
use egmem::pinned::PinnedHost;
use egmem::shapes::device;
use egmem::{Driver, Memory, Stream};

/// How long a kernel waits before it gives up, in nanoseconds.
pub const PATIENCE: u64 = 20_000_000_000;

/// The shapes' kernels on one GPU.
pub struct Kernels {
    driver: Driver,
    gpu: i32,
    module: ModuleHandle,
}

impl Kernels {
    /// Loads the kernels on GPU 0; `None` on the simulator, which knows none of them.
    pub fn load(driver: &Driver) -> Option<Self> {
        Self::load_on(driver, 0)
    }

    /// Loads the kernels on a GPU; `None` on the simulator.
    pub fn load_on(driver: &Driver, gpu: i32) -> Option<Self> {
        if driver.sim().is_some() {
            return None;
        }
        // SAFETY: the text is PTX.
        let module = unsafe { driver.module_load(gpu, device::PTX) }.unwrap();
        let kernels = Self {
            driver: driver.clone(),
            gpu,
            module,
        };
        // A kernel's first launch loads it, and that waits for the kernels that run. These find no ring and end.
        let no_ring = PinnedHost::new(driver, gpu, 4096).unwrap();
        no_ring.cpu().fill(0, 4096, 0).unwrap();
        let run = kernels.run();
        for name in [device::RING_PUSH_RECORDS, device::RING_POP_RECORDS] {
            let args = [no_ring.device_ptr().0, 0, 0, 0, run.report()];
            // SAFETY: they read less than the page, which lives until they were waited for.
            unsafe { kernels.start(&run, name, (1, 32), &args) };
        }
        drop(run);
        Some(kernels)
    }

    /// Takes kernels of another module, on GPU 0.
    ///
    /// # Safety
    /// The module is loaded, and nothing else unloads it.
    pub unsafe fn of_module(driver: &Driver, module: ModuleHandle) -> Self {
        Self {
            driver: driver.clone(),
            gpu: 0,
            module,
        }
    }

    fn function(&self, name: &CStr) -> FunctionHandle {
        // SAFETY: the module is loaded.
        unsafe { self.driver.module_function(self.gpu, self.module, name) }.unwrap()
    }

    /// Returns a stream for a kernel, and where it reports. Making them may wait for kernels that run.
    pub fn run(&self) -> Run {
        let done = PinnedHost::new(&self.driver, self.gpu, 64).unwrap();
        done.cpu().fill(0, 64, 0).unwrap();
        let stream = Stream::new(&self.driver, self.gpu).unwrap();
        Run { stream, done }
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// The arguments are the kernel's, and the memory that they point to lives until the run has been waited for.
    pub unsafe fn start(&self, run: &Run, name: &CStr, grid: (u32, u32), args: &[u64]) {
        let (blocks, threads) = grid;
        let dims = LaunchDims { blocks, threads };
        let (kernel, stream) = (self.function(name), run.stream.handle());
        // SAFETY: the caller's promise; the module is loaded.
        unsafe { self.driver.launch_kernel(kernel, dims, args, stream) }.unwrap();
    }

    /// Launches a kernel whose last argument is where it reports how many records it is done with.
    ///
    /// # Safety
    /// As for [`start`](Self::start).
    pub unsafe fn launch(&self, name: &CStr, grid: (u32, u32), args: &[u64]) -> Run {
        let run = self.run();
        // SAFETY: the caller's promise; the run has the report.
        unsafe { self.start(&run, name, grid, &[args, &[run.report()]].concat()) };
        run
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: each launch was waited for, or the test has failed.
        unsafe { self.driver.module_unload(self.gpu, self.module) }.unwrap();
    }
}

/// A kernel that runs; dropping it waits.
pub struct Run {
    stream: Stream,
    done: PinnedHost,
}

impl Run {
    /// Returns the address where the kernel reports: 64 bytes.
    pub fn report(&self) -> u64 {
        self.done.device_ptr().0
    }

    /// Waits for the kernel; returns the words that it reported.
    pub fn wait<const N: usize>(&self) -> [u64; N] {
        self.stream.synchronize().unwrap();
        let mut words = [0; N];
        self.done.cpu().read_at(0, &mut words).unwrap();
        words
    }

    /// Returns the kernel's stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // A failed test's memory must not go while the kernel runs; the kernel gives up soon.
        let _ = self.stream.synchronize();
    }
}
