//! What it costs that one process's GPU work waits for another's by events: a hand-over there and back, beside the same with
//! two streams of one process, and beside two processes that synchronise and send a text through a socket.
//!
//! ```sh
//! cargo run --release -p egmem-benches --bin event-handover
//! ```
//!
//! The processes tell each other of records by words in shared memory, for which they spin: about 5 seconds on two CPUs. On
//! the simulator (`--sim gh200`) it runs the same, with few rounds and without times.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Parser;
use egmem::driver::{Access, Driver};
use egmem::share::{Channel, ImportOptions, ImportedBuffer, Listener, Peers, Result, Shared};
use egmem::{Buffer, Error, Event, Explained, Machine, Stream, Topology};

/// The bytes that each turn's GPU work sets.
const BYTES: u64 = 4096;
/// Where the words are: the first process's, the second's.
const WORDS: [u64; 2] = [BYTES, BYTES + 64];
/// How long a process spins for the other.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures hand-overs of GPU work between processes.
#[derive(Debug, Parser)]
#[command(name = "event-handover")]
struct Args {
    /// Rounds of each measurement; 5000, on the simulator 20.
    #[arg(long)]
    rounds: Option<u64>,

    /// The GPU of both processes, by ordinal.
    #[arg(long, default_value_t = 0)]
    gpu: i32,

    /// Simulate a machine instead: nothing is timed.
    #[arg(long, value_name = "PRESET")]
    sim: Option<String>,

    /// The second process, which this program starts.
    #[arg(long, hide = true)]
    second: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let driver = match &args.sim {
        Some(preset) => Machine::preset(preset).and_then(Driver::simulated),
        None => match Driver::open() {
            Err(error) if std::env::var_os("EGMEM_REQUIRE_CUDA").is_none() => {
                eprintln!("event-handover: nothing to measure: {}", Explained(&error));
                return ExitCode::SUCCESS;
            }
            opened => opened,
        },
    };
    let run = |driver: Driver| match &args.second {
        Some(socket) => second(&args, &driver, socket),
        None => first(&args, &driver),
    };
    match driver.map_err(Into::into).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("event-handover: {error}");
            ExitCode::FAILURE
        }
    }
}

/// How a round hands the GPU's work over.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// By events; the first process synchronises after each round.
    Events,
    /// By events, and no process waits for the GPU before the last round.
    Unwaited,
    /// By synchronising, and a text through a socket.
    Socket,
}

const WAYS: [(Way, &str); 3] = [
    (Way::Events, "two processes, events, one synchronisation"),
    (Way::Unwaited, "two processes, events, queued"),
    (Way::Socket, "two processes, two synchronisations, socket"),
];

/// One process's end.
struct End<'a> {
    stream: Stream,
    ours: Event,
    theirs: Event,
    memory: Words<'a>,
    channel: Channel,
}

/// The memory of both, and which words are this process's.
enum Words<'a> {
    First(&'a Buffer),
    Second(&'a ImportedBuffer),
}

impl Words<'_> {
    fn tell(&self, round: u64) -> egmem::Result<()> {
        match self {
            Self::First(memory) => memory.put(WORDS[0], round),
            Self::Second(memory) => memory.put(WORDS[1], round),
        }
    }

    fn told(&self) -> egmem::Result<u64> {
        match self {
            Self::First(memory) => memory.get(WORDS[1]),
            Self::Second(memory) => memory.get(WORDS[0]),
        }
    }

    /// Waits for the other process's word.
    fn wait(&self, round: u64) -> egmem::Result<()> {
        let until = Instant::now() + PATIENCE;
        while self.told()? != round {
            if Instant::now() >= until {
                let late = std::io::ErrorKind::TimedOut.into();
                return Err(Error::system("waiting for the other process", &late));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

impl End<'_> {
    /// Submits this turn's work.
    fn work(&self) -> egmem::Result<()> {
        let at = match self.memory {
            Words::First(memory) => memory.device_ptr(),
            Words::Second(memory) => memory.device_ptr(),
        };
        // SAFETY: the memory lives until the stream was synchronised, at the end. The CPU does not look at these bytes.
        unsafe { self.stream.memset_async(at, 1, BYTES) }
    }

    /// Hands over what was submitted.
    fn give(&mut self, way: Way, round: u64) -> Result<()> {
        if way == Way::Socket {
            self.stream.synchronize()?;
            return self.channel.send_text("done");
        }
        self.ours.record(&self.stream)?;
        Ok(self.memory.tell(round)?)
    }

    /// Orders what is submitted next behind the other process's work.
    fn take(&mut self, way: Way, round: u64) -> Result<()> {
        if way == Way::Socket {
            return self.channel.receive_text(8).map(drop);
        }
        self.memory.wait(round)?;
        Ok(self.stream.wait(&self.theirs)?)
    }
}

fn rounds(args: &Args) -> u64 {
    args.rounds
        .unwrap_or(if args.sim.is_some() { 20 } else { 5000 })
}

/// Runs this process's part of the rounds; returns the time of each.
fn turns(
    end: &mut End<'_>,
    way: Way,
    rounds: std::ops::Range<u64>,
    is_first: bool,
) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    for round in rounds {
        let begun = Instant::now();
        if is_first {
            end.work()?;
            end.give(way, round)?;
            end.take(way, round)?;
            end.work()?;
            if way == Way::Events {
                end.stream.synchronize()?;
            }
        } else {
            end.take(way, round)?;
            end.work()?;
            end.give(way, round)?;
        }
        times.push(begun.elapsed());
    }
    end.stream.synchronize()?;
    Ok(times)
}

fn first(args: &Args, driver: &Driver) -> Result<()> {
    let folder = std::env::temp_dir().join(format!("event-handover-{}", std::process::id()));
    let listener = Listener::bind(&folder, Peers::same_user())?;
    let mut command = Command::new("/proc/self/exe");
    command.args([
        "--gpu",
        &args.gpu.to_string(),
        "--rounds",
        &rounds(args).to_string(),
    ]);
    if let Some(preset) = &args.sim {
        command.args(["--sim", preset]);
    }
    let child = command.arg("--second").arg(&folder).spawn();
    let mut child = child.map_err(|error| Error::system("starting the second process", &error))?;
    let measured = measure(args, driver, &listener);
    if measured.is_err() {
        // It may have ended.
        let _ = child.kill();
    }
    let ended = child.wait();
    measured?;
    match ended {
        Ok(status) if status.success() => Ok(()),
        ended => Err(Error::invalid("second process", format!("{ended:?}")).into()),
    }
}

fn measure(args: &Args, driver: &Driver, listener: &Listener) -> Result<()> {
    let mut channel = listener.accept()?;
    let node = Topology::discover(driver)?.gpu(args.gpu)?.host_node()?;
    let memory = Buffer::on(node)
        .bytes(2 << 20)
        .shareable()
        .allocate(driver)?;
    let shared = Shared::from(memory);
    channel.send(&shared, Access::ReadWrite)?;
    let Some(memory) = shared.buffer() else {
        return Err(Error::invalid("memory", "it is no buffer").into());
    };
    let mut end = end(args, driver, channel, Words::First(memory))?;
    within_one(args, driver, memory)?;
    let mut next = 1;
    for (way, name) in WAYS {
        let range = next..next + rounds(args);
        next = range.end;
        let begun = Instant::now();
        let times = turns(&mut end, way, range, true)?;
        report(
            args,
            name,
            times,
            (way == Way::Unwaited).then(|| begun.elapsed()),
        );
    }
    Ok(())
}

/// The same with two streams of one process, which its threads' calls order by events.
fn within_one(args: &Args, driver: &Driver, memory: &Buffer) -> Result<()> {
    let [one, other] = [(); 2].map(|()| Stream::new(driver, args.gpu));
    let (one, other) = (one?, other?);
    let [ours, theirs] = [(); 2].map(|()| Event::new(driver, args.gpu, false));
    let (ours, theirs) = (ours?, theirs?);
    // SAFETY: as in `End::work`.
    let work = |stream: &Stream| unsafe { stream.memset_async(memory.device_ptr(), 1, BYTES) };
    for (name, waits) in [
        ("one process, two streams, one synchronisation", true),
        ("one process, two streams, queued", false),
    ] {
        let (mut times, all) = (Vec::new(), Instant::now());
        for _ in 0..rounds(args) {
            let begun = Instant::now();
            work(&one)?;
            ours.record(&one)?;
            other.wait(&ours)?;
            work(&other)?;
            theirs.record(&other)?;
            one.wait(&theirs)?;
            work(&one)?;
            if waits {
                one.synchronize()?;
            }
            times.push(begun.elapsed());
        }
        one.synchronize()?;
        report(args, name, times, (!waits).then(|| all.elapsed()));
    }
    Ok(())
}

/// Prints a measurement: medians, or the time of all rounds by their number.
fn report(args: &Args, name: &str, mut times: Vec<Duration>, all: Option<Duration>) {
    if args.sim.is_some() {
        return println!("{name}: ran {} rounds, simulated", times.len());
    }
    times.sort_unstable();
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let at = |part: usize| micros(times[(times.len() * part / 100).min(times.len() - 1)]);
    match all {
        Some(all) => println!(
            "{name}: {:.1} µs a round, of all",
            micros(all) / times.len() as f64
        ),
        None => println!("{name}: p50 {:.1}, p99 {:.1} µs a round", at(50), at(99)),
    }
}

fn end<'a>(
    args: &Args,
    driver: &Driver,
    mut channel: Channel,
    memory: Words<'a>,
) -> Result<End<'a>> {
    let ours = Event::interprocess(driver, args.gpu)?;
    channel.send_event(&ours)?;
    Ok(End {
        stream: Stream::new(driver, args.gpu)?,
        theirs: channel.receive_event(driver)?,
        ours,
        memory,
        channel,
    })
}

fn second(args: &Args, driver: &Driver, path: &Path) -> Result<()> {
    let mut channel = Channel::connect(path, Peers::same_user())?;
    let memory = channel.receive()?.import(driver, ImportOptions::new())?;
    let mut end = end(args, driver, channel, Words::Second(&memory))?;
    let mut next = 1;
    for (way, _) in WAYS {
        let range = next..next + rounds(args);
        next = range.end;
        turns(&mut end, way, range, false)?;
    }
    Ok(())
}
