//! Records how this machine's driver answers random sequences of calls, or replays a recording.
//!
//! ```text
//! cargo run --release -p egmem-benches --bin record-trace -- --seqs 1000 --jobs 3 --seconds 120 --out h200.jsonl
//! cargo run --release -p egmem-benches --bin record-trace -- --replay h200.jsonl --sim h200x8
//! ```
//!
//! With `--heap` the calls are not random, but those that working heaps make.
//!
//! Recording runs in child processes, so that a driver that crashes or hangs costs one sequence. Each
//! sequence is in the file as soon as it is recorded. `gzip -9` packs a recording; `--replay` reads
//! packed ones too.

mod child;
mod heap;
mod record;
mod replay;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use egmem::{Driver, Machine};
use egmem_trace::{Sequence, Shape, generate};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Records how a driver answers random sequences of calls, or replays a recording.
#[derive(Parser, Clone)]
struct Args {
    /// How many sequences to record.
    #[arg(long, default_value_t = 240)]
    seqs: u64,
    /// Operations per sequence.
    #[arg(long, default_value_t = 64)]
    len: usize,
    /// The first sequence's seed; each next one's is one more. Drawn at random, if left out.
    #[arg(long)]
    seed: Option<u64>,
    /// How many GPUs to use.
    #[arg(long, default_value_t = 1)]
    devices: i32,
    /// How many child processes record at a time: 1 to 64.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    jobs: u64,
    /// End after this many seconds with the sequences recorded by then.
    #[arg(long)]
    seconds: Option<u64>,
    /// Print how long the driver took for each kind of operation.
    #[arg(long)]
    times: bool,
    /// Record the calls of heaps: each sequence is a heap's, until it has made so many calls, and its
    /// end. One GPU.
    #[arg(long, conflicts_with = "replay")]
    heap: bool,
    /// The file to write.
    #[arg(long, required_unless_present_any = ["replay", "child"])]
    out: Option<PathBuf>,
    /// The day to note, for example 2026-11-21; the system's, if left out.
    #[arg(long)]
    date: Option<String>,
    /// Replay this file, JSON Lines as written or packed by gzip, and print the differences.
    #[arg(long, conflicts_with = "out")]
    replay: Option<PathBuf>,
    /// With --replay: run only the sequences that killed the process, printing each operation
    /// before it. No test checks the driver's results after that.
    #[arg(long, requires = "replay")]
    crashes: bool,
    /// A simulated machine instead of this one: gh200, gh200x4, gb200 or h200x8.
    #[arg(long)]
    sim: Option<String>,
    /// Record `--seqs` sequences from `--seed` on and write to standard output: for child processes.
    #[arg(long, hide = true, requires = "seed")]
    child: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match &args.replay {
        Some(file) => replay::replay(&args, file),
        None if args.child => child::child(&args).map(|()| true),
        None => record::record(&args),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("record-trace: {error}");
            ExitCode::FAILURE
        }
    }
}

fn open(args: &Args) -> Result<Driver> {
    Ok(match &args.sim {
        Some(preset) => Driver::simulated(Machine::preset(preset)?)?,
        None => Driver::open()?,
    })
}

fn sequence(args: &Args, seed: u64) -> Result<Sequence> {
    if args.heap {
        return Ok(heap::sequence(seed, args.len)?);
    }
    let shape = Shape {
        len: args.len,
        devices: args.devices,
    };
    Ok(generate(seed, &shape))
}
