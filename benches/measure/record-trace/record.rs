//! Recording, in several child processes at a time.
//!
//! A driver may crash or hang, so each child has a deadline for each operation, and each sequence is
//! written as soon as it is complete. Nothing here waits for a child without a limit: one that hangs
//! in the kernel survives its kill.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use egmem_trace::{Crash, Header, Line, Recorded};

use super::{Args, Result, open, sequence};

/// How long an operation or the start of a process may take; a driver that hangs is killed then.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a killed process may take to end before it is left behind.
const BURIAL: Duration = Duration::from_secs(2);
/// Sequences per child process. Memory that one sequence corrupts is gone with its process.
const BATCH: u64 = 64;
/// A worker gives up after this many children in a row that recorded nothing.
const MAX_FAILURES: u32 = 5;

/// A message from a worker.
enum Event {
    Recorded(Box<Recorded>),
    Crashed(Box<Crash>),
    /// Seconds and count per kind of operation.
    Times(Times),
    GaveUp(String),
}

type Times = BTreeMap<&'static str, (Duration, u64)>;

/// How a child ended.
enum End {
    /// It recorded all its sequences, or lost its context.
    Well,
    /// In this operation, or between sequences.
    Died { op: Option<usize>, how: String },
    /// The time for the whole recording is over.
    OutOfTime,
}

/// Writes the file. Returns whether all sequences were recorded and none killed its process.
pub fn record(args: &Args) -> Result<bool> {
    let path = args.out.as_deref().ok_or("--out is missing")?;
    let seed = match args.seed {
        Some(seed) => seed,
        None => random_seed()?,
    };
    // The driver before the file, so that none is left behind where there is no driver.
    let header = header(args, seed)?;
    let start = Instant::now();
    let end = args.seconds.map(|s| start + Duration::from_secs(s));
    let next = AtomicU64::new(0);
    let (send, events) = channel();
    thread::scope(|scope| {
        for _ in 0..args.jobs {
            let (send, next) = (send.clone(), &next);
            scope.spawn(move || {
                if let Err(error) = work(args, seed, next, end, &send) {
                    let _ = send.send(Event::GaveUp(error.to_string()));
                }
            });
        }
        drop(send);
        write(args, path, &header, start, &events)
    })
}

fn write(
    args: &Args,
    path: &Path,
    header: &Header,
    start: Instant,
    events: &Receiver<Event>,
) -> Result<bool> {
    let mut out = BufWriter::new(File::create(path)?);
    let mut put = |line: &Line| -> Result<()> {
        serde_json::to_writer(&mut out, line)?;
        out.write_all(b"\n")?;
        Ok(out.flush()?)
    };
    put(&Line::Header(header.clone()))?;
    let (mut recorded, mut crashes, mut left) = (0, 0, 0);
    let mut times = Times::new();
    for event in events {
        match event {
            Event::Recorded(sequence) => {
                recorded += 1;
                left += sequence.left.len();
                put(&Line::Sequence(*sequence))?;
            }
            Event::Crashed(crash) => {
                crashes += 1;
                let (seed, op, how) = (crash.sequence.seed, crash.op, &crash.how);
                eprintln!("sequence {seed} died at operation {op}: {how}");
                put(&Line::Crash(*crash))?;
            }
            Event::Times(more) => {
                for (kind, (time, count)) in more {
                    let sum = times.entry(kind).or_default();
                    *sum = (sum.0 + time, sum.1 + count);
                }
            }
            Event::GaveUp(why) => eprintln!("a worker gave up: {why}"),
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let bytes = std::fs::metadata(path)?.len();
    eprintln!(
        "{}: {recorded} of {} sequences from seed {} in {seconds:.1} s, {crashes} crashes, \
         {left} objects that could not be given back, {bytes} bytes",
        path.display(),
        args.seqs,
        header.seed,
    );
    if args.times {
        print_times(&times);
    }
    Ok(recorded == args.seqs && crashes == 0)
}

fn print_times(times: &Times) {
    let mut times: Vec<_> = times.iter().collect();
    times.sort_by_key(|(_, (time, _))| std::cmp::Reverse(*time));
    for (kind, (time, count)) in times {
        let each = time.as_secs_f64() * 1e3 / *count as f64;
        eprintln!(
            "{:>9.2} s {count:>7} × {each:>9.3} ms {kind}",
            time.as_secs_f64()
        );
    }
}

/// Records batch after batch.
fn work(
    args: &Args,
    seed: u64,
    next: &AtomicU64,
    end: Option<Instant>,
    send: &Sender<Event>,
) -> Result<()> {
    let mut failures = 0;
    loop {
        let batch = next.fetch_add(BATCH, Ordering::Relaxed);
        let mut at = batch;
        while at < (batch + BATCH).min(args.seqs) {
            let count = (batch + BATCH).min(args.seqs) - at;
            let before = at;
            let ended = run_child(args, seed + at, count, end, |recorded| {
                at += 1;
                Ok(send.send(Event::Recorded(Box::new(recorded)))?)
            });
            let (ended, times) = ended?;
            send.send(Event::Times(times))?;
            failures = if at > before { 0 } else { failures + 1 };
            match ended {
                End::Well => {}
                End::OutOfTime => return Ok(()),
                End::Died { op: Some(op), how } => {
                    let sequence = sequence(args, seed + at)?;
                    let crash = Crash { sequence, op, how };
                    send.send(Event::Crashed(Box::new(crash)))?;
                    at += 1;
                }
                End::Died { op: None, how } => eprintln!("died between sequences: {how}"),
            }
            if failures == MAX_FAILURES {
                return Err(format!("{failures} processes in a row recorded nothing").into());
            }
        }
        if batch >= args.seqs {
            return Ok(());
        }
    }
}

/// Records `count` sequences from `seed` on in a child process, until it ends.
fn run_child(
    args: &Args,
    seed: u64,
    count: u64,
    end: Option<Instant>,
    mut on: impl FnMut(Recorded) -> Result<()>,
) -> Result<(End, Times)> {
    let start = Instant::now();
    let mut child = spawn(args, seed, count)?;
    let lines = lines_of(child.stdout.take().ok_or("no pipe to the child")?);
    let mut times = Times::new();
    // When the operations of the sequence under way began.
    let mut begun: Vec<Instant> = Vec::new();
    let (mut last, mut known, mut done) = (start, false, 0);
    let ended = loop {
        let now = Instant::now();
        let left = end.map_or(PATIENCE, |end| end.saturating_duration_since(now));
        match lines.recv_timeout(left.min(PATIENCE)) {
            Ok(line) if line.starts_with('@') => {
                if begun.is_empty() {
                    let what = ["(start of a process)", "(between sequences)"];
                    add(&mut times, what[usize::from(known)], last.elapsed());
                }
                begun.push(Instant::now());
            }
            Ok(line) => {
                let recorded: Recorded = serde_json::from_str(&line)?;
                for (pair, (op, _)) in begun.windows(2).zip(&recorded.steps) {
                    add(&mut times, op.kind(), pair[1] - pair[0]);
                }
                (last, known) = (Instant::now(), true);
                if let Some(begun) = begun.last() {
                    add(&mut times, "(last, and giving back)", last - *begun);
                }
                begun.clear();
                on(recorded)?;
                done += 1;
                if done == count {
                    break End::Well;
                }
            }
            Err(RecvTimeoutError::Timeout) if left < PATIENCE => break End::OutOfTime,
            Err(RecvTimeoutError::Timeout) => {
                let how = format!("no answer for {} s", PATIENCE.as_secs());
                break died(&begun, how);
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = bury(&mut child, BURIAL)?;
                add(&mut times, "(end of a process)", last.elapsed());
                break match status {
                    Some(status) if begun.is_empty() && status.success() => End::Well,
                    Some(status) => died(&begun, status.to_string()),
                    None => died(&begun, "it closed its output and hangs".into()),
                };
            }
        }
    };
    // A process takes up to seconds to end: the next one starts meanwhile.
    let patience = match ended {
        End::Well => PATIENCE,
        _ => Duration::ZERO,
    };
    thread::spawn(move || {
        if matches!(bury(&mut child, patience), Ok(None)) {
            let _ = child.kill();
            let _ = bury(&mut child, BURIAL);
        }
    });
    Ok((ended, times))
}

fn died(begun: &[Instant], how: String) -> End {
    let op = begun.len().checked_sub(1);
    End::Died { op, how }
}

fn add(times: &mut Times, kind: &'static str, time: Duration) {
    let sum = times.entry(kind).or_default();
    *sum = (sum.0 + time, sum.1 + 1);
}

fn spawn(args: &Args, seed: u64, count: u64) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .arg("--child")
        .args(["--seqs", &count.to_string()])
        .args(["--len", &args.len.to_string()])
        .args(["--seed", &seed.to_string()])
        .args(["--devices", &args.devices.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if args.heap {
        command.arg("--heap");
    }
    if let Some(preset) = &args.sim {
        command.args(["--sim", preset]);
    }
    Ok(command.spawn()?)
}

/// Reads lines in a thread of its own, which is not joined: it ends with the pipe.
fn lines_of(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (send, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(std::io::Result::ok) {
            if send.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// Waits for a process that is at its end. `None`: it does not end.
fn bury(child: &mut Child, patience: Duration) -> std::io::Result<Option<ExitStatus>> {
    let until = Instant::now() + patience;
    loop {
        match child.try_wait()? {
            None if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            status => return Ok(status),
        }
    }
}

/// A new seed: 48 random bits, so that it stays exact in any JSON reader.
fn random_seed() -> Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes[..6])?;
    Ok(u64::from_le_bytes(bytes))
}

fn header(args: &Args, seed: u64) -> Result<Header> {
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
        seed,
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
