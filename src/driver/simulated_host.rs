//! The host of a machine that a driver simulates.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::NodeId;

/// The host of a simulated machine: the same facts as the kernel reports of this machine, as of one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedHost {
    /// The machine's name.
    pub machine: String,
    /// Its host NUMA nodes.
    pub nodes: Vec<SimulatedNode>,
    /// Whether there is an IMEX channel.
    pub imex_channel: bool,
    /// The process's memory mappings.
    pub mappings: u64,
    /// The most that it may have; `None`: no limit.
    pub max_mappings: Option<u64>,
    /// An `lstopo` XML file of the machine, which stands for hwloc's answer.
    pub topology_xml: Option<PathBuf>,
}

/// A host NUMA node of a simulated machine.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedNode {
    /// The operating system's id.
    pub id: NodeId,
    /// Its CPUs as a list, such as `0-71`; may be empty.
    pub cpus: String,
    /// Its memory in bytes.
    pub memory: u64,
    /// The bytes of it that an allocation could get.
    pub free: u64,
    /// The distances to other NUMA nodes, including GPU memories: 10 is the node itself. Empty: unknown.
    pub distances: BTreeMap<i32, u32>,
}
