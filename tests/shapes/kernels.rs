//! Launches of the shapes' kernels.

use std::ffi::CStr;

use egmem::driver::{LaunchDims, ModuleHandle};
use egmem::pinned::PinnedHost;
use egmem::shapes::device;
use egmem::{Driver, Memory, Stream};

/// Looks that a kernel takes before it gives up: seconds.
pub const LOOKS: u64 = 1 << 22;

/// The shapes' kernels on GPU 0, and a stream for each one that runs at a time.
pub struct Kernels {
    driver: Driver,
    module: ModuleHandle,
}

impl Kernels {
    /// Loads the kernels; `None` on the simulator, which knows none of them.
    pub fn load(driver: &Driver) -> Option<Self> {
        if driver.sim().is_some() {
            return None;
        }
        // SAFETY: the text is PTX.
        let module = unsafe { driver.module_load(0, device::PTX) }.unwrap();
        let driver = driver.clone();
        Some(Self { driver, module })
    }

    /// Launches a kernel, whose last argument is where it reports how many records it is done with.
    ///
    /// # Safety
    /// The arguments are the kernel's, and what they point to lives until the result has been waited for.
    pub unsafe fn launch(&self, name: &CStr, (blocks, threads): (u32, u32), args: &[u64]) -> Run {
        let done = PinnedHost::new(&self.driver, 0, 64).unwrap();
        done.cpu().fill(0, 64, 0).unwrap();
        let stream = Stream::new(&self.driver, 0).unwrap();
        let args = [args, &[done.device_ptr().0]].concat();
        // SAFETY: the caller's promise; the module is loaded, and `done` lives until the kernel has ended.
        unsafe {
            let kernel = self.driver.module_function(0, self.module, name).unwrap();
            let dims = LaunchDims { blocks, threads };
            self.driver
                .launch_kernel(kernel, dims, &args, stream.handle())
                .unwrap();
        }
        Run { stream, done }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: each launch was waited for, or the test has failed.
        unsafe { self.driver.module_unload(0, self.module) }.unwrap();
    }
}

/// A kernel that runs; dropping it waits.
pub struct Run {
    stream: Stream,
    done: PinnedHost,
}

impl Run {
    /// Waits for the kernel; returns the words that it reported.
    pub fn wait<const N: usize>(&self) -> [u64; N] {
        self.stream.synchronize().unwrap();
        let mut words = [0; N];
        self.done.cpu().read_at(0, &mut words).unwrap();
        words
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // A failed test's memory must not go while the kernel runs; the kernel gives up soon.
        let _ = self.stream.synchronize();
    }
}
