//! A process that makes one call in a loop and reports how long each took.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use egmem::{Driver, Error, Result};
use serde::{Deserialize, Serialize};

use crate::Args;
use crate::steps::now;

/// The driver call that a neighbour repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Call {
    /// `cuMemGetInfo`
    Info,
    /// `cuMemAlloc` of 4 MiB and `cuMemFree`
    Device,
    /// `cuMemHostAlloc` of 1 MiB and `cuMemFreeHost`
    Host,
}

/// One neighbour for each.
pub const CALLS: [Call; 3] = [Call::Info, Call::Device, Call::Host];

impl Call {
    /// Returns the name that the table shows.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Info => "cuMemGetInfo",
            Self::Device => "cuMemAlloc 4 MiB, free",
            Self::Host => "cuMemHostAlloc 1 MiB, free",
        }
    }

    fn make(self, driver: &Driver, gpu: i32) -> Result<()> {
        match self {
            Self::Info => driver.mem_info(gpu).map(drop),
            Self::Device => {
                let memory = driver.mem_alloc(gpu, 4 << 20)?;
                // SAFETY: allocated above, and no other code has it.
                unsafe { driver.mem_free(gpu, memory) }
            }
            Self::Host => {
                let memory = driver.mem_host_alloc(gpu, 1 << 20)?;
                // SAFETY: as above.
                unsafe { driver.mem_free_host(gpu, memory) }
            }
        }
    }
}

/// How long a neighbour's calls took, in milliseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Waits {
    pub calls: usize,
    pub p50: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
    /// The share of the time that was spent in calls of more than 10 ms: percentiles count a call of seconds once.
    pub waiting: f64,
    /// When the calls of more than 1 ms began and ended, by the machine's monotonic clock in nanoseconds: the
    /// longest.
    pub long: Vec<(u64, u64)>,
}

/// The most calls that are reported one by one.
const MOST_LONG: usize = 5000;

impl Waits {
    fn of(times: Vec<(u64, u64)>, all: Duration) -> Self {
        let took = |&(began, ended): &(u64, u64)| Duration::from_nanos(ended - began);
        let mut calls: Vec<Duration> = times.iter().map(took).collect();
        calls.sort_unstable();
        let mut long: Vec<_> = times.into_iter().collect();
        long.retain(|call| took(call) > Duration::from_millis(1));
        long.sort_unstable_by_key(|call| std::cmp::Reverse(took(call)));
        long.truncate(MOST_LONG);
        let ms = |call: Duration| call.as_secs_f64() * 1e3;
        let at = |share: f64| {
            let index = (calls.len() as f64 * share) as usize;
            let index = index.min(calls.len().saturating_sub(1));
            calls.get(index).copied().map_or(0.0, ms)
        };
        let tens = calls.iter().filter(|call| call.as_millis() >= 10);
        Self {
            calls: calls.len(),
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            max: at(1.0),
            waiting: tens.sum::<Duration>().as_secs_f64() / all.as_secs_f64().max(1e-9),
            long,
        }
    }
}

/// Calls in a loop until the standard input ends. A line begins a measurement, the next one ends it and prints its
/// result.
///
/// # Errors
/// The driver's; [`Error::System`] of the pipes.
pub fn serve(driver: &Driver, gpu: i32, call: Call, every_us: u64) -> Result<()> {
    let failed = |error: std::io::Error| Error::system("a neighbour's pipe", &error);
    let (send, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in std::io::stdin().lines() {
            if line.is_err() || send.send(()).is_err() {
                return;
            }
        }
    });
    let pause = Duration::from_micros(every_us);
    // The first call makes the context.
    call.make(driver, gpu)?;
    say("ready").map_err(failed)?;
    while lines.recv().is_ok() {
        let began = Instant::now();
        let calls = until_told(&lines, pause, || call.make(driver, gpu))?;
        let waits = Waits::of(calls, began.elapsed());
        let text = serde_json::to_string(&waits)
            .map_err(|error| Error::failed("a neighbour's figures", error.to_string()))?;
        say(&text).map_err(failed)?;
    }
    Ok(())
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Returns when each call began and ended until a line came, or the input ended.
fn until_told(
    lines: &Receiver<()>,
    pause: Duration,
    make: impl Fn() -> Result<()>,
) -> Result<Vec<(u64, u64)>> {
    let mut calls = Vec::with_capacity(1 << 16);
    while matches!(lines.try_recv(), Err(TryRecvError::Empty)) {
        let began = now();
        make()?;
        calls.push((began, now()));
        thread::sleep(pause);
    }
    Ok(calls)
}

/// A neighbour process, which ends when this is dropped.
pub struct Neighbour {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Neighbour {
    /// Starts this program as a neighbour, and waits until it is ready.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn start(args: &Args, call: Call) -> Result<Self> {
        let failed = |error: std::io::Error| Error::system("starting a neighbour", &error);
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        let name = call.to_possible_value();
        command.arg("--neighbour");
        command.arg(name.as_ref().map_or("", |name| name.get_name()));
        command.args(["--gpu", &args.gpu.to_string()]);
        command.args(["--every-us", &args.every_us.to_string()]);
        if let Some(sim) = &args.sim {
            command.args(["--sim", sim]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::failed("starting a neighbour", "it has no pipes"));
        };
        let mut neighbour = Self {
            child,
            to: Some(to),
            from: BufReader::new(from),
        };
        neighbour.hear()?;
        Ok(neighbour)
    }

    /// Begins a measurement.
    ///
    /// # Errors
    /// [`Error::System`] if the neighbour has ended.
    pub fn begin(&mut self) -> Result<()> {
        let failed = |error: std::io::Error| Error::system("a neighbour", &error);
        match &mut self.to {
            Some(to) => writeln!(to, "go").and_then(|()| to.flush()).map_err(failed),
            None => Ok(()),
        }
    }

    /// Ends the measurement. A call that is being made counts.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    pub fn end(&mut self) -> Result<Waits> {
        self.begin()?;
        serde_json::from_str(&self.hear()?)
            .map_err(|error| Error::failed("a neighbour's figures", error.to_string()))
    }

    fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        match self.from.read_line(&mut line) {
            Ok(0) => Err(Error::failed("a neighbour", "it has ended")),
            Ok(_) => Ok(line),
            Err(error) => Err(Error::system("a neighbour", &error)),
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // The end of its input ends it.
        self.to = None;
        if let Err(error) = self.child.wait() {
            eprintln!("neighbours: a neighbour does not end: {error}");
        }
    }
}
