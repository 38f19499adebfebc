//! Launches of the shapes' kernels.

use std::ffi::CStr;

use egmem::driver::{LaunchDims, ModuleHandle};
use egmem::pinned::PinnedHost;
use egmem::{Driver, Memory, Result, Stream};

/// The kernels, loaded on a GPU.
pub struct Kernels {
    driver: Driver,
    gpu: i32,
    module: ModuleHandle,
    pub stream: Stream,
    /// Where kernels report; 64 bytes.
    pub report: PinnedHost,
}

impl Kernels {
    pub fn load(driver: &Driver, ptx: &CStr) -> Result<Self> {
        Self::load_on(driver, 0, ptx)
    }

    pub fn load_on(driver: &Driver, gpu: i32, ptx: &CStr) -> Result<Self> {
        Ok(Self {
            stream: Stream::new(driver, gpu)?,
            report: PinnedHost::new(driver, gpu, 64)?,
            // SAFETY: the callers pass PTX.
            module: unsafe { driver.module_load(gpu, ptx)? },
            driver: driver.clone(),
            gpu,
        })
    }

    /// Starts a kernel; the report's address is added to its arguments.
    ///
    /// # Safety
    /// The arguments are the kernel's, and their memory lives until the stream was synchronised.
    pub unsafe fn start(&self, name: &CStr, dims: (u32, u32), args: &[u64]) -> Result<()> {
        let args = [args, &[self.report.device_ptr().0]].concat();
        // SAFETY: the caller's promise; the report lives.
        unsafe { self.start_bare(name, dims, &args) }
    }

    /// Starts a kernel that reports nothing.
    ///
    /// # Safety
    /// As for [`start`](Self::start).
    pub unsafe fn start_bare(&self, name: &CStr, dims: (u32, u32), args: &[u64]) -> Result<()> {
        let (blocks, threads) = dims;
        // SAFETY: the caller's promise; the module is loaded.
        unsafe {
            let kernel = self.driver.module_function(self.gpu, self.module, name)?;
            let dims = LaunchDims { blocks, threads };
            self.driver
                .launch_kernel(kernel, dims, args, self.stream.handle())
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: the stream is waited for, and launches are the stream's.
        let result = unsafe {
            self.stream
                .synchronize()
                .and(self.driver.module_unload(self.gpu, self.module))
        };
        if let Err(error) = result {
            eprintln!("{error}");
        }
    }
}

/// Returns the median and the value that 99 of 100 do not exceed.
pub fn median_and_p99(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |part: f64| values[((values.len() - 1) as f64 * part) as usize];
    (at(0.5), at(0.99))
}
