//! Descriptions of machines to simulate.

use serde::{Deserialize, Serialize};

use crate::driver::CudaVersion;

/// A machine to simulate: its NUMA nodes, GPUs and driver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// A name for people.
    pub name: String,
    /// What `cuDriverGetVersion` answers.
    pub driver_version: CudaVersion,
    /// The host NUMA nodes: at least one.
    pub nodes: Vec<NodeSpec>,
    /// The GPUs, by CUDA ordinal.
    pub gpus: Vec<GpuSpec>,
    /// Whether there is an IMEX channel, without which FABRIC is refused.
    pub imex_channel: bool,
    /// Whether a host-NUMA pool may become a device's pool, so that `cudaMallocAsync` draws from it.
    pub host_pool_for_device: bool,
}

/// A host NUMA node: a CPU socket's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeSpec {
    /// The operating system's id.
    pub id: i32,
    /// Its CPUs as a list, such as `0-71`.
    pub cpus: String,
    /// Its memory in bytes.
    pub memory: u64,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuSpec {
    /// Its product name.
    pub name: String,
    /// `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Its memory in bytes.
    pub memory: u64,
    /// HOST_NUMA_ID; −1: unknown.
    pub host_numa: i32,
    /// NUMA_ID: the node that its own memory forms on coherent machines; −1: none.
    pub numa_id: i32,
    /// Whether it reaches host memory coherently, over NVLink-C2C.
    pub coherent: bool,
}
