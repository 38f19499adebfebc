//! The waits of other processes while one process allocates gigabytes of host memory. Three neighbour processes call
//! the driver in a loop each, and this one grows in several ways, one after the other.
//!
//! ```sh
//! cargo run --release -p egmem-benches --bin neighbours -- --gib 8 --out results
//! ```
//!
//! For each growth it shows how long the neighbours' calls took while memory was made and while it was given back,
//! and during which of the driver calls they waited.
//!
//! On the simulator (`--sim gh200`) it runs the same, smaller, and prints no times: neighbours there have machines of
//! their own.

mod border;
mod growths;
mod neighbour;
mod report;
mod steps;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use egmem::driver::{Location, NodeId};
use egmem::{Driver, Explained, Machine, Result, Topology};

use growths::{GROWTHS, Grown, Way};
use neighbour::{CALLS, Call, Neighbour};
use report::{Phase, Row};
use steps::Steps;

/// Measures how long other processes wait while this one grows.
#[derive(Clone, Debug, Parser)]
#[command(name = "neighbours")]
struct Args {
    /// How much memory each growth takes, in GiB.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=4096))]
    gib: u64,

    /// Which GPU, by ordinal; the memory is on its host node, and every GPU is granted it.
    #[arg(long, default_value_t = 0)]
    gpu: i32,

    /// Microseconds that a neighbour sleeps between two calls.
    #[arg(long, default_value_t = 200)]
    every_us: u64,

    /// Only the growths whose names contain this.
    #[arg(long, default_value = "")]
    only: String,

    /// Simulate a machine instead: nothing is timed.
    #[arg(long, value_name = "PRESET")]
    sim: Option<String>,

    /// The folder for neighbours.json and neighbours.svg; without it the results are only printed.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Seconds after which no further growth is begun.
    #[arg(long, default_value_t = 230)]
    seconds: u64,

    /// Be the neighbour that makes this call, until the standard input ends.
    #[arg(long, value_enum, hide = true)]
    neighbour: Option<Call>,
}

/// Where memory is allocated, and how much.
struct Place {
    driver: Driver,
    gpu: i32,
    node: NodeId,
    gpus: Vec<Location>,
    bytes: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let driver = match &args.sim {
        Some(preset) => Machine::preset(preset).and_then(Driver::simulated),
        None => Driver::open(),
    };
    let done = driver.and_then(|driver| match args.neighbour {
        Some(call) => neighbour::serve(&driver, args.gpu, call, args.every_us),
        None => run(&args, driver),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("neighbours: {}", Explained(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args, driver: Driver) -> Result<()> {
    let began = Instant::now();
    let topology = Topology::discover(&driver)?;
    let simulated = driver.is_simulated();
    let place = Place {
        node: topology.gpu(args.gpu)?.host_node()?,
        gpu: args.gpu,
        gpus: topology.gpus().iter().map(Location::from).collect(),
        bytes: if simulated { 256 << 20 } else { args.gib << 30 },
        driver,
    };
    println!("{}", place.about());
    let mut neighbours = Vec::new();
    for call in CALLS {
        neighbours.push(Neighbour::start(args, call)?);
    }
    // The first registration would make the context, for which neighbours wait 22 ms.
    place.driver.mem_info(place.gpu)?;
    // A virtual machine's memory may come only when it is touched.
    let warm = Way::STEADY.grow(&place, &mut Steps::default())?;
    warm.give_back(&mut Steps::default())?;
    let mut rows = Vec::new();
    for &(name, way) in GROWTHS {
        if !name.contains(&args.only) || !way.is_of_use(&place) {
            continue;
        }
        if began.elapsed() > Duration::from_secs(args.seconds) {
            println!("{name}: left out, {} s have passed", args.seconds);
            continue;
        }
        // One that fails does not cost the figures of the others.
        match measure(&place, &mut neighbours, name, way) {
            Ok(row) => rows.push(row),
            Err(error) => println!("{name}: {}", Explained(&error)),
        }
    }
    drop(neighbours);
    println!("{}", border::copies(&place)?);
    if let Some(folder) = &args.out {
        report::write(folder, &rows, &place)?;
    }
    let tables = [report::blame(&rows), report::waits(&rows, place.bytes)];
    if simulated {
        println!("all of it ran; times on the simulator mean nothing");
        return Ok(());
    }
    println!(
        "milliseconds of the neighbours' calls of more than 1 ms, by the step that they waited during:"
    );
    for table in tables {
        println!("{table}");
    }
    Ok(())
}

/// Measures growth, and giving the memory back.
fn measure(
    place: &Place,
    neighbours: &mut [Neighbour],
    name: &'static str,
    way: Way,
) -> Result<Row> {
    let mut steps = Steps::default();
    let (memory, grow) = during(neighbours, &mut steps, |steps| way.grow(place, steps))?;
    let chunk = memory.as_ref().ok().and_then(Grown::chunk);
    let (gone, free) = during(neighbours, &mut steps, |steps| memory?.give_back(steps))?;
    gone?;
    Ok(Row {
        name,
        chunk,
        plain_chunk: way.plain_chunk(),
        grow,
        free,
    })
}

/// Runs `work` while the neighbours measure. Fails if a neighbour fails; returns the result of the work.
fn during<R>(
    neighbours: &mut [Neighbour],
    steps: &mut Steps,
    work: impl FnOnce(&mut Steps) -> Result<R>,
) -> Result<(Result<R>, Phase)> {
    for neighbour in neighbours.iter_mut() {
        neighbour.begin()?;
    }
    let since = steps::now();
    let began = Instant::now();
    let done = work(steps);
    let seconds = began.elapsed().as_secs_f64();
    let mut waits = Vec::new();
    for neighbour in neighbours.iter_mut() {
        waits.push(neighbour.end()?);
    }
    let phase = Phase {
        seconds,
        blame: steps.blame(since, &waits),
        waits,
    };
    Ok((done, phase))
}

impl Place {
    fn about(&self) -> String {
        let simulated = if self.driver.is_simulated() {
            " (SIMULATED)"
        } else {
            ""
        };
        let cuda = self.driver.driver_version();
        let cuda = cuda.map_or_else(|_| "?".into(), |version| version.to_string());
        let module = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
        format!(
            "{} GPUs, CUDA {cuda}, kernel module {}{simulated}; {} GiB on node {}",
            self.gpus.len(),
            module.trim(),
            self.bytes as f64 / (1_u64 << 30) as f64,
            self.node
        )
    }
}
