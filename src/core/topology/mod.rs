//! The node's topology: its GPUs, host NUMA nodes, and their distances.
//!
//! # On the simulator
//! The simulated driver reports the GPUs through the same calls as the real one. The host nodes come from the
//! simulated machine and not from the kernel: this machine may not have their CPUs, so no
//! thread is ever bound to them. Free memory is the simulated node's capacity less the bytes allocated there.

mod affinity;
mod cgroup;
mod discover;
mod display;
mod gpu;
#[cfg(feature = "hwloc")]
mod hwloc;
pub(crate) mod kernel;
#[cfg(feature = "simulator")]
mod machine;
mod node;
mod peer;
mod place;

use serde::{Deserialize, Serialize};

pub use affinity::ThreadBinding;
pub use gpu::{Gpu, GpuUuid, LinkKind, Locality};
use kernel::Kernel;
pub use kernel::NodeCounts;
pub use node::{CpuSet, NumaNode};
pub use peer::{PeerLink, PeerLinkKind};
pub use place::{ALLOW_OVERCOMMIT, Overcommit, Placement, PlacementRequest, Share};

use crate::driver::{Driver, NodeId};
use crate::{Error, Result};

/// The GPUs and host NUMA nodes of a machine.
///
/// It is read once: only [`Topology::refresh_free`] changes it.
#[derive(Clone, Debug, Serialize)]
pub struct Topology {
    source: TopologySource,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine: Option<String>,
    gpus: Vec<Gpu>,
    nodes: Vec<NumaNode>,
    /// The bytes that the control groups left to this process on all nodes together; `None`: no limit.
    #[serde(skip)]
    cgroup_room: Option<u64>,
    #[serde(skip)]
    live: Option<Live>,
}

/// The source of values that change. A topology of a machine elsewhere has none.
#[derive(Clone, Debug)]
enum Live {
    /// This machine's kernel.
    Kernel,
    /// The simulator.
    Simulator(Driver),
}

impl Live {
    fn of(driver: &Driver) -> Self {
        if driver.simulated_host().is_some() {
            return Self::Simulator(driver.clone());
        }
        Self::Kernel
    }
}

impl Topology {
    fn new(
        source: TopologySource,
        machine: Option<String>,
        mut gpus: Vec<Gpu>,
        mut nodes: Vec<NumaNode>,
        live: Option<Live>,
    ) -> Self {
        nodes.sort_by_key(|node| node.id);
        let choices: Vec<NodeId> = nodes.iter().map(|node| node.id).collect();
        for gpu in &mut gpus {
            gpu.choices.clone_from(&choices);
            let with_access = gpu.peer_links.iter().filter(|link| link.access);
            gpu.peers = with_access.map(|link| link.gpu).collect();
        }
        for node in &mut nodes {
            node.distances.retain(|to, _| choices.contains(to));
            let near = gpus.iter().filter(|gpu| gpu.host_numa == Some(node.id));
            node.gpus = near.map(|gpu| gpu.ordinal).collect();
        }
        Self {
            source,
            machine,
            gpus,
            nodes,
            cgroup_room: None,
            live,
        }
    }

    /// Returns the topology's source.
    pub fn source(&self) -> TopologySource {
        self.source
    }

    /// Returns the name of the simulated machine.
    pub fn machine(&self) -> Option<&str> {
        self.machine.as_deref()
    }

    /// Returns the GPUs, by ordinal.
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// Returns the GPU with this CUDA ordinal.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`]
    pub fn gpu(&self, ordinal: i32) -> Result<&Gpu> {
        let found = self.gpus.iter().find(|gpu| gpu.ordinal == ordinal);
        found.ok_or(Error::NoSuchGpu {
            gpu: ordinal,
            count: self.gpus.len(),
        })
    }

    /// Returns the host nodes (the CPUs' memory), by ascending id; never a GPU's own memory.
    pub fn nodes(&self) -> &[NumaNode] {
        &self.nodes
    }

    /// Returns the host node with this id.
    ///
    /// # Errors
    /// [`Error::NoSuchNode`], also if the id is that of a GPU's own memory.
    pub fn node(&self, id: NodeId) -> Result<&NumaNode> {
        let found = self.nodes.iter().find(|node| node.id == id);
        found.ok_or_else(|| Error::NoSuchNode {
            node: id,
            gpu: self.gpu_with_memory(id),
            choices: self.node_ids(),
        })
    }

    /// Returns the GPU whose own memory is this NUMA node.
    pub fn gpu_with_memory(&self, id: NodeId) -> Option<i32> {
        let gpu = self.gpus.iter().find(|gpu| gpu.memory_node == Some(id))?;
        Some(gpu.ordinal)
    }

    /// Returns the ids of the host nodes, ascending.
    pub fn node_ids(&self) -> Vec<NodeId> {
        self.nodes.iter().map(|node| node.id).collect()
    }

    /// Returns the bytes that an allocation on the node could get now; `None` if unknown.
    ///
    /// # Errors
    /// [`Error::NoSuchNode`]
    pub fn free_memory(&self, id: NodeId) -> Result<Option<u64>> {
        Ok(self.live_free(self.node(id)?))
    }

    /// Returns the use of a node's memory, as the kernel counts it now; `None` for a simulated machine, one that was read
    /// from a file, and a node that the kernel does not know.
    pub fn counts(&self, id: NodeId) -> Option<NodeCounts> {
        match &self.live {
            Some(Live::Kernel) => Kernel::here().counts(id),
            _ => None,
        }
    }

    /// Reads again how much memory of each node is free.
    pub fn refresh_free(&mut self) {
        let free: Vec<Option<u64>> = self.nodes.iter().map(|node| self.live_free(node)).collect();
        for (node, free) in self.nodes.iter_mut().zip(free) {
            node.memory_free = free;
        }
        if matches!(self.live, Some(Live::Kernel)) {
            self.cgroup_room = Kernel::here().memory_room();
        }
    }

    fn live_free(&self, node: &NumaNode) -> Option<u64> {
        match &self.live {
            Some(Live::Kernel) => Kernel::here().free_memory(node.id),
            Some(Live::Simulator(driver)) => free_now(driver, node.id),
            None => node.memory_free,
        }
    }
}

/// Returns the bytes that an allocation on a host node of `driver`'s machine could get now.
///
/// `None` if unknown, or if there is no such node.
pub fn free_now(driver: &Driver, node: NodeId) -> Option<u64> {
    let Some(host) = driver.simulated_host() else {
        return Kernel::here().free_memory(node);
    };
    let mut nodes = host.nodes.iter();
    let found = nodes.find(|of_host| of_host.id == node);
    found.map(|of_host| of_host.free)
}

/// Returns the bytes that the control groups leave to this process, on all nodes of `driver`'s machine together; `None` if
/// there is no limit, or if the machine is simulated. Each node's [`free_now`] is within it, but their sum need not be.
pub fn cgroup_room(driver: &Driver) -> Option<u64> {
    match driver.simulated_host() {
        Some(_) => None,
        None => Kernel::here().memory_room(),
    }
}

/// The source of a topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TopologySource {
    /// The driver, and hwloc for the machine's part.
    Hwloc,
    /// The driver, and the kernel for the machine's part: this build has no hwloc, or hwloc failed.
    Kernel,
    /// Only the driver: the kernel reports no NUMA nodes.
    Driver,
    /// An XML file of hwloc, as `lstopo` writes it: of a machine that may be elsewhere.
    Xml,
    /// A simulated machine.
    Simulated,
}

crate::driver::display_texts! {
    TopologySource {
        Self::Hwloc => "the driver and hwloc",
        Self::Kernel => "the driver and the kernel, without hwloc",
        Self::Driver => "only the driver",
        Self::Xml => "an hwloc XML file",
        Self::Simulated => "a described machine, SIMULATED",
    }
}

#[cfg(test)]
mod tests;
