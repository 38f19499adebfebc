//! CPUs that go offline.

use egmem::Error;
use egmem::driver::NodeId;
use egmem::topology::{Placement, Topology};

use crate::nodes::kernel::offline;
use crate::nodes::{MIB, facts, nodes, on_machine, without_hwloc, xml};

fn cpus(topology: &Topology) -> Vec<String> {
    topology
        .nodes()
        .iter()
        .map(|node| node.cpus.to_string())
        .collect()
}

fn spread(topology: &Topology) -> Vec<NodeId> {
    let shares = Placement::Spread.request(64 * MIB).place(topology).unwrap();
    shares.iter().map(|share| share.node).collect()
}

on_machine! { "three";
    fn a_node_keeps_the_cpus_that_are_online() {
        let before = Topology::of_host();
        let _cpu = offline(3);
        let topology = Topology::of_host();
        assert_eq!(cpus(&topology), ["0-1", "2", ""]);
        assert_eq!(facts(&Topology::from_xml(&xml()).unwrap()), facts(&topology));
        assert_eq!(spread(&topology), nodes(&[0, 1]));
        // Also by a topology that was read before.
        for topology in [&topology, &before] {
            let bound = topology.bind_thread(NodeId(1)).unwrap();
            assert_eq!(bound.cpus().to_string(), "2");
            assert_eq!(topology.current_node(), Ok(NodeId(1)));
            assert_eq!(topology.usable_cpus(NodeId(1)).unwrap().to_string(), "2");
        }
    }

    fn a_node_whose_cpus_are_all_offline_has_none() {
        let before = Topology::of_host();
        let _cpus = [offline(3), offline(2)];
        let topology = Topology::of_host();
        expect_none(&topology);
        // hwloc gives it node 0's, and its XML does not say which of the two has them.
        let by_xml = Topology::from_xml(&xml()).unwrap();
        let known: Vec<_> = by_xml.nodes().iter().map(|node| node.cpus_known).collect();
        assert_eq!(known, [false, false, true]);
        // A topology that was read before names CPUs that no thread can run on.
        let error = before.bind_thread(NodeId(1)).unwrap_err();
        assert!(matches!(error, Error::System { .. }), "{error}");
        assert!(error.to_string().contains("online, only CPUs 0-1:"), "{error}");
        assert!(before.usable_cpus(NodeId(1)).unwrap().is_empty());
    }

    fn the_kernel_gives_such_a_node_none() {
        let name = "the_kernel_gives_such_a_node_none";
        without_hwloc(module_path!(), name, || {
            let _cpus = [offline(3), offline(2)];
            expect_none(&Topology::of_host());
        });
    }
}

fn expect_none(topology: &Topology) {
    assert_eq!(cpus(topology), ["0-1", "", ""]);
    assert_eq!(spread(topology), nodes(&[0]));
    let error = topology.bind_thread(NodeId(1)).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    // Its memory stays.
    let shares = Placement::Node(NodeId(1)).request(64 * MIB).place(topology);
    assert_eq!(shares.unwrap()[0].node, NodeId(1));
}
