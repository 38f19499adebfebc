//! One node's Extended GPU Memory, shown to work: `cargo run --release --example egm-demo`.
//!
//! Finds the GPUs and their host NUMA nodes, allocates on every node through VMM, by registering
//! pages and through a pool, grants the CPU and the GPUs access, proves the bytes from both sides, and on real GPUs
//! measures the bandwidth. `--help` tells the rest.

mod args;
mod heatmap;
mod inventory;
mod progress;
mod report;
mod tables;

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use egmem::doctor::measure::{Bandwidth, Proofs, Rates};
use egmem::size::Bytes;
use egmem::{Error, Explained, Result, Topology};

use args::Args;
use inventory::Chosen;
use progress::tell;
use report::Report;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("egm-demo: {}", Explained(&error));
            ExitCode::FAILURE
        }
    }
}

/// Whether every proof held.
fn run(args: &Args) -> Result<bool> {
    let chosen = inventory::choose(args)?;
    let driver = &chosen.driver;
    let topology = Topology::discover(driver)?;
    let selected = inventory::selected(&topology, &args.gpus)?;
    let nodes = inventory::node_ids(&topology);
    let bytes = args.size(driver.is_simulated())?;

    let mut report = Report {
        backend: driver.name(),
        why_simulated: chosen.why.as_ref().map(Error::to_string),
        machine: inventory::machine_of(&chosen),
        driver_version: driver.driver_version()?.to_string(),
        size: bytes,
        topology: topology.source().to_string(),
        nodes: inventory::nodes(&topology),
        gpus: inventory::gpus(&topology, &selected),
        proofs: Vec::new(),
        malloc_async: Vec::new(),
        runtime_missing: None,
        bandwidth: None,
    };
    let out = Out { json: args.json };
    out.text(first_line(&chosen, &report))?;
    out.text(tables::nodes(&report.nodes))?;
    out.text(tables::gpus(&report.gpus))?;

    let plan = Proofs {
        driver,
        nodes: &nodes,
        gpus: &selected,
        bytes,
    };
    out.text(format!(
        "\nProofs, {} each: the CPU writes, the GPU's kernel checks and rewrites, the CPU checks.",
        Bytes(bytes)
    ))?;
    let bar = progress::bar(plan.steps());
    report.proofs = plan.prove(&mut tell(&bar));
    report.malloc_async = plan.malloc_async();
    bar.finish_and_clear();
    out.text(tables::proofs(&report.proofs, &report.malloc_async))?;
    if let Err(error) = plan.runtime() {
        let note = format!(
            "the runtime API's pools were not tried: {}",
            Explained(&error)
        );
        out.text(&note)?;
        report.runtime_missing = Some(note);
    }

    // Times on the simulator mean nothing, so it has no bandwidth.
    if !driver.is_simulated() && !args.no_bandwidth {
        let plan = Rates {
            driver,
            topology: &topology,
            nodes: &nodes,
            gpus: &selected,
            bytes,
            repeats: args.repeats,
        };
        let bar = progress::bar(plan.steps());
        let bandwidth = plan.measure(&mut tell(&bar))?;
        bar.finish_and_clear();
        out.text(format!(
            "\nBandwidth in GB/s, {} at a time, median of {}; in brackets the difference from \
             cudaHostAlloc.",
            Bytes(bytes),
            args.repeats
        ))?;
        out.text(tables::bandwidth(&bandwidth))?;
        report.bandwidth = Some(bandwidth);
    }
    if let Some(folder) = &args.plot {
        match &report.bandwidth {
            Some(bandwidth) => plot(folder, bandwidth, &report)?,
            None if driver.is_simulated() => {
                eprintln!(
                    "egm-demo: --plot draws nothing: a simulator has no bandwidth to measure"
                );
            }
            None => eprintln!("egm-demo: --plot draws nothing: nothing was measured"),
        }
    }

    let failed = report.proofs.iter().filter(|proof| !proof.verified).count();
    out.text(match failed {
        0 => format!("\nAll {} proofs held.", report.proofs.len()),
        _ => format!("\n{failed} of {} proofs FAILED.", report.proofs.len()),
    })?;
    if args.json {
        let text = serde_json::to_string_pretty(&report)
            .map_err(|error| Error::invalid("report", error.to_string()))?;
        print(text)?;
    }
    // No proof at all proves nothing.
    Ok(failed == 0 && !report.proofs.is_empty())
}

/// Returns the line that names the driver; on the simulator it says so in capitals.
fn first_line(chosen: &Chosen, report: &Report) -> String {
    let version = &report.driver_version;
    let count = report.gpus.len();
    let gpus = if count == 1 { "GPU" } else { "GPUs" };
    let Some(machine) = &chosen.simulated else {
        return format!(
            "CUDA {version} driver, {count} {gpus}, {}",
            report.machine.name
        );
    };
    let line = format!(
        "SIMULATED: machine {machine}, {count} {gpus}, as a CUDA {version} driver answers; nothing \
         is timed"
    );
    match &chosen.why {
        None => line,
        Some(why) => format!(
            "{line}\nbecause there is no usable GPU: {}\n--sim PRESET|FILE simulates another \
             machine, --cuda insists on GPUs.",
            Explained(why)
        ),
    }
}

fn plot(folder: &std::path::Path, bandwidth: &Bandwidth, report: &Report) -> Result<()> {
    let path = folder.join("bandwidth.svg");
    let machine = match report.gpus.first() {
        Some(gpu) => format!(
            "{} × {}, CUDA {} driver, {}",
            report.gpus.len(),
            gpu.name,
            report.driver_version,
            report.machine.name
        ),
        None => report.machine.name.clone(),
    };
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&path, heatmap::draw(bandwidth, &machine)))
        .map_err(|error| Error::system(format!("writing {}", path.display()), &error))?;
    eprintln!("egm-demo: drawn: {}", path.display());
    Ok(())
}

/// Standard output: text as it comes, or one JSON document at the end.
struct Out {
    json: bool,
}

impl Out {
    fn text(&self, text: impl Display) -> Result<()> {
        if self.json { Ok(()) } else { print(text) }
    }
}

fn print(text: impl Display) -> Result<()> {
    writeln!(std::io::stdout(), "{text}")
        .map_err(|error| Error::system("writing to standard output", &error))
}
