//! Proves that the CPU and a GPU see the same bytes.

use std::ffi::CStr;
use std::sync::Mutex;

use crate::driver::{
    Access, DeviceAttribute, Driver, FunctionHandle, LaunchDims, Location, ModuleHandle,
};
use crate::kernels::{self, pattern};
use crate::memory::{CpuView, Engine, GrantUse, Memory, expect_gpu_access};
use crate::per_driver::lock;
use crate::pinned::PinnedHost;
use crate::stream::Stream;
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

/// Runs the crate's kernels on one GPU, to prove memory and to measure its speed.
///
/// Each call waits for its kernel. Words are 64 bits; see [`kernels`] for the pattern.
#[derive(Debug)]
pub struct Prover {
    driver: Driver,
    stream: Stream,
    report: PinnedHost,
    /// Held while `report` contains a result.
    reporting: Mutex<()>,
    kernels: Kernels,
    blocks: u32,
}

/// Kernels, loaded on a GPU. Launches of them must have ended when this is dropped: the unsafe call that launches one promises that.
#[doc(hidden)]
#[derive(Debug)]
pub struct Module {
    driver: Driver,
    device: i32,
    module: ModuleHandle,
}

impl Module {
    /// Loads PTX.
    ///
    /// # Errors
    /// The driver's: INVALID_PTX, NO_BINARY_FOR_GPU.
    ///
    /// # Safety
    /// The text is PTX, or another form that [`Driver::module_load`] takes.
    pub unsafe fn load(driver: &Driver, device: i32, ptx: &CStr) -> Result<Self> {
        // SAFETY: the caller's promise.
        let module = unsafe { driver.module_load(device, ptx)? };
        Ok(Self {
            driver: driver.clone(),
            device,
            module,
        })
    }

    /// Returns a kernel, which is valid as long as this lives.
    ///
    /// # Errors
    /// The driver's, for a name that the module does not have.
    pub fn function(&self, name: &CStr) -> Result<FunctionHandle> {
        // SAFETY: `self` keeps the module loaded.
        unsafe { self.driver.module_function(self.device, self.module, name) }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        give_back_or_log(&self.driver, "a module", || {
            // SAFETY: owned by `self`; every launch has ended, as its caller has promised.
            unsafe { self.driver.module_unload(self.device, self.module) }
        });
    }
}

/// This crate's kernels, loaded on a GPU.
#[doc(hidden)]
#[derive(Debug)]
pub struct Kernels {
    /// Checks words against a pattern, and writes another.
    pub check_rewrite: FunctionHandle,
    /// Reads words.
    pub read: FunctionHandle,
    /// Writes a pattern.
    pub write: FunctionHandle,
    _module: Module,
}

impl Kernels {
    /// Loads them.
    ///
    /// # Errors
    /// Those of [`Module::load`].
    pub fn load(driver: &Driver, device: i32) -> Result<Self> {
        // SAFETY: the text is the crate's own PTX.
        let module = unsafe { Module::load(driver, device, kernels::PTX)? };
        Ok(Self {
            check_rewrite: module.function(kernels::CHECK_REWRITE)?,
            read: module.function(kernels::READ)?,
            write: module.function(kernels::WRITE)?,
            _module: module,
        })
    }
}

const THREADS: u32 = 256;

impl Prover {
    /// Loads the kernels on GPU `device`.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], or the driver's error: INVALID_PTX, NO_BINARY_FOR_GPU.
    pub fn new(driver: &Driver, device: i32) -> Result<Self> {
        let stream = Stream::new(driver, device)?;
        let report = PinnedHost::new(driver, device, 4096)?;
        let processors = driver
            .device_attribute(device, DeviceAttribute::MULTIPROCESSOR_COUNT)?
            .clamp(1, 4096) as u32;
        Ok(Self {
            driver: driver.clone(),
            stream,
            report,
            reporting: Mutex::new(()),
            kernels: Kernels::load(driver, device)?,
            blocks: processors * 8,
        })
    }

    /// Proves memory that the CPU can reach: the CPU writes a pattern, the GPU checks it and writes another,
    /// the CPU checks that. Overwrites the memory.
    ///
    /// # Errors
    /// [`Error::WrongBytes`] with the reader and the place; [`Error::NotAccessible`] if the CPU or the GPU
    /// may not read and write, before any byte is written; [`Error::InvalidArgument`] for memory that does
    /// not begin at a multiple of 8.
    pub fn prove(&self, memory: &impl Memory, cpu: &CpuView<'_>, seed: u64) -> Result<()> {
        let next = !seed;
        let _grants = self.expect_access(memory, Access::ReadWrite)?;
        write_pattern(cpu, seed)?;
        self.check_rewrite(memory, seed, next)
            .map_err(|mut error| {
                if let Error::WrongBytes { offset, found, .. } = &mut error {
                    *found = cpu.get(*offset).unwrap_or_default();
                }
                error
            })?;
        check_pattern(cpu, next)
    }

    /// Has the GPU check that the memory has the pattern of `expected` and write that of `next`.
    ///
    /// # Errors
    /// [`Error::WrongBytes`], with an unknown `found` (0) for memory that the CPU cannot reach;
    /// [`Error::NotAccessible`] if the GPU may not read and write; [`Error::InvalidArgument`] as for
    /// [`prove`](Self::prove).
    pub fn check_rewrite(&self, memory: &impl Memory, expected: u64, next: u64) -> Result<()> {
        let _reporting = lock(&self.reporting);
        self.report.cpu().write_at(0, &[u64::MAX, 0])?;
        let args = [expected, next, self.report.device_ptr().0];
        self.run(memory, Access::ReadWrite, self.kernels.check_rewrite, &args)?;
        let mut report = [0_u64; 2];
        self.report.cpu().read_at(0, &mut report)?;
        match report {
            [_, 0] => Ok(()),
            [first, _] => Err(Error::WrongBytes {
                by: Location::Device(self.stream.device()),
                offset: first.saturating_mul(8),
                expected: pattern(expected, first),
                found: 0,
            }),
        }
    }

    /// Has the GPU write the pattern of `seed`.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] if the GPU may not write; [`Error::InvalidArgument`] as for
    /// [`prove`](Self::prove).
    pub fn write(&self, memory: &impl Memory, seed: u64) -> Result<()> {
        self.run(memory, Access::ReadWrite, self.kernels.write, &[seed])
    }

    /// Has the GPU read all words; returns their exclusive or.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] if the GPU may not read; [`Error::InvalidArgument`] as for
    /// [`prove`](Self::prove).
    pub fn read(&self, memory: &impl Memory) -> Result<u64> {
        let _reporting = lock(&self.reporting);
        self.report.cpu().put(0, 0_u64)?;
        let args = [self.report.device_ptr().0];
        self.run(memory, Access::Read, self.kernels.read, &args)?;
        self.report.cpu().get(0)
    }

    /// Submits [`write`](Self::write) to the stream without waiting, for measurements.
    ///
    /// # Errors
    /// The driver's errors.
    ///
    /// # Safety
    /// The memory and the prover live until the stream is synchronised; memory of a pool was allocated on
    /// this stream, or the allocation was waited for.
    pub unsafe fn launch_write(&self, memory: &impl Memory, seed: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch(memory, self.kernels.write, &[seed]) }
    }

    /// Submits [`read`](Self::read) to the stream without waiting, for measurements.
    ///
    /// # Errors
    /// The driver's errors.
    ///
    /// # Safety
    /// As for [`launch_write`](Self::launch_write).
    pub unsafe fn launch_read(&self, memory: &impl Memory) -> Result<()> {
        let args = [self.report.device_ptr().0];
        // SAFETY: the caller's promise.
        unsafe { self.launch(memory, self.kernels.read, &args) }
    }

    /// Returns the stream that the kernels run on.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Checks the GPU's access, which cannot be revoked while the result lives.
    fn expect_access(&self, memory: &impl Memory, need: Access) -> Result<Option<GrantUse>> {
        self.driver.expect_this_process("prover")?;
        self.driver.expect_same(memory.driver(), "memory")?;
        self.stream.expect_no_capture()?;
        let grants = memory.hold_grants();
        let by = (self.stream.device(), Engine::Kernel);
        expect_gpu_access(memory, by, (0, memory.len()), need)?;
        Ok(grants)
    }

    /// Runs a kernel on all words and waits for it.
    fn run(
        &self,
        memory: &impl Memory,
        need: Access,
        kernel: FunctionHandle,
        args: &[u64],
    ) -> Result<()> {
        let _grants = self.expect_access(memory, need)?;
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe { memory.ready_on(self.stream.handle())? };
        // SAFETY: the memory is borrowed until the kernel is done.
        let launched = unsafe { self.launch(memory, kernel, args) };
        launched.and(self.stream.finish())
    }

    /// Launches a kernel whose first arguments are the memory and its number of words.
    ///
    /// # Safety
    /// The memory stays allocated until the stream is synchronised.
    unsafe fn launch(
        &self,
        memory: &impl Memory,
        kernel: FunctionHandle,
        args: &[u64],
    ) -> Result<()> {
        self.driver.expect_same(memory.driver(), "memory")?;
        let start = memory.device_ptr();
        if !start.0.is_multiple_of(8) {
            // A GPU that reads a word at such an address would lose its context.
            let why = format!("{start:?} is not aligned to words of 8 bytes");
            return Err(Error::invalid("memory", why));
        }
        let words = memory.len() / 8;
        let needed = words
            .div_ceil(u64::from(THREADS))
            .clamp(1, u64::from(self.blocks));
        let dims = LaunchDims {
            blocks: needed as u32,
            threads: THREADS,
        };
        let args = [&[start.0, words][..], args].concat();
        // SAFETY: the kernel is the crate's own and stays inside `words`; the caller promises that the memory
        // lives; a GPU without access faults, which the driver reports.
        unsafe {
            self.driver
                .launch_kernel(kernel, dims, &args, self.stream.handle())
        }
    }
}

/// The words written or read at a time.
const CHUNK: usize = 4096;

/// Writes the pattern of `seed` with the CPU; leaves bytes beyond the last whole word alone.
///
/// # Errors
/// [`Error::NotAccessible`] if the CPU may only read.
pub fn write_pattern(cpu: &CpuView<'_>, seed: u64) -> Result<()> {
    let mut words = [0_u64; CHUNK];
    for_chunks(cpu, |first, count| {
        for (i, word) in words[..count].iter_mut().enumerate() {
            *word = pattern(seed, first + i as u64);
        }
        cpu.write_at(first * 8, &words[..count])
    })
}

/// Checks with the CPU that the memory has the pattern of `seed`.
///
/// # Errors
/// [`Error::WrongBytes`] with the first wrong word.
pub fn check_pattern(cpu: &CpuView<'_>, seed: u64) -> Result<()> {
    let mut words = [0_u64; CHUNK];
    for_chunks(cpu, |first, count| {
        cpu.read_at(first * 8, &mut words[..count])?;
        for (i, &found) in words[..count].iter().enumerate() {
            let at = first + i as u64;
            let expected = pattern(seed, at);
            if found != expected {
                return Err(Error::WrongBytes {
                    by: Location::Host,
                    offset: at * 8,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    })
}

fn for_chunks(cpu: &CpuView<'_>, mut work: impl FnMut(u64, usize) -> Result<()>) -> Result<()> {
    let words = cpu.len() / 8;
    let mut first = 0;
    while first < words {
        let count = (words - first).min(CHUNK as u64);
        work(first, count as usize)?;
        first += count;
    }
    Ok(())
}
