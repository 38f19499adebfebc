//! Registered memory: its pages are on the node, whichever thread asks for them.

use std::collections::BTreeMap;

use egmem::backing::Why;
use egmem::driver::{HandleTypes, NodeId};
use egmem::topology::{Placement, Topology};
use egmem::{Backing, Buffer, BufferOptions, Error, Growth, Heap};

use crate::nodes::pages::nodes_of;
use crate::nodes::{MIB, on_machine, stub};

fn options(node: i32) -> BufferOptions {
    let growth = Growth::steady().chunk(4 * MIB);
    Buffer::on(NodeId(node)).bytes(16 * MIB).growth(growth)
}

fn all_on(node: i32, bytes: u64) -> BTreeMap<i32, usize> {
    BTreeMap::from([(node, (bytes / 4096) as usize)])
}

on_machine! { "three";
    fn pages_of_every_kind_are_created_on_their_node() {
        let driver = stub();
        let topology = Topology::of_host();
        let _bound = topology.bind_thread(NodeId(0)).unwrap();
        for node in [0, 1, 2] {
            for (backing, types) in [
                (Backing::Registered, HandleTypes::NONE),
                (Backing::Auto, HandleTypes::NONE),
                (Backing::Auto, HandleTypes::POSIX_FD),
            ] {
                let options = options(node).backing(backing).handle_types(types);
                let buffer = options.allocate(&driver).unwrap();
                assert_eq!(buffer.backing().backing, Backing::Registered, "{}", buffer.backing());
                let range = (buffer.device_ptr().0, buffer.len());
                assert_eq!(nodes_of(range), all_on(node, buffer.len()), "{backing} {types}");
                buffer.put(9 * MIB, 7_u64).unwrap();
            }
        }
    }

    fn parts_of_a_buffer_are_on_their_nodes() {
        let driver = stub();
        let topology = Topology::discover(&driver).unwrap();
        let shares = Placement::Spread.request(24 * MIB).place(&topology).unwrap();
        let buffer = Buffer::spread(&shares).backing(Backing::Registered).allocate(&driver).unwrap();
        let mut at = buffer.device_ptr().0;
        for part in buffer.physical() {
            let egmem::driver::Location::HostNuma(node) = part.location() else {
                panic!("{:?}", part.location());
            };
            let bytes = part.size().padded();
            assert_eq!(nodes_of((at, bytes)), all_on(node, bytes));
            at += bytes;
        }
        assert!(buffer.locations().len() > 1);
    }

    fn blocks_of_a_heap_are_on_its_node() {
        let driver = stub();
        for node in [1, 2] {
            let heap = Heap::on(NodeId(node)).limit(32 * MIB).chunk(4 * MIB).build(&driver).unwrap();
            assert_eq!(heap.backing().backing, Backing::Registered);
            let layout = std::alloc::Layout::from_size_align(9 << 20, 256).unwrap();
            let block = heap.allocate(layout).unwrap();
            let start = block.device_ptr().0.next_multiple_of(4096);
            assert_eq!(nodes_of((start, 8 * MIB)), all_on(node, 8 * MIB));
        }
    }

    fn a_node_that_is_full_or_not_there_is_refused() {
        let driver = stub();
        let registered = |node, bytes| options(node).bytes(bytes).backing(Backing::Registered).allocate(&driver);
        let error = registered(2, 1 << 30).unwrap_err();
        assert!(matches!(error, Error::NodeTooFull { node: NodeId(2), .. }), "{error}");
        assert!(registered(7, 16 * MIB).is_err());
        let buffer = registered(2, 16 * MIB).unwrap();
        assert_eq!(nodes_of((buffer.device_ptr().0, buffer.len())), all_on(2, buffer.len()));
    }

    /// GPUs that know registered pages by other addresses are no use: `Auto` takes the driver's memory.
    fn auto_refuses_pages_at_other_addresses() {
        let name = "auto_refuses_pages_at_other_addresses";
        let mut child = egmem_tests::child(module_path!(), name);
        child.env_remove("STUB_SAME_POINTER");
        egmem_tests::alone_as(child, || {
            let driver = stub();
            let heap = Heap::on(NodeId(1)).limit(32 * MIB).build(&driver).unwrap();
            assert_eq!(heap.backing().backing, Backing::Driver);
            assert!(matches!(heap.backing().why, Why::Trial(_)), "{}", heap.backing());
            let error = options(1).backing(Backing::Registered).allocate(&driver).unwrap_err();
            assert!(matches!(error, Error::PlatformUnsupported { .. }), "{error}");
        });
    }
}
