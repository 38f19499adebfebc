//! The machine's part through hwloc: the only file that uses hwlocality.
//!
//! The driver and the kernel also report which nodes are GPUs' own memory. So hwloc's own switch for them is
//! not needed (`HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES`, an environment variable that versions before 2.11 read at
//! discovery): setting it here would race with other threads that read the environment.

mod topology;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;

use hwlocality::Topology as Hwloc;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::{ObjectAttributes, PCIDeviceAttributes};
use hwlocality::object::types::ObjectType;
use hwlocality::topology::builder::{BuildFlags, TypeFilter};

pub(super) use topology::locate_by_xml;

use super::{CpuSet, Gpu, GpuUuid, LinkKind, Locality, NumaNode, PeerLink};
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
            match hwloc.is_this_system() {
                true => Ok(hwloc),
                false => Err("it was told to describe another machine".into()),
            }
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
            detail: format!("this is not an hwloc XML: {error}"),
        })
    }

    /// Returns the host nodes, without the `gpu_memory` nodes and those that hwloc knows to be GPUs'.
    ///
    /// hwloc does not report free memory: it is `None`.
    pub(super) fn nodes(&self, gpu_memory: &BTreeSet<NodeId>) -> Vec<NumaNode> {
        let mut taken = BTreeSet::new();
        let hosts: Vec<&TopologyObject> = self
            .0
            .objects_with_type(ObjectType::NUMANode)
            .filter(|object| !is_gpu_memory(object))
            .filter(|object| id(object).is_some_and(|id| !gpu_memory.contains(&id)))
            .collect();
        let mut nodes: Vec<NumaNode> = hosts
            .into_iter()
            .filter_map(|object| {
                let cpus = object.cpuset();
                // hwloc gives a node without CPUs those of its neighbours. In Linux a CPU belongs to one
                // node: if several claim it, to the one with the lowest id.
                let own: CpuSet = cpus
                    .iter()
                    .flat_map(|set| set.iter_set())
                    .filter_map(|cpu| u32::try_from(usize::from(cpu)).ok())
                    .filter(|cpu| taken.insert(*cpu))
                    .collect();
                Some(NumaNode {
                    cpus: own,
                    memory_total: local_memory(object),
                    ..NumaNode::new(id(object)?)
                })
            })
            .filter(|node| node.memory_total > 0 || !node.cpus.is_empty())
            .collect();
        self.add_distances(&mut nodes);
        nodes
    }

    fn add_distances(&self, nodes: &mut [NumaNode]) {
        let matrices = self
            .0
            .distances_with_name("NUMALatency")
            .unwrap_or_default();
        let Some(matrix) = matrices.first() else {
            return;
        };
        let mut all: BTreeMap<NodeId, BTreeMap<NodeId, u32>> = BTreeMap::new();
        for ((from, to), distance) in matrix.object_distances() {
            if let (Some(from), Some(to)) = (from.and_then(id), to.and_then(id))
                && let Ok(distance) = u32::try_from(distance)
            {
                all.entry(from).or_default().insert(to, distance);
            }
        }
        for node in nodes {
            node.distances = all.remove(&node.id).unwrap_or_default();
        }
    }

    /// Returns the host node of a PCI device, if there is only one.
    pub(super) fn pci_node(&self, bus_id: &str, hosts: &[NumaNode]) -> Option<NodeId> {
        let address = super::kernel::sysfs_pci_address(bus_id)?;
        let device = self
            .0
            .pci_devices()
            .find(|device| pci(device).is_some_and(|pci| pci_address(pci) == address))?;
        only_host_node(device, hosts)
    }

    /// Returns NVIDIA's GPUs, by CUDA ordinal if hwloc knows it, otherwise in the order of their PCI
    /// addresses, which is CUDA's order for GPUs of one kind.
    pub(super) fn gpus(&self, hosts: &[NumaNode]) -> Vec<Gpu> {
        let memory_nodes: Vec<&TopologyObject> = self
            .0
            .objects_with_type(ObjectType::NUMANode)
            .filter(|object| is_gpu_memory(object))
            .collect();
        let mut found: Vec<(Option<i32>, Gpu)> = self
            .0
            .pci_devices()
            .filter_map(|device| Some((device, pci(device)?)))
            .filter(|(_, pci)| pci.vendor_id() == NVIDIA && pci.class_id() >> 8 == DISPLAY)
            .map(|(device, pci)| gpu(device, pci, hosts, &memory_nodes))
            .collect();
        found.sort_by_key(|(ordinal, gpu)| (ordinal.unwrap_or(i32::MAX), gpu.pci_bus_id.clone()));
        let count = found.len() as i32;
        let others = |ordinal| (0..count).filter(move |peer| *peer != ordinal);
        (0..count)
            .zip(found)
            .map(|(ordinal, (_, gpu))| Gpu {
                ordinal,
                peers: others(ordinal).collect(),
                peer_links: others(ordinal).map(PeerLink::unknown).collect(),
                ..gpu
            })
            .collect()
    }
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
        ordinal: -1,
        name,
        uuid: info("NVIDIAUUID").and_then(|uuid| uuid.parse::<GpuUuid>().ok()),
        memory,
        compute_capability: None,
        host_numa,
        host_numa_source: match host_numa {
            Some(_) => Locality::Pci,
            None => Locality::Unknown,
        },
        memory_node: memory_node.and_then(|node| id(node)),
        coherent,
        link: if coherent {
            LinkKind::NvlinkC2c
        } else {
            LinkKind::Pcie
        },
        peers: Vec::new(),
        peer_links: Vec::new(),
        choices: Vec::new(),
        pci_bus_id,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::kernel::Kernel;
    use crate::topology::test_tree::Tree;
    use crate::topology::{Topology, TopologySource};

    const TWO_SOCKETS: &str = include_str!("../../../tests/data/h200-two-sockets.xml");

    #[test]
    fn hwloc_and_the_kernel_agree_about_this_machine() {
        let of_kernel = Kernel::here().nodes(&BTreeSet::new());
        let Ok(machine) = Machine::here() else {
            return; // HWLOC_XMLFILE or HWLOC_SYNTHETIC is set
        };
        let of_hwloc = machine.nodes(&BTreeSet::new());
        if of_kernel.is_empty() {
            return; // a system without /sys
        }
        let key = |node: &NumaNode| (node.id, node.cpus.clone());
        assert_eq!(
            of_hwloc.iter().map(key).collect::<Vec<_>>(),
            of_kernel.iter().map(key).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_gpu_is_placed_by_hwloc_and_free_memory_is_the_kernels() {
        let machine = Machine::from_xml(TWO_SOCKETS).unwrap();
        let tree = Tree::new();
        tree.file("sys/devices/system/node/online", "0-1\n");
        let meminfo = "Node 1 MemTotal: 9 kB\nNode 1 MemFree: 5 kB\n";
        tree.file("sys/devices/system/node/node1/meminfo", meminfo);
        tree.file("sys/bus/pci/devices/0001:8d:00.0/numa_node", "0\n"); // hwloc's word comes first
        tree.file("sys/bus/pci/devices/0002:8f:00.0/numa_node", "1\n"); // hwloc does not know

        let mut gpus = machine.gpus(&machine.nodes(&BTreeSet::new()));
        for gpu in &mut gpus {
            (gpu.host_numa, gpu.host_numa_source) = (None, Locality::Unknown);
        }
        gpus[0].host_numa = Some(NodeId(1)); // the driver's word stands
        gpus[0].host_numa_source = Locality::Driver;
        let topology = Topology::with_hwloc(&machine, &tree.kernel(), gpus);

        assert_eq!(topology.source(), TopologySource::Hwloc);
        let found: Vec<_> = topology
            .gpus()
            .iter()
            .map(|gpu| (gpu.host_numa.map(|id| id.0), gpu.host_numa_source))
            .collect();
        let pci = Locality::Pci;
        assert_eq!(
            found,
            [(Some(1), Locality::Driver), (Some(1), pci), (Some(1), pci)]
        );
        let free: Vec<_> = topology
            .nodes()
            .iter()
            .map(|node| node.memory_free)
            .collect();
        assert_eq!(free, [None, Some(5 << 10)]);
        assert_eq!(topology.nodes()[0].memory_total, 512 << 30);
    }

    #[test]
    fn a_node_that_the_driver_calls_gpu_memory_is_no_host_node() {
        let machine = Machine::from_xml(TWO_SOCKETS).unwrap();
        let nodes = machine.nodes(&BTreeSet::from([NodeId(1)]));
        assert_eq!(nodes.iter().map(|node| node.id.0).collect::<Vec<_>>(), [0]);
    }
}
