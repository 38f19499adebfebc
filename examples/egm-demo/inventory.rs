//! The machine: its nodes and GPUs, and their part of the report.

use egmem::driver::{Driver, NodeId};
use egmem::{Error, Machine, Result, Topology};

use super::args::Args;
use super::report;

/// The driver, and how it was chosen.
pub struct Chosen {
    pub driver: Driver,
    /// The simulated machine's name.
    pub simulated: Option<String>,
    /// Why it is simulated although the user did not ask for it.
    pub why: Option<Error>,
}

/// The machine that is simulated where there is no GPU and the user chose none.
const DEFAULT_PRESET: &str = "gh200x4";

/// The simulator if it was asked for, else the GPUs, else the simulator.
pub fn choose(args: &Args) -> Result<Chosen> {
    let machine = match &args.sim {
        Some(name) => Some(machine(name)?),
        None if args.cuda => None,
        None => Machine::from_env()?,
    };
    if let Some(machine) = machine {
        return simulate(machine, None);
    }
    match Driver::open().and_then(with_gpus) {
        Ok(driver) => Ok(Chosen {
            driver,
            simulated: None,
            why: None,
        }),
        Err(error) if args.cuda => Err(error),
        Err(error) => simulate(Machine::preset(DEFAULT_PRESET)?, Some(error)),
    }
}

fn with_gpus(driver: Driver) -> Result<Driver> {
    match driver.device_count()? {
        0 => Err(Error::NoSuchGpu { gpu: 0, count: 0 }),
        _ => Ok(driver),
    }
}

fn simulate(machine: Machine, why: Option<Error>) -> Result<Chosen> {
    let name = machine.name.clone();
    Ok(Chosen {
        driver: Driver::simulated(machine)?,
        simulated: Some(name),
        why,
    })
}

/// A preset by its name, else the file of that name: a description, or lstopo's XML.
fn machine(name: &str) -> Result<Machine> {
    match std::fs::read_to_string(name) {
        Ok(text) if text.trim_start().starts_with('<') => {
            let machine = from_lstopo(&text)?;
            Ok(Machine {
                name: name.to_owned(),
                ..machine
            })
        }
        _ => Machine::load(name),
    }
}

#[cfg(feature = "hwloc")]
fn from_lstopo(xml: &str) -> Result<Machine> {
    Ok(Topology::from_xml(xml)?.to_machine())
}

#[cfg(not(feature = "hwloc"))]
fn from_lstopo(_xml: &str) -> Result<Machine> {
    Err(Error::invalid(
        "machine description",
        "lstopo's XML is read with the feature `hwloc` only",
    ))
}

/// The GPUs to use: those asked for, each once, else all.
pub fn selected(topology: &Topology, wanted: &[i32]) -> Result<Vec<i32>> {
    if wanted.is_empty() {
        return Ok(topology.gpus().iter().map(|gpu| gpu.ordinal).collect());
    }
    let mut gpus = Vec::new();
    for &ordinal in wanted {
        topology.gpu(ordinal)?;
        if !gpus.contains(&ordinal) {
            gpus.push(ordinal);
        }
    }
    Ok(gpus)
}

/// The report's list of nodes.
pub fn nodes(topology: &Topology) -> Vec<report::Node> {
    topology
        .nodes()
        .iter()
        .map(|node| report::Node {
            id: node.id.0,
            cpus: node.cpus.to_string(),
            memory_total: node.memory_total,
            memory_free: node.memory_free,
        })
        .collect()
}

/// The report's list of GPUs.
pub fn gpus(topology: &Topology, selected: &[i32]) -> Vec<report::Gpu> {
    topology
        .gpus()
        .iter()
        .filter(|gpu| selected.contains(&gpu.ordinal))
        .map(|gpu| report::Gpu {
            ordinal: gpu.ordinal,
            name: gpu.name.clone(),
            pci_bus_id: gpu.pci_bus_id.clone(),
            memory: gpu.memory,
            host_numa: gpu.host_node().ok().map(|node| node.0),
            memory_node: gpu.memory_node.map(|node| node.0),
            coherent: gpu.coherent,
            link: gpu.link.to_string(),
        })
        .collect()
}

/// The ids of the host nodes.
pub fn node_ids(topology: &Topology) -> Vec<NodeId> {
    topology.nodes().iter().map(|node| node.id).collect()
}

/// The machine's name for the report.
pub fn machine_of(chosen: &Chosen) -> report::Machine {
    let name = match &chosen.simulated {
        Some(name) => name.clone(),
        None => cpu_model().unwrap_or_else(|| "this machine".into()),
    };
    report::Machine {
        name,
        arch: std::env::consts::ARCH,
    }
}

fn cpu_model() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    let (_, name) = line.split_once(':')?;
    Some(name.trim().to_owned())
}
