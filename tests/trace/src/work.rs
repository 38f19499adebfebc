//! The copies, kernels and CPU accesses of a run.

use std::collections::BTreeMap;

use super::Value;
use super::addr::{Addr, Memory};
use super::op::Op;
use super::run::{Run, Step};
use egmem::Result;
use egmem::driver::{
    Access, DevicePtr, Driver, FunctionHandle, LaunchDims, Location, ModuleHandle, StreamHandle,
};
use egmem::kernels::{CHECK_REWRITE, PTX, READ, WRITE, pattern};

/// The kernels and a scratch page for their reports, per device.
#[derive(Debug)]
pub(super) struct Work {
    driver: Driver,
    loaded: BTreeMap<i32, Kernels>,
}

#[derive(Clone, Copy, Debug)]
struct Kernels {
    module: ModuleHandle,
    check_rewrite: FunctionHandle,
    read: FunctionHandle,
    write: FunctionHandle,
    /// Two words of `cuMemHostAlloc`.
    report: DevicePtr,
}

impl Work {
    pub fn new(driver: &Driver) -> Self {
        Self {
            driver: driver.clone(),
            loaded: BTreeMap::new(),
        }
    }

    fn kernels(&mut self, device: i32) -> Result<Kernels> {
        if let Some(kernels) = self.loaded.get(&device) {
            return Ok(*kernels);
        }
        let driver = &self.driver;
        // SAFETY: the text is the crate's own PTX.
        let module = unsafe { driver.module_load(device, PTX)? };
        // SAFETY: the module is loaded.
        let function = |name| unsafe { driver.module_function(device, module, name) };
        let load = || -> Result<Kernels> {
            Ok(Kernels {
                module,
                check_rewrite: function(CHECK_REWRITE)?,
                read: function(READ)?,
                write: function(WRITE)?,
                report: driver.mem_host_alloc(device, 4096)?,
            })
        };
        let kernels = load().inspect_err(|_| {
            // SAFETY: nothing of the module runs. A module that cannot be unloaded stays loaded.
            let _ = unsafe { driver.module_unload(device, module) };
        })?;
        self.loaded.insert(device, kernels);
        Ok(kernels)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        for (device, kernels) in &self.loaded {
            // SAFETY: every launch has been waited for; nothing uses the kernels or the page again.
            // Errors leave them to the end of the process.
            unsafe {
                let _ = self.driver.mem_free_host(*device, kernels.report);
                let _ = self.driver.module_unload(*device, kernels.module);
            }
        }
    }
}

impl Run<'_> {
    pub(super) fn work_step(&mut self, op: &Op) -> Step {
        match *op {
            Op::Memset {
                at,
                value,
                bytes,
                stream,
            } => {
                let stream = self.stream(stream)?;
                let ptr = self.reach(at, bytes, stream, Access::ReadWrite)?;
                // SAFETY: `reach` says that the device may write these bytes of this run's own
                // memory, or that the address is null, which the driver refuses.
                let result = unsafe { self.driver.memset_d8_async(ptr, value, bytes, stream) };
                let result = result.and_then(|()| self.synchronize(stream));
                if result.is_ok() {
                    self.state.written(at, bytes);
                }
                Some(result.map(|()| Vec::new()))
            }
            Op::Memcpy {
                dst,
                src,
                bytes,
                stream,
            } => {
                let stream = self.stream(stream)?;
                let to = self.reach(dst, bytes, stream, Access::ReadWrite)?;
                let from = self.reach(src, bytes, stream, Access::Read)?;
                // SAFETY: as for the memset, for both ranges.
                let result = unsafe { self.driver.memcpy_async(to, from, bytes, stream) };
                let result = result.and_then(|()| self.synchronize(stream));
                if result.is_ok() {
                    self.state.written(dst, bytes);
                }
                Some(result.map(|()| Vec::new()))
            }
            Op::WriteKernel {
                at,
                words,
                seed,
                threads,
                stream,
            } => {
                let stream = self.stream(stream)?;
                let ptr = self.words(at, words, Location::Device(stream.device), true)?;
                let kernels = match self.work.kernels(stream.device) {
                    Ok(kernels) => kernels,
                    Err(error) => return Some(Err(error)),
                };
                let args = [ptr.0, words, seed];
                let result = self.launch(kernels.write, threads, &args, stream);
                if result.is_ok() {
                    self.state.written(at, words * 8);
                }
                Some(result.map(|()| Vec::new()))
            }
            Op::CheckKernel {
                at,
                words,
                expected,
                seed,
                threads,
                stream,
            } => {
                let stream = self.stream(stream)?;
                let who = Location::Device(stream.device);
                self.words(at, words, who, false)?;
                let ptr = self.words(at, words, who, true)?;
                let kernels = match self.work.kernels(stream.device) {
                    Ok(kernels) => kernels,
                    Err(error) => return Some(Err(error)),
                };
                set_report(kernels.report, [u64::MAX, 0]);
                let args = [ptr.0, words, expected, seed, kernels.report.0];
                let result = self.launch(kernels.check_rewrite, threads, &args, stream);
                Some(result.map(|()| get_report(kernels.report).map(Value::Number).into()))
            }
            Op::ReadKernel {
                at,
                words,
                threads,
                stream,
            } => {
                let stream = self.stream(stream)?;
                let ptr = self.words(at, words, Location::Device(stream.device), false)?;
                let kernels = match self.work.kernels(stream.device) {
                    Ok(kernels) => kernels,
                    Err(error) => return Some(Err(error)),
                };
                set_report(kernels.report, [0, 0]);
                let args = [ptr.0, words, kernels.report.0];
                let result = self.launch(kernels.read, threads, &args, stream);
                Some(result.map(|()| vec![Value::Number(get_report(kernels.report)[0])]))
            }
            Op::CpuWrite { at, words, seed } => {
                let ptr = self.words(at, words, Location::Host, true)?.0 as *mut u64;
                for i in 0..words {
                    // SAFETY: `words` says that the CPU may write these aligned words of this run's
                    // own memory; no GPU work is under way.
                    unsafe { ptr.add(i as usize).write_volatile(pattern(seed, i)) };
                }
                self.state.written(at, words * 8);
                Some(Ok(Vec::new()))
            }
            Op::CpuRead { at, words } => {
                let ptr = self.words(at, words, Location::Host, false)?.0 as *const u64;
                let sum = (0..words).fold(0xcbf2_9ce4_8422_2325_u64, |sum, i| {
                    // SAFETY: as above, for reading.
                    let word = unsafe { ptr.add(i as usize).read_volatile() };
                    (sum ^ word).wrapping_mul(0x100_0000_01b3)
                });
                Some(Ok(vec![Value::Number(sum)]))
            }
            _ => None,
        }
    }

    /// The address of bytes that the stream's device may use, or null.
    fn reach(&self, at: Addr, bytes: u64, stream: StreamHandle, need: Access) -> Option<DevicePtr> {
        match at {
            Addr {
                of: Memory::Nowhere,
                offset: 0,
            } => Some(DevicePtr(0)),
            _ => {
                let who = Location::Device(stream.device);
                self.state.accessible(at, bytes, who, need)
            }
        }
    }

    /// The address of aligned words that `who` may use.
    fn words(&self, at: Addr, words: u64, who: Location, write: bool) -> Option<DevicePtr> {
        let need = if write {
            Access::ReadWrite
        } else {
            Access::Read
        };
        let bytes = words.checked_mul(8)?;
        let ptr = self.state.accessible(at, bytes, who, need)?;
        ptr.0.is_multiple_of(8).then_some(ptr)
    }

    fn launch(
        &self,
        function: FunctionHandle,
        threads: u32,
        args: &[u64],
        stream: StreamHandle,
    ) -> Result<()> {
        let dims = LaunchDims { blocks: 4, threads };
        // SAFETY: the arguments are the kernel's, the range is checked by `words`, and the report is
        // a live page that every device reaches.
        unsafe { self.driver.launch_kernel(function, dims, args, stream) }?;
        self.synchronize(stream)
    }
}

fn set_report(report: DevicePtr, words: [u64; 2]) {
    // SAFETY: the page is live, aligned, writable by the CPU, and no kernel is under way.
    unsafe { (report.0 as *mut [u64; 2]).write_volatile(words) }
}

fn get_report(report: DevicePtr) -> [u64; 2] {
    // SAFETY: as above, for reading.
    unsafe { (report.0 as *const [u64; 2]).read_volatile() }
}
