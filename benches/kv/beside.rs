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
    ("kernel 2", CopyMethod::Kernel { blocks: 2 }),
    ("kernel 4", CopyMethod::Kernel { blocks: 4 }),
    ("kernel 8", CopyMethod::Kernel { blocks: 8 }),
    ("kernel 16", CopyMethod::Kernel { blocks: 16 }),
    ("batch", CopyMethod::Batch),
    ("auto", CopyMethod::Auto),
];

/// Pages: their bytes and parts.
const PAGES: [(u64, u64); 2] = [(16 << 10, 1), (64 << 10, 1)];

/// The jobs that are on the stream before the kernel starts, and after each round of it.
const AHEAD: usize = 6;

/// The multiprocessors that a kernel leaves to the copies.
const LEFT_FREE: u32 = 4;

/// Multiplications with addition in registers, by all multiprocessors.
struct Fma {
    driver: Driver,
    module: ModuleHandle,
    stream: Stream,
    sum: DeviceMemory,
}

/// How the multiplications are launched.
struct Kind {
    what: &'static str,
    function: FunctionHandle,
    dims: LaunchDims,
    launches: u32,
    rounds: u64,
}

impl Fma {
    fn load(driver: &Driver) -> Result<Self> {
        let stream = Stream::new(driver, 0)?;
        let sum = DeviceMemory::new(driver, 0, 4)?;
        // SAFETY: the text is PTX; the module is unloaded by `drop`.
        let module = unsafe { driver.module_load(0, PTX)? };
        let driver = driver.clone();
        Ok(Self {
            driver,
            module,
            stream,
            sum,
        })
    }

    /// Returns a kernel that takes 20 ms or more in all launches together.
    fn kind(
        &self,
        what: &'static str,
        name: &CStr,
        dims: LaunchDims,
        launches: u32,
    ) -> Result<Kind> {
        // SAFETY: the module is loaded.
        let function = unsafe { self.driver.module_function(0, self.module, name)? };
        let mut kind = Kind {
            what,
            function,
            dims,
            launches,
            rounds: 100,
        };
        while self.time(&kind)? < 20.0 {
            kind.rounds *= 2;
        }
        Ok(kind)
    }

    /// Runs the kernel, and returns its milliseconds.
    fn time(&self, kind: &Kind) -> Result<f64> {
        let start = Event::new(&self.driver, 0, true)?;
        let end = Event::new(&self.driver, 0, true)?;
        start.record(&self.stream)?;
        let args = [kind.rounds, self.sum.device_ptr().0];
        let stream = self.stream.handle();
        for _ in 0..kind.launches {
            // SAFETY: the arguments are the kernel's; the module and the sum live until it was waited for.
            unsafe {
                self.driver
                    .launch_kernel(kind.function, kind.dims, &args, stream)?;
            }
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
    let processors = driver.device_attribute(0, DeviceAttribute::MULTIPROCESSOR_COUNT)?;
    let processors = processors.max(1) as u32;
    let grid = |blocks, threads| LaunchDims { blocks, threads };
    let kinds = [
        fma.kind(
            "one launch of many small blocks",
            c"beside_fma",
            grid(processors * 320, 256),
            1,
        )?,
        fma.kind(
            "100 launches, each of a block that fills a multiprocessor for each of them",
            c"beside_whole",
            grid(processors, 1024),
            100,
        )?,
        fma.kind(
            "100 launches, each of a block that fills a multiprocessor for all of them but 4",
            c"beside_whole",
            grid(processors.saturating_sub(LEFT_FREE).max(1), 1024),
            100,
        )?,
    ];
    println!("\nmultiplications on all multiprocessors beside copies; medians of {rounds}");
    for (kind, (page_bytes, parts)) in kinds.iter().flat_map(|kind| PAGES.map(|page| (kind, page)))
    {
        println!("\n{}; pages of {} KiB", kind.what, page_bytes >> 10);
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
                (kind, rounds),
                &setup,
                (name, Way::ToGpu, method),
                &pairs,
            )
            .unwrap_or_else(|error| println!("{name:>10} {error}"));
        }
        let (setup, store) = setup.into_writable()?;
        let mut pages = store.pages().to_vec();
        for (name, method) in METHODS {
            let pairs = setup.random_pairs(&mut pages, &mut random);
            row(
                &fma,
                (kind, rounds),
                &setup,
                (name, Way::ToTier, method),
                &pairs,
            )
            .unwrap_or_else(|error| println!("{name:>10} {error}"));
        }
    }
    Ok(())
}

/// Measures the kernel alone and beside copies, in turn.
fn row(
    fma: &Fma,
    (kind, rounds): (&Kind, usize),
    setup: &Setup,
    (name, way, method): (&str, Way, CopyMethod),
    pairs: &[(PageId, u64)],
) -> Result<()> {
    let (mut alone, mut beside, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        alone.push(fma.time(kind)?);
        let [start, end] = [(); 2].map(|()| Event::new(&fma.driver, 0, true));
        let (start, end) = (start?, end?);
        start.record(&setup.stream)?;
        let jobs = (0..AHEAD).map(|_| setup.begin((way, method), pairs));
        let jobs = jobs.collect::<egmem::kv::Result<Vec<_>>>()?;
        end.record(&setup.stream)?;
        beside.push(fma.time(kind)?);
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
