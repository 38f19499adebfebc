//! Replays a log's allocations and frees on the heap and on other allocators.

// The options and the streams are those of the command line `egmem`.
#[path = "../../../src/cli/common.rs"]
mod common;
mod entrant;
mod generate;
mod heap;
mod play;
mod plot;
mod read;
mod report;
mod threads;
mod trace;

use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgAction, Parser};
use egmem::doctor::Reason;
use egmem::size::Bytes;
use egmem::text::escape_lines;
use egmem::{Error, Result};
use egmem_replay::contestants::Room;
use flate2::read::MultiGzDecoder;
use tracing_subscriber::EnvFilter;

use self::common::{Source, complain_painted, print, print_json, progress};
use self::entrant::{Entrant, Setting};
use self::generate::{Shape, generate};
use self::heap::Ground;
use self::play::Script;
use self::read::Reading;
use self::report::Report;
use self::trace::Trace;

/// The end of the help.
const END: &str = "Exit status: 0 replayed, 1 failed, 2 for wrong usage or a log that cannot be read.\n\
                   Environment: RUST_LOG selects what is logged in place of -v, by target and level: \
                   RUST_LOG=warn,egmem_heap=debug.";

/// Replay a log of allocations on the heap and other allocators: time, space, pictures
#[derive(Parser, Debug)]
#[command(name = "replay", version, after_help = END)]
struct Replay {
    /// Log to standard error: -v for steps, -vv for each call
    #[arg(short, long, action = ArgAction::Count)]
    verbose: u8,
    /// The log: RMM's (Thread,Time,Action,Pointer,Size,Stream) or PyTorch's memory snapshot as JSON, either packed by
    /// gzip or not; - is standard input. Without a log of your own, --generate makes one up
    #[arg(value_name = "TRACE.csv|SNAPSHOT.json|-")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    source: Source,
    /// Which allocators, by name; all that this build has if not given
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    allocators: Vec<String>,
    /// How often each replays the log for the median, besides the first time
    #[arg(long, value_name = "N", default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Replay by as many threads as the log has; those that are for one thread go behind a lock
    ///
    /// Each thread keeps its order, and waits where it frees a block that another has not allocated yet. Time is
    /// from the first thread's start to the last one's end, waiting included.
    #[arg(long)]
    threads: bool,
    /// The alignment of all blocks in bytes: a power of two
    #[arg(long, value_name = "BYTES", default_value_t = 256)]
    align: u32,
    /// The bytes that each allocator may give out: 1000000, 1GiB; at least 1, rounded up to 2 MiB; twice the log's
    /// peak, each block counted with its alignment, and 64 MiB if not given
    #[arg(long, value_name = "BYTES")]
    capacity: Option<Bytes>,
    /// The NUMA node of the heap's memory; the first GPU's if not given
    #[arg(long, value_name = "N")]
    node: Option<i32>,
    /// How much of larger blocks the heap caches for each thread; the heap's default if not given
    #[arg(long, value_name = "BYTES")]
    thread_cache: Option<Bytes>,
    /// Which device of PyTorch's snapshot; the one with most entries if not given
    #[arg(long, value_name = "N")]
    device: Option<usize>,
    /// Count lines that cannot be read, and go on
    #[arg(long)]
    skip_bad: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
    /// Draw live bytes and spans over time, and times per operation
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Draw the use of the heap's memory at the moment when most of it is in use
    #[arg(long, value_name = "FILE.svg")]
    occupancy: Option<PathBuf>,

    /// Replay nothing, but print a made-up log of this shape, as those in benches/data are
    #[arg(long, value_name = "SHAPE", conflicts_with = "trace")]
    generate: Option<Shape>,
    /// The made-up log's seed
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "trace")]
    seed: u64,
    /// The made-up log's lines, about
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4800,
        conflicts_with = "trace"
    )]
    lines: usize,
}

fn main() -> ExitCode {
    let replay = Replay::parse();
    log(replay.verbose);
    replay.run().unwrap_or_else(|error| {
        let reason = Reason::from(&error);
        complain(&format!(
            "error: {}; what to do: {}\n",
            reason.message, reason.remedy
        ));
        match error {
            Error::InvalidArgument { .. } => ExitCode::from(2),
            _ => ExitCode::FAILURE,
        }
    })
}

/// Logs to standard error. `RUST_LOG` selects more than `-v` does.
fn log(verbose: u8) {
    let level = match verbose {
        0 => "warn",
        1 => "egmem=info",
        2 => "egmem=debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .without_time()
        .log_internal_errors(false)
        .init();
}

/// Writes `text` to standard error, with controls escaped.
fn complain(text: &str) {
    complain_painted(&escape_lines(text));
}

impl Replay {
    /// Replays.
    fn run(&self) -> Result<ExitCode> {
        if let Some(shape) = self.generate {
            return print(&generate(shape, self.seed, self.lines)).map(|()| ExitCode::SUCCESS);
        }
        let entrants = Entrant::choose(&self.allocators)?;
        let path = self.trace.as_deref().ok_or_else(|| {
            let why = "none is named: give a TRACE.csv, a SNAPSHOT.json or - for standard input; \
                       `--generate dataframe` makes one up";
            Error::invalid("trace", why)
        })?;
        let reading = Reading {
            skip_bad: self.skip_bad,
            device: self.device,
        };
        let trace = read::read(&contents(path)?, reading)
            .map_err(|bad| Error::invalid("trace", format!("{}: {bad}", path.display())))?;
        if trace.events.is_empty() {
            let why = format!("{} has no allocation", path.display());
            return Err(Error::invalid("trace", why));
        }
        let script = Script::new(&trace, self.align as usize).ok_or_else(|| {
            let why = format!("{} is not valid", self.align);
            Error::invalid_of("alignment", why, "a power of two, 1 to 1073741824 bytes")
        })?;
        let room = self.room(&trace)?;
        let setting = Setting {
            ground: match entrants.contains(&Entrant::Heap) {
                true => {
                    let cache = self.thread_cache.map(|Bytes(bytes)| bytes);
                    Some(Ground::new(self.source.open()?, self.node, cache)?)
                }
                false => None,
            },
            picture: self.occupancy.as_ref().map(|_| self.heading(path)),
            room,
            repeat: self.repeat,
            threads: self
                .threads
                .then(|| threads::Cast::new(&script))
                .transpose()?,
        };
        let mut report = Report::new(path, &trace, self, &setting);
        let count = entrants.len();
        for (at, entrant) in entrants.into_iter().enumerate() {
            progress(&format!(
                "replaying {} ({} of {count})",
                entrant.name(),
                at + 1
            ));
            let result = entrant.replay(&script, &setting);
            progress("");
            report.results.push(result?);
        }
        if let Some(path) = &self.plot {
            write(path, &plot::draw(&report, &trace))?;
        }
        if let Some(path) = &self.occupancy {
            let drawn = report
                .results
                .iter()
                .find_map(|result| result.picture.as_ref());
            match drawn {
                Some(svg) => write(path, svg)?,
                None => complain("warning: --occupancy: no heap took part, so nothing is drawn\n"),
            }
        }
        match self.json {
            true => print_json(&report)?,
            false => print(&report.to_text())?,
        }
        match report.broken() {
            None => Ok(ExitCode::SUCCESS),
            Some(name) => {
                complain(&format!(
                    "error: {name} gave out bytes that another block had\n"
                ));
                Ok(ExitCode::FAILURE)
            }
        }
    }

    /// Of the heap's picture.
    fn heading(&self, path: &Path) -> String {
        let simulated = match self.source.sim {
            Some(_) => ", SIMULATED",
            None => "",
        };
        format!("The heap at the peak of {}{simulated}", path.display())
    }

    fn room(&self, trace: &Trace) -> Result<Room> {
        let align = u64::from(self.align);
        let capacity = match self.capacity {
            Some(Bytes(0)) => Err(Error::invalid_of(
                "capacity",
                "0 bytes hold no block",
                "1 byte or more",
            )),
            Some(Bytes(wanted)) => Ok(wanted),
            None => Ok(plenty(trace, align)),
        }?;
        let whole = capacity.checked_next_multiple_of(Room::UNIT);
        let capacity = whole.ok_or_else(|| {
            let why = format!("{capacity} bytes are more than an address space holds");
            Error::invalid("capacity", why)
        })?;
        Ok(Room {
            capacity,
            blocks: trace.peak_blocks,
            align,
        })
    }
}

/// Returns twice the room that a log's blocks need. Up to 256 bytes of alignment are within the rounding of sizes by
/// allocators.
fn plenty(trace: &Trace, align: u64) -> u64 {
    let padding = match align > 256 {
        true => u64::from(trace.peak_blocks).saturating_mul(align),
        false => 0,
    };
    let peak = trace.peak.saturating_add(padding);
    peak.saturating_mul(2).saturating_add(64 << 20)
}

/// # Errors
/// [`Error::InvalidArgument`], as for a log that makes no sense.
fn contents(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = match path.as_os_str() == "-" {
        true => std::io::stdin().lock().read_to_end(&mut bytes).map(drop),
        false => std::fs::read(path).map(|read| bytes = read),
    };
    read.and_then(|()| unpacked(bytes)).map_err(|error| {
        let why = format!("{}: it cannot be read: {error}", path.display());
        Error::invalid("trace", why)
    })
}

/// Unpacks bytes that gzip has packed; others stay as they are.
fn unpacked(bytes: Vec<u8>) -> io::Result<Vec<u8>> {
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes);
    }
    let mut log = Vec::new();
    MultiGzDecoder::new(&bytes[..]).read_to_end(&mut log)?;
    Ok(log)
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text)
        .map_err(|error| Error::system(format!("cannot write {}", path.display()), &error))
}
