//! What the machine is: by hwloc, by the kernel, by XML.

use egmem::driver::NodeId;
use egmem::topology::{Locality, Placement, Topology, TopologySource};
use serde_json::json;

use crate::nodes::pages::Pages;
use crate::nodes::{MIB, SLACK, discover, facts, nodes, on_machine, stub, without_hwloc, xml};

/// Checks the machine as `ci/nodes` describes it.
fn expect_three(topology: &Topology) {
    let found = topology.nodes();
    let ids: Vec<_> = found.iter().map(|node| node.id).collect();
    assert_eq!(ids, nodes(&[0, 1, 2]));
    let cpus: Vec<_> = found.iter().map(|node| node.cpus.to_string()).collect();
    assert_eq!(cpus, ["0-1", "2-3", ""]);
    let distances: Vec<Vec<u32>> = found
        .iter()
        .map(|node| node.distances.values().copied().collect())
        .collect();
    assert_eq!(distances, [[10, 20, 30], [20, 10, 30], [30, 30, 10]]);
    for (node, installed) in found.iter().zip([768, 384, 256]) {
        let total = node.memory_total;
        assert!(node.cpus_known && node.allowed, "{node:?}");
        // The kernel keeps some for itself.
        assert!(
            total < installed * MIB && total > installed * MIB * 7 / 10,
            "{node:?}"
        );
    }
}

on_machine! { "three";
    fn hwloc_is_right() {
        let topology = Topology::of_host();
        assert_eq!(topology.source(), TopologySource::Hwloc);
        expect_three(&topology);
        let free = topology.nodes().iter().map(|node| node.memory_free.unwrap());
        let total = topology.nodes().iter().map(|node| node.memory_total);
        assert!(free.zip(total).all(|(free, total)| free > 0 && free <= total));
    }

    fn the_kernel_is_right() {
        let name = "the_kernel_is_right";
        without_hwloc(module_path!(), name, || {
            let topology = Topology::of_host();
            assert_eq!(topology.source(), TopologySource::Kernel);
            expect_three(&topology);
        });
    }

    fn an_xml_is_right() {
        let topology = Topology::from_xml(&xml()).unwrap();
        assert_eq!(topology.source(), TopologySource::Xml);
        expect_three(&topology);
        assert_eq!(facts(&topology), facts(&Topology::of_host()));
    }

    /// The driver does not know the GPUs' nodes: the PCI bus does.
    fn gpus_are_near_the_nodes_of_their_buses() {
        let topology = discover(Some(&stub()));
        assert_eq!(topology.source(), TopologySource::Hwloc);
        expect_near(&topology);
    }

    fn gpus_are_near_the_nodes_of_their_buses_by_the_kernel() {
        let name = "gpus_are_near_the_nodes_of_their_buses_by_the_kernel";
        without_hwloc(module_path!(), name, || {
            let topology = discover(Some(&stub()));
            assert_eq!(topology.source(), TopologySource::Kernel);
            expect_near(&topology);
        });
    }

    fn use_is_counted_on_the_node_that_has_it() {
        let topology = Topology::of_host();
        let counts = || [0, 1, 2].map(|node| topology.counts(NodeId(node)).unwrap());
        let free = || [0, 1, 2].map(|node| topology.free_memory(NodeId(node)).unwrap().unwrap());
        let (before, free_before) = (counts(), free());
        for (node, counts) in topology.nodes().iter().zip(before) {
            assert_eq!(counts.total, node.memory_total);
            assert!(counts.free + counts.ordinary <= counts.total, "{node:?}: {counts:?}");
        }
        let bytes = 64 * MIB;
        let pages = Pages::on(1, bytes).unwrap();
        let (after, free_after) = (counts(), free());
        let was = before[1];
        let grown = |after: u64, before: u64| after.abs_diff(before + bytes) < SLACK;
        assert!(grown(after[1].ordinary, was.ordinary), "{was:?}, {:?}", after[1]);
        assert!(grown(was.free, after[1].free), "{was:?}, {:?}", after[1]);
        assert!(grown(free_before[1], free_after[1]), "{free_before:?}, {free_after:?}");
        for other in [0, 2] {
            let (was, is) = (before[other], after[other]);
            assert!(is.free.abs_diff(was.free) < SLACK, "node {other}: {was:?}, {is:?}");
        }
        drop(pages);
        let freed = free();
        assert!(freed[1].abs_diff(free_before[1]) < SLACK, "{free_before:?}, {freed:?}");
    }

    fn a_simulated_machine_is_made_of_it() {
        let topology = Topology::of_host();
        let mut machine = topology.to_machine();
        machine.gpus = egmem::Machine::h200x8().gpus;
        machine.gpus.truncate(2);
        for (gpu, node) in machine.gpus.iter_mut().zip([0, 1]) {
            gpu.host_numa = node;
        }
        let driver = egmem::Driver::simulated(machine).unwrap();
        let simulated = discover(Some(&driver));
        assert_eq!(facts(&simulated), facts(&topology));
        let nearest = |gpu| Placement::Nearest { gpu }.request(2 * MIB).place(&simulated);
        assert_eq!(nearest(1).unwrap()[0].node, NodeId(1));
    }
}

fn expect_near(topology: &Topology) {
    expect_three(topology);
    for (gpu, node) in topology.gpus().iter().zip([0, 1]) {
        let found = (gpu.host_node(), gpu.host_numa_source);
        assert_eq!(found, (Ok(NodeId(node)), Locality::Pci), "{gpu:?}");
        let gpu = gpu.ordinal;
        let shares = Placement::Nearest { gpu }.request(2 * MIB).place(topology);
        assert_eq!(shares.unwrap()[0].node, NodeId(node));
    }
    let near = topology.nodes().iter().map(|node| json!(node.gpus));
    assert_eq!(
        near.collect::<Vec<_>>(),
        [json!([0]), json!([1]), json!([])]
    );
}
