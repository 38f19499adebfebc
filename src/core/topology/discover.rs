//! Sources of a topology: the driver with hwloc or the kernel, or an XML text.

use std::collections::BTreeSet;

#[cfg(feature = "hwloc")]
use super::hwloc;
use super::kernel::Kernel;
use super::{Gpu, Live, Locality, NumaNode, Topology, TopologySource};
#[cfg(feature = "hwloc")]
use crate::Error;
use crate::Result;
use crate::driver::{Driver, NodeId};

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
        if let Some(sim) = driver.sim() {
            let mut topology =
                Self::on_machine(sim.machine(), gpus, Live::Simulator(driver.clone()))?;
            topology.refresh_free();
            return Ok(topology);
        }
        Ok(Self::here(gpus))
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

    pub(super) fn of_this_machine(kernel: &Kernel, mut gpus: Vec<Gpu>) -> Self {
        let mut gpu_memory: BTreeSet<NodeId> = kernel.gpu_memory_nodes();
        gpu_memory.extend(gpus.iter().filter_map(|gpu| gpu.memory_node));
        let mut nodes = kernel.nodes(&gpu_memory);
        let source = if nodes.is_empty() {
            let told: BTreeSet<NodeId> = gpus.iter().filter_map(|gpu| gpu.host_numa).collect();
            nodes = told.into_iter().map(NumaNode::new).collect();
            TopologySource::Driver
        } else {
            TopologySource::Kernel
        };
        for gpu in &mut gpus {
            locate(gpu, &nodes, |bus_id| kernel.pci_node(bus_id));
        }
        Self::new(source, None, gpus, nodes, Live::Kernel)
    }

    /// As [`Self::of_this_machine`], but hwloc takes precedence over the kernel.
    #[cfg(feature = "hwloc")]
    pub(super) fn with_hwloc(
        machine: &hwloc::Machine,
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
        }
        if nodes.is_empty() {
            return Self::of_this_machine(kernel, gpus);
        }
        for gpu in &mut gpus {
            locate(gpu, &nodes, |bus_id| {
                machine
                    .pci_node(bus_id, &nodes)
                    .or_else(|| kernel.pci_node(bus_id))
            });
        }
        Self::new(TopologySource::Hwloc, None, gpus, nodes, Live::Kernel)
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
    #[cfg(feature = "hwloc")]
    pub fn from_xml(xml: &str) -> Result<Self> {
        let machine = hwloc::Machine::from_xml(xml)?;
        let nodes = machine.nodes(&BTreeSet::new());
        if nodes.is_empty() {
            return Err(Error::Topology {
                detail: "the XML has no NUMA node with memory or CPUs".into(),
            });
        }
        let gpus = machine.gpus(&nodes);
        Ok(Self::new(
            TopologySource::Xml,
            None,
            gpus,
            nodes,
            Live::Nobody,
        ))
    }
}

/// Finds the host node of a GPU whose driver does not know it, through PCI locality. A node that is not a
/// host node (a GPU's memory, or one that this machine lacks) does not count.
pub(super) fn locate(
    gpu: &mut Gpu,
    nodes: &[NumaNode],
    pci_node: impl FnOnce(&str) -> Option<NodeId>,
) {
    if gpu.host_numa.is_some() {
        return;
    }
    if let Some(id) = pci_node(&gpu.pci_bus_id)
        && nodes.iter().any(|node| node.id == id)
    {
        gpu.host_numa = Some(id);
        gpu.host_numa_source = Locality::Pci;
    }
}
