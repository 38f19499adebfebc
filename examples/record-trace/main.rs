//! Records how this machine's driver answers random sequences of calls, or replays a recording.
//!
//! ```text
//! cargo run --release --example record-trace -- --seqs 240 --len 64 --seed 1 --out h200.jsonl
//! cargo run --release --example record-trace -- --replay h200.jsonl --sim h200x8
//! ```
//!
//! With `--heap` the calls are not random, but what heaps at work ask of the driver.
//!
//! Recording runs in child processes, so that a driver that crashes costs one sequence.

#[cfg(feature = "share")]
mod heap;

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use clap::Parser;
use egmem::trace::{
    Crash, Header, Line, Outcome, Recorded, Report, Runner, Sequence, Shape, compare, generate,
};
use egmem::{Driver, Machine};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Records how a driver answers random sequences of calls, or replays a recording.
#[derive(Parser, Clone)]
struct Args {
    /// How many sequences to record.
    #[arg(long, default_value_t = 240)]
    seqs: u64,
    /// Operations per sequence.
    #[arg(long, default_value_t = 64)]
    len: usize,
    /// The first sequence's seed; each next one's is one more.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many GPUs to use.
    #[arg(long, default_value_t = 1)]
    devices: i32,
    /// What heaps at work ask for: each sequence is a heap's, until it has made so many calls, and its
    /// end. One GPU.
    #[cfg(feature = "share")]
    #[arg(long, conflicts_with = "replay")]
    heap: bool,
    /// The file to write.
    #[arg(long, required_unless_present_any = ["replay", "child"])]
    out: Option<PathBuf>,
    /// The day to note, for example 2026-11-21; the system's, if left out.
    #[arg(long)]
    date: Option<String>,
    /// Replay this file instead, and print the differences.
    #[arg(long, conflicts_with = "out")]
    replay: Option<PathBuf>,
    /// With --replay: run only the sequences that killed the process, printing each operation
    /// before it. What the driver then does is no test's business.
    #[arg(long, requires = "replay")]
    crashes: bool,
    /// A simulated machine instead of this one: gh200, gh200x4, gb200 or h200x8.
    #[arg(long)]
    sim: Option<String>,
    /// Record from this sequence on and write to standard output: for child processes.
    #[arg(long, hide = true)]
    child: Option<u64>,
}

/// Longer than any sequence takes; a driver that hangs is killed then.
const PATIENCE: Duration = Duration::from_secs(60);
/// A driver that dies this often has told enough.
const MAX_CRASHES: usize = 25;

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match (&args.replay, args.child) {
        (Some(file), _) => replay(&args, file),
        (None, Some(first)) => child(&args, first).map(|()| true),
        (None, None) => record(&args),
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

fn record(args: &Args) -> Result<bool> {
    let path = args.out.as_deref().ok_or("--out is missing")?;
    // The driver before the file, so that none is left behind where there is no driver.
    let header = header(args)?;
    let mut out = BufWriter::new(File::create(path)?);
    let mut put = |line: &Line| -> Result<()> {
        serde_json::to_writer(&mut out, line)?;
        out.write_all(b"\n")?;
        Ok(out.flush()?)
    };
    put(&Line::Header(header))?;
    let (mut next, mut crashes, mut left) = (0, 0, 0);
    while next < args.seqs {
        let start = next;
        run_child(args, start, |event| {
            match event {
                Event::Recorded(recorded) => {
                    next += 1;
                    left += recorded.left.len();
                    put(&Line::Sequence(*recorded))?;
                    if std::io::stderr().is_terminal() {
                        eprint!("\r{next} of {} sequences", args.seqs);
                    }
                }
                Event::Crashed { op, how } => {
                    let sequence = sequence(args, args.seed + next)?;
                    eprintln!("sequence {} died at operation {op}: {how}", sequence.seed);
                    next += 1;
                    crashes += 1;
                    put(&Line::Crash(Crash { sequence, op, how }))?;
                }
            }
            Ok(())
        })?;
        if next == start {
            return Err("a child process ended without a word".into());
        }
        if crashes >= MAX_CRASHES {
            return Err(format!("{crashes} crashes: giving up after {next} sequences").into());
        }
    }
    let bytes = std::fs::metadata(path)?.len();
    eprintln!(
        "{}: {next} sequences, {crashes} crashes, {left} objects that could not be given back, {bytes} bytes",
        path.display()
    );
    Ok(crashes == 0)
}

fn shape(args: &Args) -> Shape {
    Shape {
        len: args.len,
        devices: args.devices,
    }
}

fn sequence(args: &Args, seed: u64) -> Result<Sequence> {
    #[cfg(feature = "share")]
    if args.heap {
        return Ok(heap::sequence(seed, args.len)?);
    }
    Ok(generate(seed, &shape(args)))
}

fn header(args: &Args) -> Result<Header> {
    let driver = open(args)?;
    let gpus = driver.device_count()?;
    if args.devices > gpus {
        return Err(format!("{} GPUs asked for, {gpus} there", args.devices).into());
    }
    Ok(Header {
        format: 1,
        date: args.date.clone().unwrap_or_else(today),
        backend: driver.name().into(),
        gpu: driver.device_name(0)?,
        gpus,
        driver: if driver.is_simulated() {
            "simulated".into()
        } else {
            kernel_driver().unwrap_or_else(|| "unknown".into())
        },
        cuda: driver.driver_version()?,
        crate_version: env!("CARGO_PKG_VERSION").into(),
        seed: args.seed,
        len: args.len,
        devices: args.devices,
    })
}

/// The version in `/proc/driver/nvidia/version`, such as 580.159.04.
fn kernel_driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let is_version =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split_whitespace().find(is_version).map(str::to_string)
}

/// The day by the system's clock, UTC. Source: Hinnant, "chrono-compatible low-level date
/// algorithms", `civil_from_days`.
fn today() -> String {
    let seconds = SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |elapsed| elapsed.as_secs());
    let z = seconds / 86_400 + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, (mp + 2) % 12 + 1);
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

enum Event {
    Recorded(Box<Recorded>),
    Crashed { op: usize, how: String },
}

/// Records from sequence `first` on in a child process, until it ends.
fn run_child(args: &Args, first: u64, mut on: impl FnMut(Event) -> Result<()>) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--child", &first.to_string()])
        .args(["--seqs", &args.seqs.to_string()])
        .args(["--len", &args.len.to_string()])
        .args(["--seed", &args.seed.to_string()])
        .args(["--devices", &args.devices.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    #[cfg(feature = "share")]
    if args.heap {
        command.arg("--heap");
    }
    if let Some(preset) = &args.sim {
        command.args(["--sim", preset]);
    }
    let mut child = command.spawn()?;
    let stdout = child.stdout.take().ok_or("no pipe to the child")?;
    let (send, lines) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout)
            .lines()
            .map_while(std::io::Result::ok)
        {
            if send.send(line).is_err() {
                break;
            }
        }
    });
    // The operation under way, while a sequence is.
    let mut under_way = None;
    let hung = loop {
        match lines.recv_timeout(PATIENCE) {
            Ok(line) => match line.strip_prefix('@') {
                Some(op) => under_way = Some(op.parse()?),
                None => {
                    under_way = None;
                    on(Event::Recorded(serde_json::from_str(&line)?))?;
                }
            },
            Err(mpsc::RecvTimeoutError::Timeout) => break true,
            Err(mpsc::RecvTimeoutError::Disconnected) => break false,
        }
    };
    if hung {
        child.kill()?;
    }
    let status = child.wait()?;
    // The pipe is closed now, unless a grandchild holds it: none is ever made.
    reader.join().map_err(|_| "the reader died")?;
    match under_way {
        Some(op) if hung => on(Event::Crashed {
            op,
            how: format!("no answer for {} s", PATIENCE.as_secs()),
        }),
        Some(op) => on(Event::Crashed {
            op,
            how: status.to_string(),
        }),
        // What it recorded is recorded; one that recorded nothing ends the recording.
        None if !status.success() => {
            eprintln!("a child process failed between sequences: {status}");
            Ok(())
        }
        None => Ok(()),
    }
}

/// Writes `@op` before each operation and a line per sequence; stops after a sequence that lost
/// the GPU's context.
fn child(args: &Args, first: u64) -> Result<()> {
    let mut runner = Runner::new(&open(args)?);
    let mut out = std::io::stdout().lock();
    for seed in args.seed + first..args.seed + args.seqs {
        let sequence = sequence(args, seed)?;
        // A parent that is gone reads nothing more: the next line's error ends this.
        let record = runner.run(&sequence, |op| {
            let _ = writeln!(out, "@{op}").and_then(|()| out.flush());
        });
        let lost = record.outcomes.iter().any(Outcome::loses_context);
        serde_json::to_writer(&mut out, &Recorded::new(sequence, record))?;
        writeln!(out)?;
        out.flush()?;
        if lost {
            break;
        }
    }
    Ok(())
}

fn replay(args: &Args, path: &Path) -> Result<bool> {
    let mut runner = Runner::new(&open(args)?);
    let mut report = Report::default();
    for line in BufReader::new(File::open(path)?).lines() {
        match serde_json::from_str(&line?)? {
            Line::Header(header) => {
                println!(
                    "recorded {} on {} × {}, driver {}, CUDA {}",
                    header.date, header.gpus, header.gpu, header.driver, header.cuda
                );
                if header.format != 1 {
                    return Err(format!("format {} is unknown", header.format).into());
                }
            }
            Line::Sequence(_) if args.crashes => {}
            Line::Crash(crash) if args.crashes => {
                println!("sequence {}: {}", crash.sequence.seed, crash.how);
                let ops = &crash.sequence.ops;
                let found = runner.run(&crash.sequence, |op| println!("{op:>4} {:?}", ops[op]));
                for (op, outcome) in found.outcomes.iter().enumerate() {
                    println!("{op:>4} {outcome}");
                }
            }
            Line::Sequence(recorded) => {
                let (sequence, expected) = recorded.split();
                let found = runner.run(&sequence, |_| {});
                for left in &found.left {
                    println!("sequence {}: not given back: {left}", sequence.seed);
                }
                report.add(sequence.ops.len(), compare(&sequence, &expected, &found));
            }
            Line::Crash(crash) => println!(
                "sequence {} killed the process at operation {}: {}; left out",
                crash.sequence.seed, crash.op, crash.how
            ),
        }
    }
    println!("{report}");
    Ok(report.is_clean())
}
