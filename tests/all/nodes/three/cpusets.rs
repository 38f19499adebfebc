//! A control group (version 2) that allows one node of three.

use egmem::Error;
use egmem::driver::NodeId;
use egmem::memory::ParallelCopy;
use egmem::pinned::{PageSize, RegisteredHost};
use egmem::topology::{Placement, Topology, TopologySource};
use egmem_tests::alone;

use crate::nodes::kernel::{join_cpuset, reserve};
use crate::nodes::pages::{Pages, bind, nodes_of};
use crate::nodes::{MIB, nodes, on_machine, registrar};

/// What a process with the CPUs and the memory of node 1 alone sees, however its topology was read.
fn expect_node_1(topology: &Topology) {
    let ids: Vec<_> = topology.nodes().iter().map(|node| node.id).collect();
    assert_eq!(ids, nodes(&[0, 1, 2]));
    let allowed: Vec<_> = topology.nodes().iter().map(|node| node.allowed).collect();
    assert_eq!(allowed, [false, true, false]);
    // A node keeps its CPUs, whether this process may run there or not.
    let cpus: Vec<_> = topology
        .nodes()
        .iter()
        .map(|node| node.cpus.to_string())
        .collect();
    assert_eq!(cpus, ["0-1", "2-3", ""]);
    let shares = Placement::Spread.request(64 * MIB).place(topology).unwrap();
    assert_eq!(
        shares.iter().map(|share| share.node).collect::<Vec<_>>(),
        nodes(&[1])
    );
    assert!(topology.usable_cpus(NodeId(0)).unwrap().is_empty());
    assert_eq!(topology.usable_cpus(NodeId(1)).unwrap().to_string(), "2-3");
    assert_eq!(topology.current_node(), Ok(NodeId(1)));
    let error = topology.bind_thread(NodeId(0)).unwrap_err();
    assert!(matches!(error, Error::System { .. }), "{error}");
    assert!(error.to_string().contains("only CPUs 2-3"), "{error}");
    assert_eq!(
        topology.bind_thread(NodeId(1)).unwrap().cpus().to_string(),
        "2-3"
    );
    for node in [0, 1, 2] {
        assert!(topology.free_memory(NodeId(node)).unwrap().is_some());
    }
}

on_machine! { "three";
    fn the_process_keeps_to_its_node() {
        alone(module_path!(), "the_process_keeps_to_its_node", || {
            let before = Topology::of_host();
            join_cpuset(2, "2-3", "1");
            let topology = Topology::of_host();
            assert_eq!(topology.source(), TopologySource::Hwloc);
            expect_node_1(&topology);
            // A topology that was read before has the former nodes, and the thread's present CPUs.
            assert!(before.node(NodeId(0)).unwrap().allowed);
            assert!(before.usable_cpus(NodeId(0)).unwrap().is_empty());
        });
    }

    fn the_kernel_without_hwloc_says_the_same() {
        let name = "the_kernel_without_hwloc_says_the_same";
        crate::nodes::without_hwloc(module_path!(), name, || {
            join_cpuset(2, "2-3", "1");
            let topology = Topology::of_host();
            assert_eq!(topology.source(), TopologySource::Kernel);
            expect_node_1(&topology);
        });
    }

    fn pages_lie_on_the_node_that_is_allowed() {
        alone(module_path!(), "pages_lie_on_the_node_that_is_allowed", || {
            join_cpuset(2, "0-1", "1");
            let pages = Pages::map(4 * MIB);
            let error = bind(pages.range(), 0).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            // The threads of node 0 run there; the pages may not lie there.
            let driver = registrar();
            let copy = ParallelCopy::on(&Topology::of_host(), NodeId(0)).unwrap();
            let memory = RegisteredHost::new(&driver, 0, 32 * MIB, PageSize::Base).unwrap();
            copy.fill(memory.cpu(), 0, 32 * MIB, 7).unwrap();
            let range = (memory.cpu().as_ptr() as u64, 32 * MIB);
            assert_eq!(nodes_of(range).into_keys().collect::<Vec<_>>(), [1]);
        });
    }

    /// The only node that is allowed has no CPUs: no other counts then.
    fn memory_without_cpus_is_a_place_if_it_is_the_only_one() {
        let name = "memory_without_cpus_is_a_place_if_it_is_the_only_one";
        alone(module_path!(), name, || {
            join_cpuset(2, "0-1", "2");
            let topology = Topology::of_host();
            let shares = Placement::Spread.request(64 * MIB).place(&topology).unwrap();
            assert_eq!(shares.iter().map(|share| share.node).collect::<Vec<_>>(), nodes(&[2]));
            let _bound = topology.bind_thread(NodeId(0)).unwrap();
            let pages = Pages::map(4 * MIB);
            pages.touch();
            assert_eq!(nodes_of(pages.range()).into_keys().collect::<Vec<_>>(), [2]);
        });
    }

    fn huge_pages_of_another_node_are_refused() {
        let _pages = reserve(0, 8);
        alone(module_path!(), "huge_pages_of_another_node_are_refused", || {
            join_cpuset(2, "0-3", "1");
            let driver = registrar();
            let error = RegisteredHost::new(&driver, 0, 4 * MIB, PageSize::Reserved).unwrap_err();
            assert!(matches!(error, Error::System { .. }), "{error}");
            assert!(egmem::ledger::allocations(&driver).is_empty());
        });
    }
}
