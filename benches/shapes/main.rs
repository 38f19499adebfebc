//! Shapes of memory beside their alternatives, in one table for each part.
//!
//! ```text
//! cargo bench -p egmem-benches --bench shapes -- [--part growing|striped|replicated|peer|ring|ring-processes|appender|device-malloc] [--cuda] [--rounds 5] [--size 64MiB] [--on-gpu]
//! ```
//! Times on the simulator are not those of any GPU: only work of CPUs alone has a meaning there.

mod appender;
mod gpu;
mod growing;
mod peer;
mod processes;
mod replicated;
mod ring;
mod striped;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use egmem::size::Bytes;
use egmem::{Driver, Machine, share};

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Part {
    Growing,
    Striped,
    Replicated,
    Peer,
    Ring,
    RingProcesses,
    Appender,
    /// Records in pieces of the device's heap: may take seconds; not among all
    DeviceMalloc,
}

#[derive(Parser)]
struct Args {
    /// Only these parts; otherwise all
    #[arg(long)]
    part: Vec<Part>,
    /// Growing: to this size; striped and replicated: of this size
    #[arg(long, default_value = "64MiB")]
    size: Bytes,
    /// Rounds, of which the medians are shown
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Growing: memory of GPU 0 instead of its host node
    #[arg(long)]
    on_gpu: bool,
    /// On GPU 0 and its host node; otherwise on the simulator
    #[arg(long)]
    cuda: bool,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn run(args: &Args, driver: &Driver) -> share::Result<ExitCode> {
    let rounds = args.rounds.max(1);
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    if wanted(Part::Growing) {
        growing::run(driver, args.size.0, rounds, args.on_gpu)?;
    }
    if wanted(Part::Striped) {
        striped::run(driver, args.size.0, rounds)?;
    }
    if wanted(Part::Replicated) {
        replicated::run(driver, args.size.0, rounds)?;
    }
    if wanted(Part::Peer) {
        peer::run(driver, rounds)?;
    }
    if wanted(Part::Ring) {
        ring::run(driver, rounds)?;
    }
    if wanted(Part::RingProcesses) {
        processes::run(driver)?;
    }
    if wanted(Part::Appender) {
        appender::run(driver, rounds)?;
    }
    if args.part.contains(&Part::DeviceMalloc) {
        appender::run_device_malloc(driver, rounds)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let args = Args::parse();
    let driver = match args.cuda {
        true => Driver::open(),
        false => Driver::simulated(Machine::gh200x4()),
    };
    let result = match &driver {
        Ok(driver) => processes::child(driver).map_or_else(|| run(&args, driver), Ok),
        Err(error) => Err(error.clone().into()),
    };
    result.unwrap_or_else(|error| {
        eprintln!("{error}");
        ExitCode::FAILURE
    })
}
