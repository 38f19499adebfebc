//! The KV-cache tier: copies of random pages by method, a kernel beside them, checksums, restarts through the service.
//!
//! ```text
//! cargo bench -p egmem-benches --bench kv -- [--part copies|backings|borders|beside|verify|table|restart|start] [--cuda] [--rounds 5]
//! ```
//! Without `--cuda` on the simulator, with little memory: times mean nothing there, except those of checksums and of the table, which the CPU computes.

mod backings;
mod beside;
mod borders;
mod copies;
mod restart;
mod setup;
mod table;
mod verify;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use egmem::{Driver, Machine};

/// A result with any error, for a program.
pub type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Part {
    Copies,
    Backings,
    Borders,
    Beside,
    Verify,
    Table,
    Restart,
    Start,
}

#[derive(Parser)]
/// The options of the program.
pub struct Args {
    /// Only these parts; otherwise all
    #[arg(long)]
    part: Vec<Part>,
    /// Rounds, of which the medians are shown
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// On GPU 0 and its host node; otherwise on the simulator
    #[arg(long)]
    cuda: bool,
    /// The role of this process in the parts `restart` and `start`
    #[arg(long, hide = true)]
    role: Option<restart::Role>,
    /// The socket of the service
    #[arg(long, hide = true, default_value = "")]
    at: String,
    /// The bytes of the role's tier
    #[arg(long, hide = true, default_value_t = 0)]
    bytes: u64,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

impl Args {
    fn driver(&self) -> Result<Driver> {
        Ok(match self.cuda {
            true => Driver::open()?,
            false => Driver::simulated(Machine::gh200())?,
        })
    }
}

fn run(args: &Args) -> Result<()> {
    if let Some(role) = args.role {
        return restart::play(args, role);
    }
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    if wanted(Part::Copies) {
        copies::run(&args.driver()?, args.rounds.max(1))?;
    }
    if wanted(Part::Backings) {
        backings::run(&args.driver()?, args.rounds.max(1))?;
    }
    if wanted(Part::Borders) {
        borders::run(&args.driver()?)?;
    }
    if wanted(Part::Beside) {
        beside::run(&args.driver()?, args.rounds.max(1))?;
    }
    if wanted(Part::Verify) {
        verify::run(&args.driver()?, args.rounds.max(1))?;
    }
    if wanted(Part::Table) {
        table::run(&args.driver()?, args.rounds.max(1))?;
    }
    if wanted(Part::Restart) {
        restart::restart(args)?;
    }
    if wanted(Part::Start) {
        restart::start(args)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kv: {error}");
            ExitCode::FAILURE
        }
    }
}
