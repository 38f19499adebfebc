//! The CPU's copies through a `CpuView` beside libc's `memcpy` and `memset` on the same memory.
//!
//! `cargo bench -p egmem-benches --bench view` runs criterion; with `-- --table` all take turns in rounds instead, and
//! ratios of the medians are printed. The memory is the simulator's, which is this machine's, unless
//! `--cuda` asks for pinned memory on GPU 0's host node.

mod table;
mod work;

use std::process::ExitCode;

use clap::Parser;
use criterion::{BenchmarkId, Criterion, Throughput};
use egmem::driver::Driver;
use egmem::memory::ParallelCopy;
use egmem::{Buffer, Machine, Result};

use work::{Ways, Work};

/// From 64 bytes to 1 GiB.
const SIZES: [u64; 7] = [64, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 64 << 20, 1 << 30];

#[derive(Parser)]
struct Args {
    /// Print a table of ratios instead of criterion's report
    #[arg(long)]
    table: bool,
    /// Copy into and out of pinned memory on GPU 0's host node
    #[arg(long)]
    cuda: bool,
    /// Rounds of each size, of which the medians are shown
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// The largest size in bytes
    #[arg(long, default_value_t = 1 << 30)]
    largest: u64,
    /// The threads of parallel copies; as many as the node has CPUs by default
    #[arg(long)]
    threads: Option<usize>,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// Memory of `bytes`, by a real driver or the simulator.
fn memory(cuda: bool, bytes: u64) -> Result<Buffer> {
    if cuda {
        let driver = Driver::open()?;
        return Buffer::near(&driver, 0, bytes);
    }
    let driver = Driver::simulated(Machine::gh200())?;
    Buffer::near(&driver, 0, bytes)
}

fn criterion() -> Result<()> {
    let mut criterion = Criterion::default().configure_from_args();
    let buffer = memory(false, 64 << 20)?;
    let mut ways = Ways::new(buffer.cpu()?, ParallelCopy::new());
    for work in Work::ALL {
        let mut group = criterion.benchmark_group(format!("view/{}", work.name()));
        group.sample_size(20);
        for bytes in SIZES.into_iter().filter(|&bytes| bytes <= buffer.len()) {
            group.throughput(Throughput::Bytes(bytes));
            group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
                bencher.iter(|| ways.run(work, bytes as usize));
            });
        }
        group.finish();
    }
    criterion.final_summary();
    Ok(())
}

fn main() -> ExitCode {
    let result = match std::env::args().any(|arg| arg == "--table") {
        true => table::run(&Args::parse()),
        false => criterion(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
