//! The machine `superchips`, as Linux shows four GH200: nodes 0 to 3 with one CPU each and distances of 40; the GPUs'
//! memory as nodes 4, 12, 20 and 28, far from all; the nodes between, which are for MIG slices, without memory.

use egmem::Error;
use egmem::driver::{Driver, NodeId};
use egmem::topology::{LinkKind, Locality, Placement, Topology, TopologySource};
use egmem_tests::alone;

use crate::nodes::kernel::join_cpuset;
use crate::nodes::pages::{Pages, nodes_of};
use crate::nodes::{MIB, discover, facts, nodes, on_machine, stub, without_hwloc, xml};

/// Checks the host nodes: no other node is one.
fn expect_hosts(topology: &Topology) {
    let found = topology.nodes();
    let ids: Vec<_> = found.iter().map(|node| node.id).collect();
    assert_eq!(ids, nodes(&[0, 1, 2, 3]));
    for (index, node) in found.iter().enumerate() {
        assert_eq!(node.cpus.to_string(), index.to_string());
        let distances: Vec<u32> = node.distances.values().copied().collect();
        let expected = [0, 1, 2, 3].map(|other| if other == index { 10 } else { 40 });
        assert_eq!(distances, expected, "{node:?}");
    }
}

/// Checks the GPUs of the stub, whose driver names their nodes.
fn expect_gpus(topology: &Topology) {
    expect_hosts(topology);
    let gpus = topology.gpus();
    assert_eq!(gpus.len(), 4);
    for ((gpu, ordinal), memory) in gpus.iter().zip(0..).zip([4, 12, 20, 28]) {
        let found = (gpu.host_node(), gpu.host_numa_source, gpu.memory_node);
        let expected = (Ok(NodeId(ordinal)), Locality::Driver, Some(NodeId(memory)));
        assert_eq!(found, expected);
        assert_eq!((gpu.coherent, gpu.link), (true, LinkKind::NvlinkC2c));
        let error = topology.node(NodeId(memory)).unwrap_err();
        let choices = nodes(&[0, 1, 2, 3]);
        assert_eq!(
            error,
            Error::NoSuchNode {
                node: NodeId(memory),
                gpu: Some(ordinal),
                choices
            }
        );
        let shares = Placement::Nearest { gpu: ordinal }
            .request(2 * MIB)
            .place(topology);
        assert_eq!(shares.unwrap()[0].node, NodeId(ordinal));
    }
}

fn spread(topology: &Topology) -> Vec<NodeId> {
    let shares = Placement::Spread.request(64 * MIB).place(topology).unwrap();
    shares.iter().map(|share| share.node).collect()
}

on_machine! { "superchips";
    fn hwloc_and_the_driver_are_right() {
        let topology = discover(Some(&stub()));
        assert_eq!(topology.source(), TopologySource::Hwloc);
        expect_gpus(&topology);
        assert_eq!(spread(&topology), nodes(&[0, 1, 2, 3]));
    }

    fn the_kernel_and_the_driver_are_right() {
        let name = "the_kernel_and_the_driver_are_right";
        without_hwloc(module_path!(), name, || {
            let topology = discover(Some(&stub()));
            assert_eq!(topology.source(), TopologySource::Kernel);
            expect_gpus(&topology);
        });
    }

    /// The kernel module says which nodes are GPUs' memory.
    fn without_a_driver_gpu_memory_is_no_host_node_either() {
        expect_hosts(&Topology::of_host());
    }

    fn without_a_driver_the_kernel_says_the_same() {
        let name = "without_a_driver_the_kernel_says_the_same";
        without_hwloc(module_path!(), name, || expect_hosts(&Topology::of_host()));
    }

    fn an_xml_is_right() {
        let topology = Topology::from_xml(&xml()).unwrap();
        expect_hosts(&topology);
        assert_eq!(facts(&topology), facts(&Topology::of_host()));
    }

    fn a_simulated_machine_is_made_of_it() {
        let mut machine = discover(Some(&stub())).to_machine();
        // The stub's GPUs have names and UUIDs that are no machine's.
        for gpu in &mut machine.gpus {
            gpu.name = "GH200".into();
            gpu.uuid = String::new();
        }
        let simulated = discover(Some(&Driver::simulated(machine).unwrap()));
        expect_gpus(&simulated);
    }

    /// Linux places plain memory there: a page's node need not be a host node.
    fn pages_of_a_gpus_memory_are_seen_there() {
        let pages = Pages::on(12, 2 * MIB).unwrap();
        assert_eq!(nodes_of(pages.range()).into_keys().collect::<Vec<_>>(), [12]);
        let topology = discover(Some(&stub()));
        assert_eq!(topology.gpu_with_memory(NodeId(12)), Some(1));
        assert!(matches!(topology.free_memory(NodeId(12)), Err(Error::NoSuchNode { .. })));
    }

    fn each_cpu_is_on_its_node() {
        let topology = Topology::of_host();
        for node in topology.node_ids() {
            let bound = topology.bind_thread(node).unwrap();
            assert_eq!((bound.cpus().len(), topology.current_node()), (1, Ok(node)));
            let pages = Pages::map(MIB);
            pages.touch();
            assert_eq!(nodes_of(pages.range()).into_keys().collect::<Vec<_>>(), [node.0]);
        }
    }

    /// Two of four superchips, with one GPU's memory, by version 1's cpuset where the kernel has it.
    fn a_cpuset_leaves_two_superchips() {
        alone(module_path!(), "a_cpuset_leaves_two_superchips", || {
            join_cpuset(1, "1-2", "1-2,12");
            let topology = discover(Some(&stub()));
            expect_gpus(&topology);
            let allowed: Vec<_> = topology.nodes().iter().map(|node| node.allowed).collect();
            assert_eq!(allowed, [false, true, true, false]);
            assert_eq!(spread(&topology), nodes(&[1, 2]));
            assert_eq!(topology.usable_cpus(NodeId(2)).unwrap().to_string(), "2");
            assert!(topology.bind_thread(NodeId(3)).is_err());
        });
    }
}
