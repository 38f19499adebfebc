//! The machine's part through hwloc: the only file that uses hwlocality.
//!
//! The driver and the kernel also report which nodes are GPUs' own memory. So hwloc's own switch for them is
//! not needed (`HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES`, an environment variable that versions before 2.11 read at
//! discovery): setting it here would race with other threads that read the environment.

use std::ffi::CStr;
use std::path::Path;

use hwlocality::Topology as Hwloc;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::{ObjectAttributes, PCIDeviceAttributes};
use hwlocality::object::types::ObjectType;
use hwlocality::topology::builder::{BuildFlags, TypeFilter};

use super::gpu_memory;
use super::kernel::Kernel;
use super::{
    CpuSet, Gpu, GpuUuid, LinkKind, Locality, NumaNode, PeerLink, Topology, TopologySource,
};
use crate::driver::NodeId;
use crate::{Error, Result};

/// NVIDIA's PCI vendor id.
const NVIDIA: u16 = 0x10de;
/// The PCI base class of display controllers, including 3D controllers.
const DISPLAY: u16 = 0x03;

/// hwloc's view of a machine.
pub(super) struct Machine(Hwloc);

impl Machine {
    /// Discovers this machine: its nodes and PCI devices, including those that the process may not use.
    ///
    /// Leaves out OS devices, for which hwloc would call CUDA, NVML and OpenCL.
    pub(super) fn here() -> Result<Self> {
        let build = || -> std::result::Result<Hwloc, Box<dyn std::error::Error>> {
            let hwloc = Hwloc::builder()
                .with_flags(BuildFlags::INCLUDE_DISALLOWED)?
                .with_type_filter(ObjectType::PCIDevice, TypeFilter::KeepAll)?
                .build()?;
            // HWLOC_XMLFILE and HWLOC_SYNTHETIC can substitute another machine.
            if !hwloc.is_this_system() {
                return Err("it was told to describe another machine".into());
            }
            Ok(hwloc)
        };
        build().map(Self).map_err(|error| Error::Topology {
            detail: format!("hwloc: {error}"),
        })
    }

    /// Reads the machine of an XML text, as `lstopo` writes it.
    pub(super) fn from_xml(xml: &str) -> Result<Self> {
        let build = || -> std::result::Result<Hwloc, Box<dyn std::error::Error>> {
            Ok(Hwloc::builder()
                .from_xml(xml)?
                .with_flags(BuildFlags::INCLUDE_DISALLOWED)?
                .with_io_type_filter(TypeFilter::KeepAll)?
                .build()?)
        };
        build().map(Self).map_err(|error| Error::Topology {
            detail: match newer_version(xml) {
                Some(version) => format!(
                    "this XML is of hwloc {version}, and the hwloc of this build reads those of 1 and 2: write it with \
                     `lstopo --export-xml-flags v2`"
                ),
                None => format!("this is not an hwloc XML: {error}"),
            },
        })
    }

    /// Returns the host nodes, without the `gpu_memory` nodes and those that hwloc knows to be GPUs'.
    ///
    /// hwloc does not report free memory: it is `None`.
    pub(super) fn nodes(&self, gpu_memory: &[NodeId]) -> Vec<NumaNode> {
        let is_host = |id: NodeId| !gpu_memory.contains(&id);
        let hosts = self.0.objects_with_type(ObjectType::NUMANode);
        let hosts: Vec<&TopologyObject> = hosts
            .filter(|object| !is_gpu_memory(object) && id(object).is_some_and(is_host))
            .collect();
        let node = |&object: &&TopologyObject| {
            let own = own_cpus(object, &hosts);
            Some(NumaNode {
                cpus_known: own.is_some(),
                cpus: own.unwrap_or_default(),
                memory_total: local_memory(object),
                ..NumaNode::new(id(object)?)
            })
        };
        let mut nodes: Vec<NumaNode> = hosts.iter().filter_map(node).collect();
        nodes.retain(|node| node.memory_total > 0 || !node.lacks_cpus());
        self.add_distances(&mut nodes);
        nodes
    }

    fn add_distances(&self, nodes: &mut [NumaNode]) {
        let matrices = self.0.distances_with_name("NUMALatency");
        let matrices = matrices.unwrap_or_default();
        let all = matrices.first().map(|matrix| matrix.object_distances());
        for ((from, to), distance) in all.into_iter().flatten() {
            if let (Some(from), Some(to)) = (from.and_then(id), to.and_then(id))
                && let Ok(distance) = u32::try_from(distance)
                && let Some(node) = nodes.iter_mut().find(|node| node.id == from)
            {
                node.distances.insert(to, distance);
            }
        }
    }

    /// Returns the host node of a PCI device, if there is only one.
    pub(super) fn pci_node(&self, bus_id: &str, hosts: &[NumaNode]) -> Option<NodeId> {
        let address = super::kernel::sysfs_pci_address(bus_id)?;
        let is_it =
            |device: &&TopologyObject| pci(device).map(pci_address) == Some(address.clone());
        only_host_node(self.0.pci_devices().find(is_it)?, hosts)
    }

    /// Returns NVIDIA's GPUs, by CUDA ordinal if hwloc knows it, otherwise in the order of their PCI
    /// addresses, which is CUDA's order for GPUs of one kind.
    pub(super) fn gpus(&self, hosts: &[NumaNode]) -> Vec<Gpu> {
        let nodes = self.0.objects_with_type(ObjectType::NUMANode);
        let memory_nodes: Vec<&TopologyObject> =
            nodes.filter(|object| is_gpu_memory(object)).collect();
        let is_gpu =
            |pci: &PCIDeviceAttributes| pci.vendor_id() == NVIDIA && pci.class_id() >> 8 == DISPLAY;
        let found = self.0.pci_devices().filter_map(|device| {
            let pci = pci(device).filter(|pci| is_gpu(pci))?;
            Some(gpu(device, pci, hosts, &memory_nodes))
        });
        let mut found: Vec<(Option<i32>, Gpu)> = found.collect();
        found.sort_by_key(|(ordinal, gpu)| (ordinal.unwrap_or(i32::MAX), gpu.pci_bus_id.clone()));
        let count = found.len() as i32;
        let others = |ordinal| (0..count).filter(move |peer| *peer != ordinal);
        let numbered = (0..count).zip(found).map(|(ordinal, (_, gpu))| Gpu {
            ordinal,
            peer_links: others(ordinal).map(PeerLink::unknown).collect(),
            ..gpu
        });
        numbered.collect()
    }
}

/// Returns the version of an XML of hwloc 3 or later.
fn newer_version(xml: &str) -> Option<&str> {
    let (_, after) = xml.split_once("<topology")?;
    let (attributes, _) = after.split_once('>')?;
    let (_, version) = attributes.split_once("version=\"")?;
    let (version, _) = version.split_once('"')?;
    let (major, _) = version.split_once('.').unwrap_or((version, ""));
    (major.parse::<u32>().ok()? > 2).then_some(version)
}

fn gpu(
    device: &TopologyObject,
    pci: &PCIDeviceAttributes,
    hosts: &[NumaNode],
    memory_nodes: &[&TopologyObject],
) -> (Option<i32>, Gpu) {
    let pci_bus_id = pci_address(pci);
    let children: Vec<&TopologyObject> = device.io_children().collect();
    let info = |key: &str| {
        let told = children.iter().find_map(|child| child.info(key));
        told.or_else(|| device.info(key)).map(text)
    };
    let ordinal = children
        .iter()
        .filter_map(|child| child.name())
        .find_map(|name| text(name).strip_prefix("cuda")?.parse::<i32>().ok());
    let memory_node = memory_nodes
        .iter()
        .find(|node| node.info("PCIBusID").map(text) == Some(pci_bus_id.clone()));
    let kib = |key: &str| info(key)?.parse::<u64>().ok()?.checked_mul(1024);
    let memory = kib("CUDAGlobalMemorySize")
        .or_else(|| kib("OpenCLGlobalMemorySize"))
        .or_else(|| memory_node.map(|node| local_memory(node)))
        .unwrap_or(0);
    let name = info("GPUModel")
        .or_else(|| info("PCIDevice"))
        .unwrap_or_else(|| "NVIDIA GPU".into());
    // hwloc before 2.11 hides the GPUs' memory nodes; the product's name decides then.
    let superchip = ["GH200", "GB200", "GB300"]
        .iter()
        .any(|chip| name.contains(chip));
    let coherent = memory_node.is_some() || superchip;
    let host_numa = only_host_node(device, hosts);
    let gpu = Gpu {
        name,
        uuid: info("NVIDIAUUID").and_then(|uuid| uuid.parse::<GpuUuid>().ok()),
        memory,
        host_numa,
        host_numa_source: host_numa.map_or(Locality::Unknown, |_| Locality::Pci),
        memory_node: memory_node.and_then(|node| id(node)),
        coherent,
        link: if coherent {
            LinkKind::NvlinkC2c
        } else {
            LinkKind::Pcie
        },
        pci_bus_id,
        ..Gpu::default()
    };
    (ordinal, gpu)
}

fn text(text: &CStr) -> String {
    text.to_string_lossy().into_owned()
}

fn id(node: &TopologyObject) -> Option<NodeId> {
    i32::try_from(node.os_index()?).ok().map(NodeId)
}

fn local_memory(node: &TopologyObject) -> u64 {
    match node.attributes() {
        Some(ObjectAttributes::NUMANode(numa)) => {
            numa.local_memory().map_or(0, |bytes| bytes.get())
        }
        _ => 0,
    }
}

/// Returns the CPUs of one of the nodes `hosts`; `None` if unknown.
///
/// In Linux a CPU belongs to one node, but hwloc gives a node without CPUs those of one or several neighbours. So a node
/// that has all of another's and more has none of its own. Of nodes with the same CPUs, those without memory have none
/// of them; then they belong to the only one that hwloc calls DRAM, if there is one: the others are HBM, NVM or the
/// like, which have no CPUs.
fn own_cpus(node: &TopologyObject, hosts: &[&TopologyObject]) -> Option<CpuSet> {
    let claimed = cpus(node);
    let is_within = |part: &CpuSet, whole: &CpuSet| part.intersection(whole) == *part;
    let others = hosts.iter().filter(|other| id(other) != id(node));
    let rivals: Vec<(&TopologyObject, CpuSet)> = others
        .filter(|other| local_memory(other) > 0)
        .map(|&other| (other, cpus(other)))
        .filter(|(_, theirs)| !theirs.intersection(&claimed).is_empty())
        .filter(|(_, theirs)| *theirs == claimed || !is_within(&claimed, theirs))
        .collect();
    if rivals.is_empty() {
        return Some(claimed);
    }
    if rivals
        .iter()
        .any(|(_, theirs)| *theirs != claimed && is_within(theirs, &claimed))
    {
        return Some(CpuSet::default());
    }
    let drams = rivals.iter().filter(|(rival, _)| is_dram(rival)).count();
    match (is_dram(node), drams) {
        (true, 0) => Some(claimed),
        (false, 1) => Some(CpuSet::default()),
        _ => None,
    }
}

/// Returns the CPUs that hwloc gives to a node.
fn cpus(node: &TopologyObject) -> CpuSet {
    let set = node.cpuset();
    let cpus = set.iter().flat_map(|set| set.iter_set());
    cpus.filter_map(|cpu| u32::try_from(usize::from(cpu)).ok())
        .collect()
}

fn is_dram(node: &TopologyObject) -> bool {
    node.subtype().is_some_and(|subtype| subtype == c"DRAM")
}

fn is_gpu_memory(node: &TopologyObject) -> bool {
    node.subtype()
        .is_some_and(|subtype| subtype == c"GPUMemory")
}

fn pci(device: &TopologyObject) -> Option<&PCIDeviceAttributes> {
    match device.attributes() {
        Some(ObjectAttributes::PCIDevice(pci)) => Some(pci),
        _ => None,
    }
}

/// Formats an address as sysfs does.
fn pci_address(pci: &PCIDeviceAttributes) -> String {
    format!(
        "{:04x}:{:02x}:{:02x}.{:x}",
        pci.domain(),
        pci.bus_id(),
        pci.bus_device(),
        pci.function()
    )
}

fn only_host_node(device: &TopologyObject, hosts: &[NumaNode]) -> Option<NodeId> {
    let near = device.first_non_io_ancestor()?.nodeset()?;
    let is_near = |node: &&NumaNode| usize::try_from(node.id.0).is_ok_and(|id| near.is_set(id));
    let mut hosts = hosts.iter().filter(is_near);
    match (hosts.next(), hosts.next()) {
        (Some(node), None) => Some(node.id),
        _ => None,
    }
}

impl Topology {
    /// As `of_this_machine`, but hwloc takes precedence over the kernel.
    pub(super) fn with_hwloc(machine: &Machine, kernel: &Kernel, gpus: Vec<Gpu>) -> Self {
        let gpu_memory = gpu_memory(kernel, &gpus);
        let mut nodes = machine.nodes(&gpu_memory);
        let of_kernel = kernel.nodes(&gpu_memory);
        // The kernel lists nodes with memory or CPUs. hwloc may give an empty one a neighbour's.
        nodes.retain_mut(|node| {
            let Some(same) = of_kernel.iter().find(|other| other.id == node.id) else {
                return node.memory_total > 0;
            };
            node.memory_free = same.memory_free;
            node.memory_total = node.memory_total.max(same.memory_total);
            // hwloc gives a node without CPUs those of its neighbour.
            if same.cpus_known {
                (node.cpus, node.cpus_known) = (same.cpus.clone(), true);
            }
            true
        });
        if nodes.is_empty() {
            return Self::of_this_machine(kernel, gpus);
        }
        let hosts = nodes.clone();
        let pci_node = |bus_id: &str| machine.pci_node(bus_id, &hosts);
        Self::of_kernel(TopologySource::Hwloc, kernel, gpus, nodes, pci_node)
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
        let mut nodes = machine.nodes(&[]);
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
pub(super) fn locate_by_xml(
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

#[cfg(test)]
mod tests;
