//! Huge pages, which the administrator reserves for each node.

use egmem::Memory;
use egmem::driver::NodeId;
use egmem::pinned::{PageSize, RegisteredHost};
use egmem::topology::Topology;

use crate::nodes::kernel::{free_huge_pages, reserve};
use crate::nodes::pages::{bind, bind_thread, nodes_of, touch};
use crate::nodes::{MIB, SLACK, on_machine, registrar};

on_machine! { "three";
    fn reserved_pages_are_taken_from_the_node_that_they_are_bound_to() {
        let _pages = [reserve(0, 4), reserve(1, 4), reserve(2, 4)];
        let driver = registrar();
        let topology = Topology::of_host();
        let _bound = topology.bind_thread(NodeId(0)).unwrap();
        for node in [2, 1, 0] {
            let memory = RegisteredHost::new(&driver, 0, 8 * MIB, PageSize::Reserved).unwrap();
            let range = (memory.device_ptr().0, memory.len());
            bind(range, node).unwrap();
            touch(range);
            assert_eq!(nodes_of(range).into_keys().collect::<Vec<_>>(), [node]);
            assert_eq!(free_huge_pages(node), 0);
            drop(memory);
            assert_eq!(free_huge_pages(node), 4);
        }
    }

    fn reserved_pages_come_from_another_node_unless_they_are_bound() {
        let _pages = [reserve(0, 2), reserve(1, 2)];
        let driver = registrar();
        let topology = Topology::of_host();
        let _bound = topology.bind_thread(NodeId(1)).unwrap();
        let memory = RegisteredHost::new(&driver, 0, 8 * MIB, PageSize::Reserved).unwrap();
        let range = (memory.device_ptr().0, memory.len());
        touch(range);
        assert_eq!(nodes_of(range).into_keys().collect::<Vec<_>>(), [0, 1]);
        drop(memory);
        // By the thread's policy as well: node 1 has two, and the third is refused when the memory is mapped.
        bind_thread(Some(1)).unwrap();
        let refused = RegisteredHost::new(&driver, 0, 6 * MIB, PageSize::Reserved);
        let fits = RegisteredHost::new(&driver, 0, 4 * MIB, PageSize::Reserved);
        bind_thread(None).unwrap();
        let error = refused.unwrap_err();
        assert!(matches!(error, egmem::Error::System { .. }), "{error}");
        drop(fits.unwrap());
        assert_eq!((free_huge_pages(0), free_huge_pages(1)), (2, 2));
    }

    /// They are no longer free, and no page cache.
    fn reserved_pages_count_as_used_on_their_node() {
        let topology = Topology::of_host();
        let counts = |node| topology.counts(NodeId(node)).unwrap();
        let free = |node| topology.free_memory(NodeId(node)).unwrap().unwrap();
        let (before, free_before) = ([0, 1, 2].map(counts), [0, 1, 2].map(free));
        let _pages = reserve(1, 16);
        let (after, free_after) = ([0, 1, 2].map(counts), [0, 1, 2].map(free));
        for node in [0, 1, 2] {
            let bytes = if node == 1 { 32 * MIB } else { 0 };
            let (was, is) = (before[node], after[node]);
            assert_eq!(is.total, was.total);
            assert!(is.ordinary.abs_diff(was.ordinary + bytes) < SLACK, "{was:?}, {is:?}");
            let expected = free_before[node] - bytes;
            assert!(free_after[node].abs_diff(expected) < SLACK, "{free_before:?}, {free_after:?}");
        }
    }
}
