//! The demo's results, in the form of its JSON.

use egmem::doctor::measure::{Bandwidth, Proof};
use serde::Serialize;

/// Everything. The fields' names are an interface: other programs read them.
#[derive(Debug, Serialize)]
pub struct Report {
    /// `cuda` or `simulated`.
    pub backend: &'static str,
    /// Why it simulates although the user did not ask for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_simulated: Option<String>,
    pub machine: Machine,
    /// The driver's CUDA version: `13.0`.
    pub driver_version: String,
    /// The bytes of each allocation.
    pub size: u64,
    /// Where the topology comes from.
    pub topology: String,
    pub nodes: Vec<Node>,
    pub gpus: Vec<Gpu>,
    pub proofs: Vec<Proof>,
    /// Whether plain `cudaMallocAsync` can draw from a host pool: an extra that many platforms
    /// refuse, so it does not count for the exit status. Only with a CUDA runtime library.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub malloc_async: Vec<Proof>,
    /// Why the runtime API's pools were not tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_missing: Option<String>,
    /// Only of GPUs: the simulator has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
}

/// The machine, real or simulated.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// The simulated machine's name; the CPU's model of a real one.
    pub name: String,
    /// The instruction set that this program was built for.
    pub arch: &'static str,
}

/// A host NUMA node.
#[derive(Debug, Serialize)]
pub struct Node {
    pub id: i32,
    pub cpus: String,
    pub memory_total: u64,
    pub memory_free: Option<u64>,
}

/// A GPU.
#[derive(Debug, Serialize)]
pub struct Gpu {
    /// The CUDA ordinal.
    pub ordinal: i32,
    pub name: String,
    pub pci_bus_id: String,
    pub memory: u64,
    /// Its host NUMA node; null if unknown.
    pub host_numa: Option<i32>,
    /// The NUMA node that its own memory forms, on coherent machines.
    pub memory_node: Option<i32>,
    pub coherent: bool,
    pub link: String,
}
