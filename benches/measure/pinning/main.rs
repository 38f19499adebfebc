//! How long it takes until memory of a size is pinned and usable by the CPU and every GPU, and until it is given back: the
//! library's registered pages (private, as `Backing::Auto` takes them, and shareable) and the driver's memory, beside
//! cudaHostAlloc and the recipe by hand (huge pages, touched by all CPUs, then registered in one call). By turns in one run;
//! the table has medians.
//!
//! ```sh
//! cargo run --release -p egmem-benches --bin pinning -- --most 64GiB --out results
//! ```
//!
//! On the simulator (`--sim h200x8`) it runs the same, smaller, without times.

mod import;
mod recipe;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use egmem::driver::NodeId;
use egmem::pinned::PinnedHost;
use egmem::size::Bytes;
use egmem::{Backing, Buffer, Driver, Explained, Growth, Machine, Result, Topology};

use recipe::Recipe;

/// Measures how long memory takes to pin, by size.
#[derive(Clone, Debug, Parser)]
#[command(name = "pinning")]
struct Args {
    /// The smallest size.
    #[arg(long, default_value = "1MiB")]
    least: Bytes,

    /// The largest size; each is `--factor` times the one before.
    #[arg(long, default_value = "16GiB")]
    most: Bytes,

    /// The next size by the one before.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..=1024))]
    factor: u64,

    /// Rounds; the table shows medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,

    /// Which GPU, by ordinal; the memory is on its host node.
    #[arg(long, default_value_t = 0)]
    gpu: i32,

    /// The chunks of registered memory.
    #[arg(long, default_value = "64MiB")]
    chunk: Bytes,

    /// Simulate a machine instead: nothing is timed.
    #[arg(long, value_name = "PRESET")]
    sim: Option<String>,

    /// The folder for pinning.json and pinning.svg.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,

    /// Be the second process: import memory of this backing, whose fds follow the standard streams.
    #[arg(long, value_name = "FDS", hide = true)]
    import: Option<usize>,
}

/// A way to have pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// `Backing::Registered`: private pages.
    Registered,
    /// `Backing::Auto`: pages that a forked child shares, where registered memory works.
    Auto,
    /// A memfd's pages.
    Shareable,
    Driver,
    Recipe,
    HostAlloc,
}

/// All of them, with the names that the table shows.
pub(crate) const WAYS: [(Way, &str); 6] = [
    (Way::Registered, "registered"),
    (Way::Auto, "auto"),
    (Way::Shareable, "registered, shareable"),
    (Way::Driver, "driver"),
    (Way::Recipe, "by hand"),
    (Way::HostAlloc, "cudaHostAlloc"),
];

/// The seconds of one size in one way: to have it and to give it back, one of each round.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) bytes: u64,
    pub(crate) way: &'static str,
    pub(crate) have: Vec<f64>,
    pub(crate) give_back: Vec<f64>,
}

/// Where memory is allocated.
struct Place {
    driver: Driver,
    gpu: i32,
    node: NodeId,
    growth: Growth,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let driver = match &args.sim {
        Some(preset) => Machine::preset(preset).and_then(Driver::simulated),
        None => Driver::open(),
    };
    let done = driver.and_then(|driver| match args.import {
        Some(fds) => import::serve(&driver, fds),
        None => run(&args, driver),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pinning: {}", Explained(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args, driver: Driver) -> Result<()> {
    let place = Place {
        node: Topology::discover(&driver)?.gpu(args.gpu)?.host_node()?,
        gpu: args.gpu,
        growth: Growth::steady().chunk(args.chunk.0),
        driver,
    };
    let is_simulated = place.driver.is_simulated();
    let most = match is_simulated {
        true => 16 << 20,
        false => args.most.0,
    };
    let next = |size: &u64| size.checked_mul(args.factor);
    let sizes = std::iter::successors(Some(args.least.0.max(1)), next);
    let mut sizes: Vec<u64> = sizes.take_while(|&size| size < most).collect();
    sizes.push(most);
    // A virtual machine's memory may come only when it is touched, and the first call makes the context.
    drop(place.have(Way::Driver, most)?);
    let auto = Buffer::on(place.node).bytes(1).backing(Backing::Auto);
    println!("auto takes {}", auto.allocate(&place.driver)?.backing());
    let mut rows = Vec::new();
    for bytes in sizes {
        rows.extend(place.measure(bytes, args.rounds));
        if let (Some(row), false) = (report::table(&rows).lines().last(), is_simulated) {
            println!("{row}");
        }
    }
    let imports = import::measure(args, &place, most)?;
    if is_simulated {
        println!("all of it ran; times on the simulator mean nothing");
        return Ok(());
    }
    println!("{}", report::table(&rows));
    for (backing, seconds) in imports {
        println!(
            "a second process has {most} bytes of {backing} memory after {:.3} s: {:.1} GB/s",
            seconds,
            most as f64 / seconds / 1e9
        );
    }
    match &args.out {
        Some(folder) => report::write(folder, &rows),
        None => Ok(()),
    }
}

impl Place {
    /// Measures all ways by turns.
    fn measure(&self, bytes: u64, rounds: u32) -> Vec<Row> {
        let mut rows = WAYS.map(|(_, way)| Row {
            bytes,
            way,
            have: Vec::new(),
            give_back: Vec::new(),
        });
        for _ in 0..rounds {
            for (row, (way, name)) in rows.iter_mut().zip(WAYS) {
                let began = Instant::now();
                match self.have(way, bytes) {
                    Err(error) => println!("{name}, {bytes} bytes: {}", Explained(&error)),
                    Ok(memory) => {
                        row.have.push(began.elapsed().as_secs_f64());
                        let began = Instant::now();
                        drop(memory);
                        row.give_back.push(began.elapsed().as_secs_f64());
                    }
                }
            }
        }
        rows.into_iter()
            .filter(|row| !row.have.is_empty())
            .collect()
    }

    fn have(&self, way: Way, bytes: u64) -> Result<Box<dyn std::any::Any>> {
        let buffer = |backing| {
            Buffer::on(self.node)
                .bytes(bytes)
                .growth(self.growth)
                .backing(backing)
        };
        Ok(match way {
            Way::Registered => Box::new(buffer(Backing::Registered).allocate(&self.driver)?),
            Way::Auto => Box::new(buffer(Backing::Auto).allocate(&self.driver)?),
            Way::Shareable => Box::new(
                buffer(Backing::Registered)
                    .shareable()
                    .allocate(&self.driver)?,
            ),
            Way::Driver => Box::new(buffer(Backing::Driver).allocate(&self.driver)?),
            Way::Recipe => Box::new(Recipe::new(&self.driver, self.gpu, bytes)?),
            Way::HostAlloc => Box::new(PinnedHost::new(&self.driver, self.gpu, bytes)?),
        })
    }
}
