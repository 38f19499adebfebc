//! Placement by the kernel's counts, and a node that is full.

use std::alloc::Layout;

use egmem::driver::NodeId;
use egmem::topology::{Placement, Share};
use egmem::{Backing, Buffer, Driver, Error, Heap, Topology, ledger};

use egmem_tests::alone;

use crate::nodes::kernel::join_memory_limit;
use crate::nodes::pages::Pages;
use crate::nodes::{MIB, SLACK, discover, on_machine, stub};
use crate::stub_driver::harness::Stub;

const FULL: NodeId = NodeId(2);

/// Returns the nodes on which the driver was asked for memory, and what it was asked to release.
fn created(calls: &[String]) -> (Vec<i32>, usize) {
    let location = |call: &String| {
        let (_, after) = call
            .strip_prefix("cuMemCreate")?
            .split_once("location=3:")?;
        after.split_ascii_whitespace().next()?.parse().ok()
    };
    let released = calls.iter().filter(|call| call.starts_with("cuMemRelease"));
    (
        calls.iter().filter_map(location).collect(),
        released.count(),
    )
}

/// Leaves a node `left` bytes, by pages of this process.
fn fill(topology: &Topology, node: NodeId, left: u64) -> Pages {
    let free = topology.free_memory(node).unwrap().unwrap();
    let pages = Pages::on(node.0, free - left).unwrap();
    let now = topology.free_memory(node).unwrap().unwrap();
    assert!(
        now.abs_diff(left) < SLACK,
        "node {node} has {now} bytes free instead of {left}"
    );
    pages
}

/// Checks that `Error::NodeTooFull` names the node's free bytes.
fn expect_too_full(driver: &Driver, error: &Error, bytes: u64) {
    let Error::NodeTooFull {
        node,
        requested,
        free,
    } = *error
    else {
        panic!("{error}");
    };
    assert_eq!((node, requested), (FULL, bytes));
    let now = egmem::topology::free_now(driver, FULL).unwrap();
    assert!(free.abs_diff(now) < SLACK, "{error}: {now}");
    assert!(error.to_string().contains("node 2"), "{error}");
}

on_machine! { "three";
    fn a_spread_takes_the_nodes_with_cpus_in_equal_parts() {
        let topology = Topology::of_host();
        let shares = Placement::Spread.request(100 * MIB).place(&topology).unwrap();
        let share = |node, mib: u64| Share { node: NodeId(node), bytes: mib * MIB };
        assert_eq!(shares, [share(0, 50), share(1, 50)]);
        // Memory without CPUs is for those that ask for it.
        let shares = Placement::Node(NodeId(2)).request(100 * MIB).place(&topology);
        assert_eq!(shares.unwrap(), [share(2, 100)]);
    }

    fn a_spread_gives_the_rest_to_the_node_that_has_more() {
        let mut topology = Topology::of_host();
        let _pages = fill(&topology, NodeId(1), 64 * MIB);
        topology.refresh_free();
        let shares = Placement::Spread.request(200 * MIB).place(&topology).unwrap();
        let [first, second] = shares[..] else { panic!("{shares:?}") };
        assert_eq!((first.node, second.node), (NodeId(0), NodeId(1)));
        assert_eq!(first.bytes + second.bytes, 200 * MIB);
        let left = topology.node(NodeId(1)).unwrap().memory_free.unwrap();
        assert_eq!(second.bytes, left / (2 * MIB) * (2 * MIB));
        let refused = Placement::Spread.request(2048 * MIB).place(&topology).unwrap_err();
        assert!(
            matches!(&refused, Error::NodesTooFull { nodes, .. } if *nodes == [NodeId(0), NodeId(1)]),
            "{refused}"
        );
    }

    fn a_full_node_is_refused_and_nothing_is_left_behind() {
        let driver = stub();
        let calls = Stub::open("libcuda.so.1");
        let mut topology = discover(Some(&driver));
        let pages = fill(&topology, FULL, 32 * MIB);
        calls.calls();
        let bytes = 64 * MIB;
        let refused = Buffer::on(FULL).bytes(bytes).allocate(&driver).unwrap_err();
        expect_too_full(&driver, &refused, bytes);
        let refused = Heap::on(FULL).reserve(bytes).build(&driver).unwrap_err();
        expect_too_full(&driver, &refused, bytes);
        topology.refresh_free();
        let refused = Placement::Node(FULL).request(bytes).place(&topology).unwrap_err();
        expect_too_full(&driver, &refused, bytes);
        // The part on node 0 is given back when that on node 2 is refused.
        let parts = [(NodeId(0).into(), bytes), (FULL.into(), bytes)];
        let refused = Buffer::in_parts(parts).allocate(&driver).unwrap_err();
        expect_too_full(&driver, &refused, bytes);
        assert!(ledger::allocations(&driver).is_empty());
        let (nodes, released) = created(&calls.calls());
        assert_eq!(nodes.len(), released, "{nodes:?}");
        assert!(!nodes.contains(&FULL.0), "{nodes:?}");

        drop(pages);
        let buffer = Buffer::on(FULL).bytes(bytes).allocate(&driver).unwrap();
        assert_eq!(created(&calls.calls()), (vec![FULL.0], 0));
        drop(buffer);
    }

    /// Each node has as much free, but both together do not.
    fn a_control_groups_limit_counts_once_for_all_nodes() {
        let name = "a_control_groups_limit_counts_once_for_all_nodes";
        alone(module_path!(), name, || {
            let driver = stub();
            let limit = 256 * MIB;
            let before = discover(Some(&driver));
            join_memory_limit(limit);
            let mut topology = discover(Some(&driver));
            let free = |node| topology.free_memory(NodeId(node)).unwrap().unwrap();
            assert!([0, 1].map(free).into_iter().all(|free| free.abs_diff(limit) < 3 * SLACK));
            let refused = |topology: &Topology, bytes, left: u64| {
                let refused = Placement::Spread.request(bytes).place(topology).unwrap_err();
                let Error::NodesTooFull { free, .. } = refused else { panic!("{refused}") };
                assert!(free.abs_diff(left) < 3 * SLACK, "{refused}");
            };
            refused(&topology, limit + 2 * MIB, limit);
            let shares = Placement::Spread.request(320 * MIB).place(&before).unwrap();
            let error = Heap::spread(&shares).reserve(320 * MIB).build(&driver).unwrap_err();
            assert!(matches!(error, Error::NodesTooFull { .. }), "{error}");
            assert!(ledger::allocations(&driver).is_empty());
            let pages = Pages::on(1, 64 * MIB).unwrap();
            topology.refresh_free();
            refused(&topology, limit, limit - 64 * MIB);
            drop(pages);
        });
    }

    fn the_driver_is_asked_for_the_nodes_of_the_shares() {
        let driver = stub();
        let calls = Stub::open("libcuda.so.1");
        let topology = discover(Some(&driver));
        let shares = Placement::Spread.request(128 * MIB).place(&topology).unwrap();
        calls.calls();
        drop(Buffer::spread(&shares).allocate(&driver).unwrap());
        assert_eq!(created(&calls.calls()), (vec![0, 1], 2));
        let heap = Heap::spread(&shares).backing(Backing::Driver).build(&driver).unwrap();
        heap.reserve(128 * MIB).unwrap();
        let (mut nodes, _) = created(&calls.calls());
        nodes.sort_unstable();
        nodes.dedup();
        assert_eq!(nodes, [0, 1]);
        drop(heap.allocate(Layout::from_size_align(4096, 256).unwrap()).unwrap());
        drop(heap);
        assert!(ledger::allocations(&driver).is_empty());
    }
}
