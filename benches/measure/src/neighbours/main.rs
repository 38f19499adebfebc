//! What other processes wait for while one process allocates gigabytes of host memory. Three neighbour processes call the driver
//! in a loop each, and this one grows in several ways, one after the other.
//!
//! ```sh
//! cargo run --release -p egmem-measure --bin neighbours -- --gib 8
//! ```
//!
//! On the simulator (`--sim gh200`) it runs the same, smaller, and prints no times: neighbours there have machines of their own.

mod border;
mod growths;
mod neighbour;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use egmem::driver::{Location, NodeId};
use egmem::{Driver, Explained, Machine, Result, Topology};
use serde_json::json;

use growths::{GROWTHS, Way};
use neighbour::{CALLS, Call, Neighbour, Waits};

/// Measures what other processes wait for while this one grows.
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

    /// Print JSON after the table.
    #[arg(long)]
    json: bool,

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

/// What one growth did to the neighbours.
struct Row {
    name: &'static str,
    grew: Duration,
    freed: Duration,
    waits: Vec<Waits>,
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
    // A virtual machine's memory may come only when it is touched.
    Way::STEADY.grow(&place)?;
    let mut rows = Vec::new();
    for (name, way) in GROWTHS {
        if name.contains(&args.only) {
            rows.push(measure(&place, &mut neighbours, name, *way)?);
        }
    }
    if simulated {
        println!("all of it ran; times on the simulator mean nothing");
    } else {
        println!("{}", table(&rows, place.bytes));
        if args.json {
            println!("{}", json(&rows, &place));
        }
    }
    drop(neighbours);
    println!("{}", border::copies(&place)?);
    Ok(())
}

fn measure(
    place: &Place,
    neighbours: &mut [Neighbour],
    name: &'static str,
    way: Way,
) -> Result<Row> {
    for neighbour in neighbours.iter_mut() {
        neighbour.begin()?;
    }
    let began = Instant::now();
    let memory = way.grow(place)?;
    let grew = began.elapsed();
    let mut waits = Vec::new();
    for neighbour in neighbours.iter_mut() {
        waits.push(neighbour.end()?);
    }
    let began = Instant::now();
    drop(memory);
    let freed = began.elapsed();
    Ok(Row {
        name,
        grew,
        freed,
        waits,
    })
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

fn gb_per_second(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64() / 1e9
}

fn table(rows: &[Row], bytes: u64) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header([
        "growth", "GB/s", "freed s", "call", "calls", "p50", "p99", "p99.9", "max ms", "waiting",
    ]);
    for row in rows {
        for (call, waits) in CALLS.iter().zip(&row.waits) {
            let is_first = *call == CALLS[0];
            let (rate, freed) = match row.name {
                growths::IDLE => (String::new(), String::new()),
                _ => (
                    format!("{:.2}", gb_per_second(bytes, row.grew)),
                    format!("{:.2}", row.freed.as_secs_f64()),
                ),
            };
            let of_row = |text: String| if is_first { text } else { String::new() };
            let mut cells = vec![of_row(row.name.into()), of_row(rate), of_row(freed)];
            cells.push(call.name().into());
            cells.push(waits.calls.to_string());
            for ms in [waits.p50, waits.p99, waits.p999, waits.max] {
                cells.push(format!("{ms:.2}"));
            }
            cells.push(format!("{:.0} %", 100.0 * waits.waiting));
            table.add_row(cells);
        }
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn json(rows: &[Row], place: &Place) -> serde_json::Value {
    let row = |row: &Row| {
        let waits = CALLS.iter().zip(&row.waits).map(|(call, waits)| {
            json!({
                "call": call.name(), "calls": waits.calls, "p50_ms": waits.p50, "p99_ms": waits.p99,
                "p999_ms": waits.p999, "max_ms": waits.max, "waiting": waits.waiting,
            })
        });
        json!({
            "growth": row.name, "seconds": row.grew.as_secs_f64(), "freed_seconds": row.freed.as_secs_f64(),
            "gb_per_second": gb_per_second(place.bytes, row.grew), "neighbours": waits.collect::<Vec<_>>(),
        })
    };
    json!({
        "about": place.about(), "bytes": place.bytes,
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    })
}
