//! Converts between topologies and machine descriptions.

use std::collections::BTreeMap;

use super::{Gpu, Live, NumaNode, Topology, TopologySource};
use crate::Result;
use crate::driver::NodeId;
use crate::driver::sim::{GpuSpec, Machine, NodeSpec, PeerAccess};

impl Topology {
    /// Returns the topology of a described machine, without a driver that simulates it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for an invalid list of CPUs ·
    /// [`Error::Topology`](crate::Error::Topology) if the description names an XML file that cannot be read.
    pub fn of_machine(machine: &Machine) -> Result<Self> {
        let gpus = (0..).zip(&machine.gpus);
        let gpus = gpus.map(|(ordinal, spec)| Gpu::of_spec(machine, spec, ordinal));
        Self::on_machine(machine, gpus.collect(), Live::Nobody)
    }

    pub(super) fn on_machine(machine: &Machine, mut gpus: Vec<Gpu>, live: Live) -> Result<Self> {
        let nodes: Vec<NumaNode> = machine.nodes.iter().map(node).collect::<Result<_>>()?;
        locate_by_xml(machine, &nodes, &mut gpus)?;
        let name = Some(machine.name.clone());
        Ok(Self::new(
            TopologySource::Simulated,
            name,
            gpus,
            nodes,
            live,
        ))
    }

    /// Returns a description of the machine for the simulator:
    /// [`Driver::simulated`](crate::Driver::simulated).
    ///
    /// Fields that a topology does not know are as in [`Machine::default`]. Nodes without memory are left
    /// out. A GPU whose memory is unknown has 0 bytes, which the simulator refuses: fill it in.
    pub fn to_machine(&self) -> Machine {
        let nodes: Vec<NodeSpec> = self
            .nodes
            .iter()
            .filter(|node| node.memory_total > 0)
            .map(|node| NodeSpec {
                id: node.id.0,
                cpus: node.cpus.to_string(),
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
            peer_access: self.peer_access(),
            nodes,
            ..Machine::default()
        }
    }

    /// Returns the distances to nodes that the description has; none if firmware calls another node local,
    /// which a description may not.
    fn spec_distances(&self, node: &NumaNode) -> BTreeMap<i32, u32> {
        let has_memory = |id: &NodeId| self.node(*id).is_ok_and(|node| node.memory_total > 0);
        let told = node.distances.iter().filter(|(to, _)| has_memory(to));
        let distances: BTreeMap<i32, u32> = told.map(|(to, distance)| (to.0, *distance)).collect();
        let is_plain = |(to, distance): (&i32, &u32)| match *to == node.id.0 {
            true => *distance == 10,
            false => *distance > 10,
        };
        match distances.iter().all(is_plain) {
            true => distances,
            false => BTreeMap::new(),
        }
    }

    fn peer_access(&self) -> PeerAccess {
        if self
            .gpus
            .iter()
            .all(|gpu| gpu.peers.len() + 1 == self.gpus.len())
        {
            return PeerAccess::All;
        }
        let pairs: Vec<(i32, i32)> = self
            .gpus
            .iter()
            .flat_map(|gpu| gpu.peers.iter().map(|peer| (gpu.ordinal, *peer)))
            .filter(|(gpu, peer)| gpu < peer)
            .collect();
        match pairs.is_empty() {
            true => PeerAccess::None,
            false => PeerAccess::Pairs(pairs),
        }
    }
}

fn node(spec: &NodeSpec) -> Result<NumaNode> {
    let host_distances = spec
        .distances
        .iter()
        .map(|(to, distance)| (NodeId(*to), *distance));
    Ok(NumaNode {
        cpus: spec.cpus.parse()?,
        memory_total: spec.memory,
        memory_free: Some(spec.memory),
        distances: host_distances.collect(),
        ..NumaNode::new(NodeId(spec.id))
    })
}

/// Stands for hwloc for GPUs whose host node the simulated driver does not know.
#[cfg(feature = "hwloc")]
fn locate_by_xml(machine: &Machine, nodes: &[NumaNode], gpus: &mut [Gpu]) -> Result<()> {
    let Some(path) = &machine.topology_xml else {
        return Ok(());
    };
    let xml = std::fs::read_to_string(path).map_err(|error| crate::Error::Topology {
        detail: format!("{}: {error}", path.display()),
    })?;
    let hwloc = super::hwloc::Machine::from_xml(&xml)?;
    for gpu in gpus {
        super::discover::locate(gpu, nodes, |bus_id| hwloc.pci_node(bus_id, nodes));
    }
    Ok(())
}

/// Without hwloc the XML is not read.
#[cfg(not(feature = "hwloc"))]
fn locate_by_xml(_: &Machine, _: &[NumaNode], _: &mut [Gpu]) -> Result<()> {
    Ok(())
}
