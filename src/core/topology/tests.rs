//! Tests of discovery without a driver: handmade GPUs, and the kernel's files in a folder.

use super::kernel::tests::Tree;
use super::*;
use crate::driver::{Backend, Call, Code, DeviceAttribute, PoolCalls};

/// A driver of one GPU that answers each question for an attribute with an error.
#[derive(Debug)]
struct WithoutAttributes(Code);

// SAFETY: it maps no memory.
unsafe impl Backend for WithoutAttributes {
    fn name(&self) -> &'static str {
        "without-attributes"
    }
    fn driver_pools(&self) -> &dyn PoolCalls {
        self
    }
    fn device_count(&self) -> Result<i32> {
        Ok(1)
    }
    fn device_name(&self, _: i32) -> Result<String> {
        Ok("GPU".into())
    }
    fn device_uuid(&self, _: i32) -> Result<[u8; 16]> {
        Ok([7; 16])
    }
    fn device_pci_bus_id(&self, _: i32) -> Result<String> {
        Ok("0000:01:00.0".into())
    }
    fn device_total_mem(&self, _: i32) -> Result<u64> {
        Ok(1 << 30)
    }
    fn device_attribute(&self, _: i32, _: DeviceAttribute) -> Result<i32> {
        Err(Error::driver(Call::DeviceGetAttribute, self.0))
    }
}

// SAFETY: as above.
unsafe impl PoolCalls for WithoutAttributes {
    fn api(&self) -> &'static str {
        "without-attributes"
    }
}

#[test]
fn a_driver_need_not_know_the_attributes_of_a_gpu() {
    let found = |code| {
        let driver = Driver::from_backend(std::sync::Arc::new(WithoutAttributes(code)));
        Gpu::of_driver(&driver, 0, 1)
    };
    for code in [Code::INVALID_VALUE, Code::NOT_SUPPORTED] {
        let gpu = found(code).unwrap();
        assert_eq!(
            (gpu.memory, gpu.host_numa, gpu.compute_capability),
            (1 << 30, None, None)
        );
        let driver = Driver::from_backend(std::sync::Arc::new(WithoutAttributes(code)));
        let node = Topology::host_node_of(&driver, 0).unwrap_err();
        assert!(!matches!(node, Error::Driver(_)), "{node}");
    }
    assert!(found(Code::UNKNOWN).is_err());
}

fn gpu(ordinal: i32, host_numa: Option<i32>) -> Gpu {
    Gpu {
        ordinal,
        name: "NVIDIA H200".into(),
        pci_bus_id: format!("0000:{:02x}:00.0", 0x10 + ordinal),
        uuid: Some(GpuUuid::of_device([ordinal as u8; 16], "NVIDIA H200")),
        memory: 141 << 30,
        compute_capability: Some((9, 0)),
        host_numa: host_numa.map(NodeId),
        host_numa_source: match host_numa {
            Some(_) => Locality::Driver,
            None => Locality::Unknown,
        },
        memory_node: None,
        coherent: false,
        link: LinkKind::Pcie,
        peers: Vec::new(),
        peer_links: Vec::new(),
        choices: Vec::new(),
    }
}

fn two_nodes() -> Tree {
    let tree = Tree::new();
    tree.file("sys/devices/system/node/online", "0-1\n");
    for (id, cpus) in [(0, "0-3"), (1, "4-7")] {
        let node = format!("sys/devices/system/node/node{id}");
        tree.file(&format!("{node}/cpulist"), cpus);
        tree.file(
            &format!("{node}/meminfo"),
            &format!("Node {id} MemTotal: 100 kB\nNode {id} MemFree: 50 kB\n"),
        );
    }
    tree
}

#[test]
fn a_long_list_of_cpus_is_shown_whole() {
    let tree = two_nodes();
    let cpus: Vec<String> = (0..400).map(|cpu| (2 * cpu).to_string()).collect();
    let node = "sys/devices/system/node/node0/cpulist";
    tree.file(node, &cpus.join(","));
    let text = Topology::of_this_machine(&tree.kernel(), Vec::new()).to_text();
    assert!(text.contains("796,798)"), "{text}");
}

#[test]
fn a_host_node_that_the_driver_does_not_know_is_found_by_pci_locality() {
    let tree = two_nodes();
    tree.file("sys/bus/pci/devices/0000:10:00.0/numa_node", "1\n");
    tree.file("sys/bus/pci/devices/0000:11:00.0/numa_node", "-1\n");
    tree.file("sys/bus/pci/devices/0000:12:00.0/numa_node", "1\n");
    tree.file("sys/bus/pci/devices/0000:13:00.0/numa_node", "9\n");
    let gpus = vec![gpu(0, None), gpu(1, None), gpu(2, Some(0)), gpu(3, None)];
    let topology = Topology::of_this_machine(&tree.kernel(), gpus);

    assert_eq!(topology.source(), TopologySource::Kernel);
    let found: Vec<_> = topology
        .gpus()
        .iter()
        .map(|g| (g.host_numa, g.host_numa_source))
        .collect();
    assert_eq!(
        found,
        [
            (Some(NodeId(1)), Locality::Pci),
            (None, Locality::Unknown),
            (Some(NodeId(0)), Locality::Driver), // the driver's word stands
            (None, Locality::Unknown),           // a node that is none
        ]
    );
    assert_eq!(
        topology.gpu(1).unwrap().host_node(),
        Err(Error::NodeUnknown {
            gpu: 1,
            choices: vec![NodeId(0), NodeId(1)]
        })
    );
    assert_eq!(topology.node(NodeId(1)).unwrap().gpus, [0]);
    assert_eq!(topology.node(NodeId(0)).unwrap().gpus, [2]);
}

#[test]
fn even_a_single_node_is_not_assumed() {
    let tree = Tree::new();
    tree.file("proc/meminfo", "MemTotal: 100 kB\nMemFree: 50 kB\n");
    let topology = Topology::of_this_machine(&tree.kernel(), vec![gpu(0, None)]);
    assert_eq!(
        topology.gpu(0).unwrap().host_node(),
        Err(Error::NodeUnknown {
            gpu: 0,
            choices: vec![NodeId(0)]
        })
    );
}

#[test]
fn without_kernel_files_it_is_what_the_driver_reports_and_says_so() {
    let topology = Topology::of_this_machine(
        &Tree::new().kernel(),
        vec![gpu(0, Some(2)), gpu(1, Some(0))],
    );
    assert_eq!(topology.source(), TopologySource::Driver);
    assert_eq!(topology.source().to_string(), "only the driver");
    assert_eq!(topology.node_ids(), [NodeId(0), NodeId(2)]);
    assert_eq!(topology.nodes()[0].memory_free, None);
}

#[test]
fn a_gpus_own_memory_is_no_host_node() {
    let tree = two_nodes();
    let mut coherent = gpu(0, Some(0));
    coherent.memory_node = Some(NodeId(1));
    let topology = Topology::of_this_machine(&tree.kernel(), vec![coherent]);
    assert_eq!(topology.node_ids(), [NodeId(0)]);
    assert!(matches!(
        topology.node(NodeId(1)),
        Err(Error::NoSuchNode { .. })
    ));
}

/// Returns the groups of `count` GPUs where each of these pairs has a link.
fn groups(count: i32, pairs: &[(i32, i32, bool)]) -> Vec<(Vec<i32>, String)> {
    let mut gpus: Vec<Gpu> = (0..count).map(|ordinal| gpu(ordinal, Some(0))).collect();
    for &(a, b, nvlink) in pairs {
        for (from, to) in [(a, b), (b, a)] {
            let link = PeerLink {
                kind: PeerLinkKind::guess(Some(nvlink), None),
                native_atomics: Some(nvlink),
                ..PeerLink::unknown(to)
            };
            gpus[from as usize].peer_links.push(link);
        }
    }
    let topology = Topology::of_this_machine(&Tree::new().kernel(), gpus);
    let groups = topology.peer_groups().into_iter();
    groups.map(|group| (group.gpus, group.words)).collect()
}

#[test]
fn gpus_that_are_linked_alike_are_a_group() {
    let nvlink = || "NVLink, native atomics".to_owned();
    let pcie = || "PCIe, no native atomics".to_owned();
    assert_eq!(groups(3, &[]), []);
    assert_eq!(groups(2, &[(0, 1, true)]), [(vec![0, 1], nvlink())]);
    // Two pairs by NVLink, and PCIe between all others: no group of four.
    let mut pairs = vec![(0, 1, true), (2, 3, true)];
    pairs.extend([(0, 2), (0, 3), (1, 2), (1, 3)].map(|(a, b)| (a, b, false)));
    let found = groups(4, &pairs);
    assert_eq!(
        found[..2],
        [vec![0, 1], vec![2, 3]].map(|pair| (pair, nvlink()))
    );
    let others = [(0, 2), (0, 3), (1, 2), (1, 3)];
    assert_eq!(found[2..], others.map(|(a, b)| (vec![a, b], pcie())));
    // A chain is no group.
    let chain = groups(3, &[(0, 1, true), (1, 2, true)]);
    assert_eq!(chain, [(vec![0, 1], nvlink()), (vec![1, 2], nvlink())]);
    let triangle = groups(3, &[(0, 1, true), (1, 2, true), (0, 2, true)]);
    assert_eq!(triangle, [(vec![0, 1, 2], nvlink())]);
}

#[test]
fn the_kernel_says_which_nodes_the_process_may_allocate_on() {
    let tree = two_nodes();
    let allowed = || {
        let topology = Topology::of_this_machine(&tree.kernel(), Vec::new());
        let nodes = topology.nodes().iter().map(|node| node.allowed);
        (nodes.collect::<Vec<_>>(), topology.to_text())
    };
    assert_eq!(allowed().0, [true, true], "unknown");
    tree.file("proc/self/status", "Mems_allowed_list:\t1\n");
    let (nodes, text) = allowed();
    assert_eq!(nodes, [false, true]);
    assert_eq!(text.matches("cpuset.mems").count(), 1, "{text}");
}

#[test]
fn a_drivers_topology_is_discovered_once() {
    use crate::driver::Call;
    let driver = Driver::simulated(crate::Machine::gh200x4()).unwrap();
    let sim = driver.sim().unwrap();
    let first = Topology::of(&driver).unwrap();
    assert_eq!(sim.count(Call::DeviceGetName), 4);
    let second = Topology::of(&driver.clone()).unwrap();
    assert_eq!(sim.count(Call::DeviceGetName), 4);
    assert_eq!(first.gpus(), second.gpus());
    let free = |topology: &Topology| topology.free_memory(NodeId(1)).unwrap();
    assert_eq!(free(&second), free(&Topology::discover(&driver).unwrap()));
    // Another driver has a topology of its own, and a failure is not kept.
    let other = Driver::simulated(crate::Machine::gh200()).unwrap();
    let sim = other.sim().unwrap();
    sim.fail(Call::DeviceGetName, 1, crate::driver::Code::OUT_OF_MEMORY);
    assert!(Topology::of(&other).is_err());
    assert_eq!(Topology::of(&other).unwrap().gpus().len(), 1);
}

#[test]
fn a_known_topology_keeps_no_driver() {
    let driver = Driver::simulated(crate::Machine::gh200()).unwrap();
    let weak = driver.downgrade();
    drop(Topology::of(&driver).unwrap());
    drop(driver);
    assert!(!weak.is_alive());
}
