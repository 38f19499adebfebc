//! Converts between topologies and machine descriptions.

use std::collections::BTreeMap;

use super::{NumaNode, PeerLink, PeerLinkKind, Topology};
use crate::Result;
use crate::driver::sim::{GpuSpec, Machine, NodeSpec, PeerAccess};
use crate::driver::{Driver, NodeId};

impl Topology {
    /// Returns the topology of a described machine: what [`discover`](Self::discover) finds on a driver that simulates
    /// it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the description contradicts itself ·
    /// [`Error::Topology`](crate::Error::Topology) if it names an XML file that cannot be read.
    pub fn of_machine(machine: &Machine) -> Result<Self> {
        let topology = Self::discover(&Driver::simulated(machine.clone())?)?;
        Ok(Self {
            live: None,
            ..topology
        })
    }

    /// Returns a description of the machine for the simulator:
    /// [`Driver::simulated`](crate::Driver::simulated).
    ///
    /// Fields that a topology does not know are as in [`Machine::default`]. Nodes without memory are left
    /// out. A GPU whose memory is unknown has 0 bytes, which the simulator refuses: fill it in. If a node's CPUs are
    /// unknown, no node of the description has CPUs.
    pub fn to_machine(&self) -> Machine {
        // The simulator refuses memory on a node without CPUs beside nodes that have some.
        let cpus_known = self.nodes.iter().all(|node| node.cpus_known);
        let cpus = |node: &NumaNode| cpus_known.then(|| node.cpus.to_string());
        let nodes: Vec<NodeSpec> = self
            .nodes
            .iter()
            .filter(|node| node.memory_total > 0)
            .map(|node| NodeSpec {
                id: node.id.0,
                cpus: cpus(node).unwrap_or_default(),
                memory: node.memory_total,
                distances: self.spec_distances(node),
            })
            .collect();
        let is_kept = |id: &NodeId| nodes.iter().any(|node| node.id == id.0);
        let id = |node: Option<NodeId>| node.map_or(-1, |node| node.0);
        let gpus = self.gpus.iter().map(|gpu| GpuSpec {
            name: gpu.name.clone(),
            pci_bus_id: gpu.pci_bus_id.clone(),
            uuid: gpu.uuid.map(String::from).unwrap_or_default(),
            memory: gpu.memory,
            host_numa: id(gpu.host_numa.filter(is_kept)),
            numa_id: id(gpu.memory_node),
            coherent: gpu.coherent,
            compute_capability: gpu
                .compute_capability
                .unwrap_or(GpuSpec::default().compute_capability),
            ..GpuSpec::default()
        });
        Machine {
            name: self
                .machine
                .clone()
                .unwrap_or_else(|| "from a topology".into()),
            gpus: gpus.collect(),
            peer_access: self.pairs(|link| link.access),
            nvlink: self.pairs(|link| link.kind == PeerLinkKind::Nvlink),
            nodes,
            ..Machine::default()
        }
    }

    /// Returns the distances to nodes that the description has; none if firmware calls another node local,
    /// which a description may not.
    fn spec_distances(&self, node: &NumaNode) -> BTreeMap<i32, u32> {
        let has_memory = |id: &NodeId| self.node(*id).is_ok_and(|node| node.memory_total > 0);
        let mut distances = BTreeMap::new();
        for (to, &distance) in node.distances.iter().filter(|(to, _)| has_memory(to)) {
            let is_plain = match *to == node.id {
                true => distance == 10,
                false => distance > 10,
            };
            if !is_plain {
                return BTreeMap::new();
            }
            distances.insert(to.0, distance);
        }
        distances
    }

    /// Returns the pairs of GPUs with such links. One GPU alone is as in [`Machine::default`].
    fn pairs(&self, is_such: impl Fn(&PeerLink) -> bool) -> PeerAccess {
        let pairs = self.gpus.iter().flat_map(|gpu| {
            let up = gpu.peer_links.iter();
            let up = up.filter(|link| is_such(link) && gpu.ordinal < link.gpu);
            up.map(|link| (gpu.ordinal, link.gpu))
        });
        let pairs: Vec<(i32, i32)> = pairs.collect();
        let all = self.gpus.len() * self.gpus.len().saturating_sub(1) / 2;
        match pairs.len() {
            count if count == all => PeerAccess::All,
            0 => PeerAccess::None,
            _ => PeerAccess::Pairs(pairs),
        }
    }
}
