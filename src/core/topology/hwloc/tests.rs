//! Tests of hwloc's part of a topology.

use super::*;
use crate::topology::kernel::Kernel;
use crate::topology::kernel::tests::Tree;
use crate::topology::{Topology, TopologySource};

const TWO_SOCKETS: &str = include_str!("../../../../tests/data/h200-two-sockets.xml");

#[test]
fn hwloc_and_the_kernel_agree_about_this_machine() {
    let kernel = Kernel::here();
    let of_kernel = kernel.nodes(&kernel.gpu_memory_nodes());
    let Ok(machine) = Machine::here() else {
        return; // HWLOC_XMLFILE or HWLOC_SYNTHETIC is set
    };
    let topology = Topology::with_hwloc(&machine, &kernel, Vec::new());
    let of_hwloc = topology.nodes();
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

    let mut gpus = machine.gpus(&machine.nodes(&[]));
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

const FIRST_WITHOUT_CPUS: &str = include_str!("../../../../tests/data/node-without-cpus-first.xml");
const THREE_WITHOUT_CPUS: &str =
    include_str!("../../../../tests/data/three-nodes-without-cpus-first.xml");

/// Returns the CPUs of an XML's nodes; `None` where they are unknown.
fn cpus_of(xml: &str) -> Vec<Option<String>> {
    let nodes = Machine::from_xml(xml).unwrap().nodes(&[]);
    let known = |node: NumaNode| node.cpus_known.then(|| node.cpus.to_string());
    nodes.into_iter().map(known).collect()
}

#[test]
fn a_node_without_cpus_keeps_no_cpus_of_its_neighbours() {
    let own = |cpus: &str| Some(cpus.to_owned());
    assert_eq!(cpus_of(FIRST_WITHOUT_CPUS), [None, None, own("4-7")]);
    assert_eq!(
        cpus_of(THREE_WITHOUT_CPUS),
        [None, None, None, None, own("")]
    );
    let kind = |id: &str, kind: &str| {
        let node = format!("type=\"NUMANode\" os_index=\"{id}\"");
        (node.clone(), format!("{node} subtype=\"{kind}\""))
    };
    let ((old, dram), (_, hbm)) = (kind("1", "DRAM"), kind("1", "HBM"));
    let with = |new: &str| FIRST_WITHOUT_CPUS.replace(&old, new);
    assert_eq!(cpus_of(&with(&dram)), [own(""), own("0-3"), own("4-7")]);
    assert_eq!(cpus_of(&with(&hbm)), [None, None, own("4-7")]);
    let (old, both) = kind("0", "DRAM");
    assert_eq!(
        cpus_of(&with(&dram).replace(&old, &both)),
        [None, None, own("4-7")]
    );
}

const NEIGHBOURS_CPUS: &str = include_str!("../../../../tests/data/nodes-with-neighbours-cpus.xml");

/// hwloc gives node 2, which has memory alone, the CPUs of both neighbours, and node 3, which is empty, those of node 1.
#[test]
fn nodes_with_the_cpus_of_several_neighbours_or_without_memory_have_none() {
    let topology = Topology::from_xml(NEIGHBOURS_CPUS).unwrap();
    let found: Vec<_> = topology
        .nodes()
        .iter()
        .map(|node| (node.id.0, node.cpus.to_string(), node.cpus_known))
        .collect();
    let own = |id, cpus: &str| (id, cpus.to_owned(), true);
    assert_eq!(found, [own(0, "0-1"), own(1, "2-3"), own(2, "")]);
    let spread = crate::topology::Placement::Spread.request(64 << 20);
    assert_eq!(spread.place(&topology).unwrap().len(), 2);

    // On the machine itself the kernel lists neither node 3's memory nor CPUs.
    let tree = Tree::new();
    tree.file("sys/devices/system/node/online", "0-3\n");
    for (id, cpus, kib) in [(0, "0-1\n", 9), (1, "2-3\n", 9), (2, "\n", 9), (3, "\n", 0)] {
        let folder = format!("sys/devices/system/node/node{id}");
        tree.file(&format!("{folder}/cpulist"), cpus);
        tree.file(
            &format!("{folder}/meminfo"),
            &format!("Node {id} MemTotal: {kib} kB\n"),
        );
    }
    let machine = Machine::from_xml(NEIGHBOURS_CPUS).unwrap();
    let topology = Topology::with_hwloc(&machine, &tree.kernel(), Vec::new());
    let ids: Vec<_> = topology.nodes().iter().map(|node| node.id.0).collect();
    assert_eq!(ids, [0, 1, 2]);
}

#[test]
fn unknown_cpus_are_said_to_be_unknown_and_count_as_some() {
    let topology = Topology::from_xml(FIRST_WITHOUT_CPUS).unwrap();
    assert_eq!(topology.to_text().matches("CPUs unknown").count(), 2);
    assert!(!topology.to_text().contains("no CPUs"));
    let mut nodes = topology.to_machine().nodes.into_iter();
    assert!(nodes.all(|node| node.cpus.is_empty()));
    let shares = crate::topology::Placement::Spread.request(6 << 30);
    assert_eq!(shares.place(&topology).unwrap().len(), 3);
}

#[test]
fn the_kernel_says_which_node_has_cpus() {
    let machine = Machine::from_xml(FIRST_WITHOUT_CPUS).unwrap();
    let tree = Tree::new();
    tree.file("sys/devices/system/node/online", "0-2\n");
    for (id, cpus) in [(0, "\n"), (1, "0-3\n"), (2, "4-7\n")] {
        let folder = format!("sys/devices/system/node/node{id}");
        tree.file(&format!("{folder}/cpulist"), cpus);
        tree.file(&format!("{folder}/meminfo"), "Node 0 MemTotal: 9 kB\n");
    }
    let topology = Topology::with_hwloc(&machine, &tree.kernel(), Vec::new());
    let cpus = topology.nodes().iter().map(|node| node.cpus.to_string());
    assert_eq!(cpus.collect::<Vec<_>>(), ["", "0-3", "4-7"]);
    assert!(topology.nodes().iter().all(|node| node.cpus_known));
}

#[test]
fn an_xml_of_a_later_hwloc_is_named_as_one() {
    let xml = TWO_SOCKETS.replacen("version=\"2.0\"", "version=\"3.0\"", 1);
    assert_ne!(xml, TWO_SOCKETS);
    match Machine::from_xml(&xml).map(|_| ()) {
        Err(error) => assert!(error.to_string().contains("of hwloc 3.0"), "{error}"),
        Ok(()) => println!("this hwloc reads it"),
    }
    let error = Machine::from_xml("<xml>").map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("not an hwloc XML"), "{error}");
}

#[test]
fn a_node_that_the_driver_calls_gpu_memory_is_no_host_node() {
    let machine = Machine::from_xml(TWO_SOCKETS).unwrap();
    let nodes = machine.nodes(&[NodeId(1)]);
    assert_eq!(nodes.iter().map(|node| node.id.0).collect::<Vec<_>>(), [0]);
}
