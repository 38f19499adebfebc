//! A kernel that computes while pages are copied: how much longer it takes.

use std::ffi::CStr;

use egmem::driver::{DeviceAttribute, FunctionHandle, LaunchDims, ModuleHandle};
use egmem::kv::{CopyMethod, PageId};
use egmem::pinned::DeviceMemory;
use egmem::{Driver, Event, Memory, Stream};

use crate::Result;
use crate::setup::{Setup, Way, median};

const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("fma.ptx"), "\0").as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("fma.ptx holds a NUL"),
    };

const METHODS: [(&str, CopyMethod); 6] = [
    ("kernel 8", CopyMethod::Kernel { blocks: 8 }),
    ("kernel 16", CopyMethod::Kernel { blocks: 16 }),
    ("kernel 24", CopyMethod::Kernel { blocks: 24 }),
    ("kernel 32", CopyMethod::Kernel { blocks: 32 }),
    ("batch", CopyMethod::Batch),
    ("auto", CopyMethod::Auto),
];

/// The jobs that are on the stream before the kernel starts, and after each round of it.
const AHEAD: usize = 6;

/// Multiplications with addition in registers, by all multiprocessors, in many short blocks.
struct Fma {
    driver: Driver,
    module: ModuleHandle,
    function: FunctionHandle,
    stream: Stream,
    sum: DeviceMemory,
    dims: LaunchDims,
}

impl Fma {
    fn load(driver: &Driver) -> Result<Self> {
        let stream = Stream::new(driver, 0)?;
        let sum = DeviceMemory::new(driver, 0, 4)?;
        let processors = driver.device_attribute(0, DeviceAttribute::MULTIPROCESSOR_COUNT)?;
        // SAFETY: the text is PTX; the module is unloaded by `drop`.
        let (module, function) = unsafe {
            let module = driver.module_load(0, PTX)?;
            (module, driver.module_function(0, module, c"beside_fma")?)
        };
        let dims = LaunchDims {
            blocks: processors.max(1) as u32 * 8 * 40,
            threads: 256,
        };
        let driver = driver.clone();
        Ok(Self {
            driver,
            module,
            function,
            stream,
            sum,
            dims,
        })
    }

    /// Runs the kernel, and returns its milliseconds.
    fn time(&self, rounds: u64) -> Result<f64> {
        let [start, end] = [
            Event::new(&self.driver, 0, true)?,
            Event::new(&self.driver, 0, true)?,
        ];
        start.record(&self.stream)?;
        let args = [rounds, self.sum.device_ptr().0];
        // SAFETY: the arguments are the kernel's; the module and the sum live until it was waited for.
        unsafe {
            self.driver
                .launch_kernel(self.function, self.dims, &args, self.stream.handle())?;
        }
        end.record(&self.stream)?;
        self.stream.finish()?;
        Ok(end.elapsed_ms_since(&start)?.into())
    }
}

impl Drop for Fma {
    fn drop(&mut self) {
        // SAFETY: every launch was waited for.
        let _ = unsafe { self.driver.module_unload(0, self.module) };
    }
}

pub fn run(driver: &Driver, rounds: usize) -> Result<()> {
    if driver.is_simulated() {
        println!("\nbeside a kernel: the simulator runs none");
        return Ok(());
    }
    let fma = Fma::load(driver)?;
    let mut work = 1000;
    while fma.time(work)? < 20.0 {
        work *= 2;
    }
    println!(
        "\na kernel of multiplications on all multiprocessors beside copies; medians of {rounds}"
    );
    for (page_bytes, parts) in [(16 << 10, 1), (64 << 10, 1), (2 << 20, 1)] {
        println!("\n{} KiB", page_bytes >> 10);
        println!(
            "{:>10} {:>8} {:>9} {:>9} {:>7} {:>7}",
            "method", "way", "alone ms", "beside ms", "loss", "GB/s"
        );
        let setup = Setup::new(driver, page_bytes, parts)?;
        let mut random = fastrand::Rng::new();
        for (name, method) in METHODS {
            let pairs = setup.loads(&mut random);
            row(
                &fma,
                (work, rounds),
                &setup,
                (name, Way::ToGpu, method),
                &pairs,
            )?;
        }
        let (setup, store) = setup.into_writable()?;
        let mut pages = store.pages().to_vec();
        for (name, method) in METHODS {
            let pairs = setup.random_pairs(&mut pages, &mut random);
            row(
                &fma,
                (work, rounds),
                &setup,
                (name, Way::ToTier, method),
                &pairs,
            )?;
        }
    }
    Ok(())
}

/// Measures the kernel alone and beside copies, in turn.
fn row(
    fma: &Fma,
    (work, rounds): (u64, usize),
    setup: &Setup,
    (name, way, method): (&str, Way, CopyMethod),
    pairs: &[(PageId, u64)],
) -> Result<()> {
    let (mut alone, mut beside, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        alone.push(fma.time(work)?);
        let [start, end] = [(); 2].map(|()| Event::new(&fma.driver, 0, true));
        let (start, end) = (start?, end?);
        start.record(&setup.stream)?;
        let jobs = (0..AHEAD).map(|_| setup.begin((way, method), pairs));
        let jobs = jobs.collect::<egmem::kv::Result<Vec<_>>>()?;
        end.record(&setup.stream)?;
        beside.push(fma.time(work)?);
        for job in jobs {
            job.wait()?;
        }
        let seconds = f64::from(end.elapsed_ms_since(&start)?) / 1e3;
        rates.push((AHEAD as u64 * setup.bytes()) as f64 / seconds / 1e9);
    }
    let (alone, beside) = (median(alone), median(beside));
    let loss = (beside / alone - 1.0) * 100.0;
    println!(
        "{name:>10} {:>8} {alone:>9.2} {beside:>9.2} {loss:>6.1}% {:>7.1}",
        format!("{way:?}"),
        median(rates)
    );
    Ok(())
}
