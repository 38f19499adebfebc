//! Topologies of hwloc's machines.

use std::collections::BTreeSet;
use std::path::Path;

use super::Machine;
use crate::driver::NodeId;
use crate::topology::discover::mark_allowed;
use crate::topology::kernel::Kernel;
use crate::topology::{Gpu, Live, NumaNode, Topology, TopologySource};
use crate::{Error, Result};

impl Topology {
    /// As `of_this_machine`, but hwloc takes precedence over the kernel.
    pub(in crate::topology) fn with_hwloc(
        machine: &Machine,
        kernel: &Kernel,
        mut gpus: Vec<Gpu>,
    ) -> Self {
        let mut gpu_memory: BTreeSet<NodeId> = kernel.gpu_memory_nodes();
        gpu_memory.extend(gpus.iter().filter_map(|gpu| gpu.memory_node));
        let mut nodes = machine.nodes(&gpu_memory);
        let of_kernel = kernel.nodes(&gpu_memory);
        for node in &mut nodes {
            let same = of_kernel.iter().find(|other| other.id == node.id);
            node.memory_free = same.and_then(|same| same.memory_free);
            node.memory_total = same
                .map_or(0, |same| same.memory_total)
                .max(node.memory_total);
            // hwloc gives a node without CPUs those of its neighbour.
            if let Some(same) = same.filter(|same| same.cpus_known) {
                (node.cpus, node.cpus_known) = (same.cpus.clone(), true);
            }
        }
        // The kernel lists nodes with memory or CPUs. hwloc may give an empty one a neighbour's.
        nodes.retain(|node| {
            node.memory_total > 0 || of_kernel.iter().any(|same| same.id == node.id)
        });
        if nodes.is_empty() {
            return Self::of_this_machine(kernel, gpus);
        }
        for gpu in &mut gpus {
            gpu.locate(&nodes, |bus_id| {
                machine
                    .pci_node(bus_id, &nodes)
                    .or_else(|| kernel.pci_node(bus_id))
            });
        }
        mark_allowed(&mut nodes, kernel);
        Self::new(TopologySource::Hwloc, None, gpus, nodes, Some(Live::Kernel)).limited_by(kernel)
    }

    /// Reads a topology from an XML text of hwloc, as `lstopo machine.xml` writes it: of this machine or of
    /// any other.
    ///
    /// Its GPUs are NVIDIA's display and 3D controllers on the PCI bus. Name, UUID and memory are known if
    /// hwloc was built with its CUDA, NVML or OpenCL part; the memory also from the NUMA node that a coherent
    /// GPU's memory forms, and otherwise 0. All GPUs count as peers of each other, because the XML does not
    /// say.
    ///
    /// # Errors
    /// [`Error::Topology`] if hwloc cannot parse it or finds no memory in it.
    pub fn from_xml(xml: &str) -> Result<Self> {
        let machine = Machine::from_xml(xml)?;
        let mut nodes = machine.nodes(&BTreeSet::new());
        // An empty node with a neighbour's CPUs, such as those for a GPU's MIG slices.
        nodes.retain(|node| node.memory_total > 0 || node.cpus_known);
        if nodes.is_empty() {
            return Err(Error::Topology {
                detail: "the XML has no NUMA node with memory or CPUs".into(),
            });
        }
        let gpus = machine.gpus(&nodes);
        Ok(Self::new(TopologySource::Xml, None, gpus, nodes, None))
    }
}

/// Stands for hwloc's answer about a simulated machine, for GPUs whose host node the driver does not know.
pub(in crate::topology) fn locate_by_xml(
    xml: Option<&Path>,
    nodes: &[NumaNode],
    mut gpus: Vec<Gpu>,
) -> Result<Vec<Gpu>> {
    let Some(path) = xml else {
        return Ok(gpus);
    };
    let xml = std::fs::read_to_string(path).map_err(|error| Error::Topology {
        detail: format!("{}: {error}", path.display()),
    })?;
    let machine = Machine::from_xml(&xml)?;
    for gpu in &mut gpus {
        gpu.locate(nodes, |bus_id| machine.pci_node(bus_id, nodes));
    }
    Ok(gpus)
}
