//! Where pages lie: by the thread that touches them first, and by mbind.

use std::collections::BTreeMap;

use egmem::driver::NodeId;
use egmem::memory::ParallelCopy;
use egmem::pinned::{PageSize, RegisteredHost};
use egmem::topology::Topology;
use egmem::{Error, Memory};

use crate::nodes::pages::{Pages, bind, nodes_of, touch};
use crate::nodes::{MIB, on_machine, registrar};

fn range(memory: &RegisteredHost) -> (u64, u64) {
    (memory.device_ptr().0, memory.len())
}

/// All pages of `bytes` on `node`.
fn all_on(node: i32, bytes: u64) -> BTreeMap<i32, usize> {
    BTreeMap::from([(node, (bytes / 4096) as usize)])
}

on_machine! { "three";
    fn a_bound_thread_runs_on_its_node_until_the_guard_goes() {
        let topology = Topology::of_host();
        let before = topology.usable_cpus(NodeId(1)).unwrap();
        for node in [NodeId(0), NodeId(1), NodeId(0)] {
            let bound = topology.bind_thread(node).unwrap();
            assert_eq!(bound.cpus(), &topology.node(node).unwrap().cpus);
            assert_eq!(topology.current_node(), Ok(node));
            let other = NodeId(1 - node.0);
            assert!(topology.usable_cpus(other).unwrap().is_empty());
        }
        assert_eq!(topology.usable_cpus(NodeId(1)).unwrap(), before);
        let error = topology.bind_thread(NodeId(2)).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(topology.usable_cpus(NodeId(2)).unwrap().is_empty());
    }

    fn pages_lie_on_the_node_of_the_thread_that_touches_them_first() {
        let topology = Topology::of_host();
        let driver = registrar();
        for (node, size) in [0, 1, 1].into_iter().zip([PageSize::Base, PageSize::Base, PageSize::Transparent]) {
            let memory = {
                let _bound = topology.bind_thread(NodeId(node)).unwrap();
                let memory = RegisteredHost::new(&driver, 0, 8 * MIB, size).unwrap();
                touch(range(&memory));
                memory
            };
            // Another node's thread comes too late.
            let _bound = topology.bind_thread(NodeId(1 - node)).unwrap();
            memory.cpu().fill(0, memory.len(), 7).unwrap();
            assert_eq!(nodes_of(range(&memory)), all_on(node, memory.len()), "{size:?}");
        }
    }

    fn mbind_decides_whichever_thread_touches() {
        let topology = Topology::of_host();
        let driver = registrar();
        let _bound = topology.bind_thread(NodeId(0)).unwrap();
        for size in [PageSize::Base, PageSize::Transparent] {
            for node in [2, 1, 0] {
                let memory = RegisteredHost::new(&driver, 0, 8 * MIB, size).unwrap();
                bind(range(&memory), node).unwrap();
                touch(range(&memory));
                assert_eq!(nodes_of(range(&memory)), all_on(node, memory.len()), "{size:?}");
            }
        }
        let pages = Pages::map(2 * MIB);
        assert!(nodes_of(pages.range()).keys().all(|node| *node < 0));
        let error = bind(pages.range(), 5).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }

    /// The calling thread's part too, which another node's thread shares out.
    fn copies_by_threads_of_a_node_touch_there() {
        let topology = Topology::of_host();
        let driver = registrar();
        let values = vec![7_u8; 64 << 20];
        for (node, caller) in [(1, 0), (0, 1)] {
            let _bound = topology.bind_thread(NodeId(caller)).unwrap();
            let before = topology.usable_cpus(NodeId(caller)).unwrap();
            // The caller may use no CPU of the other node: nothing binds it there.
            let copy = ParallelCopy::on(&topology, NodeId(node)).unwrap();
            let memory = RegisteredHost::new(&driver, 0, 64 * MIB, PageSize::Base).unwrap();
            copy.write_at(memory.cpu(), 0, &values).unwrap();
            assert_eq!(nodes_of(range(&memory)), all_on(caller, memory.len()));
            assert_eq!(topology.usable_cpus(NodeId(caller)).unwrap(), before);
        }
        for node in [1, 0] {
            let copy = ParallelCopy::on(&topology, NodeId(node)).unwrap();
            for _ in 0..3 {
                let memory = RegisteredHost::new(&driver, 0, 64 * MIB, PageSize::Base).unwrap();
                copy.write_at(memory.cpu(), 0, &values).unwrap();
                assert_eq!(nodes_of(range(&memory)), all_on(node, memory.len()));
                assert_eq!(topology.usable_cpus(NodeId(1 - node)).unwrap().len(), 2);
            }
        }
    }
}
