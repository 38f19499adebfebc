//! The node's topology: its GPUs, host NUMA nodes, and their distances.
//!
//! # On the simulator
//! The simulated driver reports the GPUs through the same calls as the real one. The host nodes come from the
//! simulated machine and not from the kernel: this machine may not have their CPUs, so no
//! thread is ever bound to them. Free memory is the simulated node's capacity less the bytes allocated there.

mod affinity;
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

use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

pub use affinity::ThreadBinding;
pub use gpu::{Gpu, GpuUuid, LinkKind, Locality};
pub use kernel::NodeCounts;
pub(crate) use node::add_once;
pub use node::{CpuSet, NumaNode};
pub use peer::{PeerLink, PeerLinkKind};
pub use place::{ALLOW_OVERCOMMIT, Overcommit, Placement, PlacementRequest, Share};

use crate::driver::{DeviceAttribute, Driver, NodeId, SimulatedNode};
use crate::per_driver::PerDriver;
use crate::{Error, Result};
use kernel::Kernel;
use peer::known;

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
        nodes.sort_unstable_by_key(|node| node.id);
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

impl Topology {
    /// Discovers the topology of the machine of `driver`.
    ///
    /// The driver reports the GPUs. hwloc (feature `hwloc`) or the kernel reports the host nodes, and the PCI
    /// locality of a GPU whose host node the driver does not know.
    ///
    /// Source: `cuDeviceGetAttribute` and its family; hwloc; `/sys/devices/system/node`.
    ///
    /// # Errors
    /// [`crate::Error::Driver`] if a driver call fails. An attribute that the driver is too old to know is
    /// unknown, not an error.
    pub fn discover(driver: &Driver) -> Result<Self> {
        let count = driver.device_count()?;
        let gpus = (0..count)
            .map(|ordinal| Gpu::of_driver(driver, ordinal, count))
            .collect::<Result<Vec<_>>>()?;
        let Some(host) = driver.simulated_host() else {
            return Ok(Self::here(gpus));
        };
        let nodes: Vec<NumaNode> = host.nodes.iter().map(node).collect::<Result<_>>()?;
        #[cfg(feature = "hwloc")]
        let gpus = hwloc::locate_by_xml(host.topology_xml.as_deref(), &nodes, gpus)?;
        let (source, name) = (TopologySource::Simulated, Some(host.machine));
        Ok(Self::new(source, name, gpus, nodes, Some(Live::of(driver))))
    }

    /// Returns the host node of a GPU: from the driver, or else from the machine's topology.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`]; as [`Gpu::host_node`] and [`of`](Self::of).
    pub fn host_node_of(driver: &Driver, gpu: i32) -> Result<NodeId> {
        Error::expect_gpu(gpu, driver.device_count()?)?;
        match known(driver.device_attribute(gpu, DeviceAttribute::HOST_NUMA_ID))? {
            Some(node) if node >= 0 => Ok(NodeId(node)),
            _ => Self::of(driver)?.gpu(gpu)?.host_node(),
        }
    }

    /// Returns the topology of the machine of `driver`, which the first call for the driver [discovers](Self::discover).
    /// [`NumaNode::memory_free`] is as of then; [`free_memory`](Self::free_memory) and
    /// [`refresh_free`](Self::refresh_free) read it anew.
    ///
    /// # Errors
    /// As [`discover`](Self::discover). The next call tries again.
    pub fn of(driver: &Driver) -> Result<Self> {
        static KNOWN: PerDriver<Arc<OnceLock<Topology>>> = PerDriver::new();
        let known = KNOWN.of(driver);
        let topology = match known.get() {
            Some(topology) => topology,
            None => {
                // The registry keeps no driver alive.
                let live = None;
                let topology = Self::discover(driver)?;
                known.get_or_init(|| Self { live, ..topology })
            }
        };
        Ok(Self {
            live: Some(Live::of(driver)),
            ..topology.clone()
        })
    }

    /// Returns this machine's host nodes without GPUs, for machines without a driver.
    pub fn of_host() -> Self {
        Self::here(Vec::new())
    }

    /// Returns this machine's topology with these GPUs.
    fn here(gpus: Vec<Gpu>) -> Self {
        let kernel = Kernel::here();
        #[cfg(feature = "hwloc")]
        match hwloc::Machine::here() {
            Ok(machine) => return Self::with_hwloc(&machine, &kernel, gpus),
            Err(error) => tracing::warn!(%error, "the topology is read without hwloc"),
        }
        Self::of_this_machine(&kernel, gpus)
    }

    fn of_this_machine(kernel: &Kernel, gpus: Vec<Gpu>) -> Self {
        let mut nodes = kernel.nodes(&gpu_memory(kernel, &gpus));
        let source = if nodes.is_empty() {
            let mut told = Vec::new();
            let nodes_of_gpus = gpus.iter().filter_map(|gpu| gpu.host_numa);
            nodes_of_gpus.for_each(|node| add_once(&mut told, node));
            nodes = told.into_iter().map(NumaNode::new).collect();
            TopologySource::Driver
        } else {
            TopologySource::Kernel
        };
        Self::of_kernel(source, kernel, gpus, nodes, |_| None)
    }

    /// Returns a topology of `kernel`'s machine. `pci_node` tells the node of a GPU's PCI device, before the kernel does.
    fn of_kernel(
        source: TopologySource,
        kernel: &Kernel,
        mut gpus: Vec<Gpu>,
        mut nodes: Vec<NumaNode>,
        pci_node: impl Fn(&str) -> Option<NodeId>,
    ) -> Self {
        for gpu in &mut gpus {
            gpu.locate(&nodes, |bus_id| {
                pci_node(bus_id).or_else(|| kernel.pci_node(bus_id))
            });
        }
        if let Some(allowed) = kernel.allowed_nodes() {
            for node in &mut nodes {
                node.allowed = allowed.contains(&node.id);
            }
        }
        Self {
            cgroup_room: kernel.memory_room(),
            ..Self::new(source, None, gpus, nodes, Some(Live::Kernel))
        }
    }
}

/// Returns the nodes that are GPUs' own memory, as the kernel and the driver tell.
fn gpu_memory(kernel: &Kernel, gpus: &[Gpu]) -> Vec<NodeId> {
    let mut nodes = kernel.gpu_memory_nodes();
    nodes.extend(gpus.iter().filter_map(|gpu| gpu.memory_node));
    nodes
}

fn node(host: &SimulatedNode) -> Result<NumaNode> {
    let mut node = NumaNode {
        cpus: host.cpus.parse()?,
        memory_total: host.memory,
        memory_free: Some(host.free),
        ..NumaNode::new(host.id)
    };
    let distances = host.distances.iter();
    let distances = distances.map(|(to, distance)| (NodeId(*to), *distance));
    node.distances.extend(distances);
    Ok(node)
}

#[cfg(test)]
mod tests;
