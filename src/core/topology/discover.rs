//! Sources of a topology: the driver with hwloc, the kernel or a simulated host.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use super::kernel::Kernel;
use super::{Gpu, Live, NumaNode, Topology, TopologySource};
use crate::Result;
use crate::driver::{Driver, NodeId, SimulatedNode};
use crate::per_driver::PerDriver;

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
        let gpus = super::hwloc::locate_by_xml(host.topology_xml.as_deref(), &nodes, gpus)?;
        let (source, name) = (TopologySource::Simulated, Some(host.machine));
        Ok(Self::new(source, name, gpus, nodes, Some(Live::of(driver))))
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
        match super::hwloc::Machine::here() {
            Ok(machine) => return Self::with_hwloc(&machine, &kernel, gpus),
            Err(error) => tracing::warn!(%error, "the topology is read without hwloc"),
        }
        Self::of_this_machine(&kernel, gpus)
    }

    pub(super) fn of_this_machine(kernel: &Kernel, gpus: Vec<Gpu>) -> Self {
        let mut nodes = kernel.nodes(&gpu_memory(kernel, &gpus));
        let source = if nodes.is_empty() {
            let told: BTreeSet<NodeId> = gpus.iter().filter_map(|gpu| gpu.host_numa).collect();
            nodes = told.into_iter().map(NumaNode::new).collect();
            TopologySource::Driver
        } else {
            TopologySource::Kernel
        };
        Self::of_kernel(source, kernel, gpus, nodes, |_| None)
    }

    /// Returns a topology of `kernel`'s machine. `pci_node` tells the node of a GPU's PCI device, before the kernel does.
    pub(super) fn of_kernel(
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
pub(super) fn gpu_memory(kernel: &Kernel, gpus: &[Gpu]) -> BTreeSet<NodeId> {
    let told = gpus.iter().filter_map(|gpu| gpu.memory_node);
    kernel.gpu_memory_nodes().into_iter().chain(told).collect()
}

fn node(host: &SimulatedNode) -> Result<NumaNode> {
    let distances = host.distances.iter();
    Ok(NumaNode {
        cpus: host.cpus.parse()?,
        memory_total: host.memory,
        memory_free: Some(host.free),
        distances: distances
            .map(|(to, distance)| (NodeId(*to), *distance))
            .collect(),
        ..NumaNode::new(host.id)
    })
}
