//! The heap on a GPU's host node, beside CUDA's allocators: pairs of allocation and free by many threads,
//! growth, latency while it grows, a thread beside one whose requests are refused, and the effect of calls on
//! another thread's stream capture.
//!
//! ```sh
//! cargo run --release -p egmem-benches --bin measure-heap -- --out heap-results
//! ```
//!
//! Without a GPU all of it runs once, in small, on the simulator, and no time is printed or written.

mod args;
mod captures;
mod cuda;
mod growth;
mod large;
mod latency;
mod pairs;
mod plot;
mod refusals;
mod report;

use std::process::ExitCode;

use clap::Parser;
use egmem::driver::NodeId;
use egmem::{Driver, Error, Explained, Machine, Result, Topology};

use args::{Args, Part};
use report::{About, Out};

/// Where everything is measured.
struct Place {
    driver: Driver,
    topology: Topology,
    gpu: i32,
    node: NodeId,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("measure-heap: {}", Explained(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let driver = open()?;
    let topology = Topology::discover(&driver)?;
    let place = Place {
        node: topology.gpu(args.gpu)?.host_node()?,
        gpu: args.gpu,
        topology,
        driver,
    };
    let simulated = place.driver.is_simulated();
    let small;
    let args = if simulated {
        small = args.in_small();
        &small
    } else {
        args
    };
    let about = About::of(&place)?;
    println!("{}", about.first_line());
    let out = Out {
        folder: args.out.clone(),
        about,
    };
    // Bound to the node, as its memory: elsewhere the machine's links would be measured.
    let _bound = place.topology.bind_thread_if_real(place.node)?;
    if !simulated && args.part.iter().any(|part| part.takes_memory()) {
        growth::warm_up(args.growth.0.max(args.to.0))?;
    }
    if !simulated && args.part.contains(&Part::Large) {
        growth::warm_up(args.large.0 / 5 * 4)?;
    }
    for part in &args.part {
        match part {
            Part::Pairs => out.put("pairs", &pairs::measure(&place, args)?)?,
            Part::Growth => out.put("growth", &growth::measure(&place, args)?)?,
            Part::Latency => out.put("latency", &latency::measure(&place, args)?)?,
            Part::Refusals => out.put("refusals", &refusals::measure(&place, args)?)?,
            Part::Streams => out.put("streams", &pairs::on_streams(&place, args)?)?,
            Part::Large => out.put("large", &large::measure(&place, args)?)?,
            Part::Captures if simulated => println!("\ncaptures: the simulator knows none"),
            Part::Captures => out.put("captures", &captures::probe(&place)?)?,
        }
    }
    Ok(())
}

/// This machine's driver; the simulator where it has none, unless `EGMEM_REQUIRE_CUDA` is set.
fn open() -> Result<Driver> {
    match Driver::open() {
        Ok(driver) => Ok(driver),
        Err(error) if std::env::var_os("EGMEM_REQUIRE_CUDA").is_some() => Err(error),
        Err(error) => {
            eprintln!("measure-heap: on the simulator: {error}");
            Driver::simulated(Machine::h200x8())
        }
    }
}

fn layout(bytes: u64) -> Result<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes as usize, 256)
        .map_err(|error| Error::invalid("size", error.to_string()))
}

/// The median; 0 of nothing.
fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
