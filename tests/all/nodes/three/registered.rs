//! Registered memory: its pages are on the node, whichever thread asks for them.

use std::collections::BTreeMap;

use egmem::backing::Why;
use egmem::driver::{AccessDesc, HandleType, HandleTypes, Location, NodeId, ShareableHandle};
use egmem::topology::{Placement, Topology};
use egmem::vmm::{Mapping, PhysicalMemory};
use egmem::{Backing, Buffer, BufferOptions, Driver, Error, Growth, Heap, Memory};

use crate::nodes::pages::{nodes_of, touch};
use crate::nodes::{MIB, on_machine, stub};
use crate::system_calls::refuse;

fn options(node: i32) -> BufferOptions {
    let growth = Growth::steady().chunk(4 * MIB);
    Buffer::on(NodeId(node)).bytes(16 * MIB).growth(growth)
}

fn all_on(node: i32, bytes: u64) -> BTreeMap<i32, usize> {
    BTreeMap::from([(node, (bytes / 4096) as usize)])
}

fn shareable(driver: &Driver, node: i32) -> PhysicalMemory {
    let options = PhysicalMemory::options(NodeId(node)).backing(Backing::Registered);
    let options = options.handle_types(HandleTypes::POSIX_FD);
    options.create(driver, 4 * MIB).unwrap()
}

fn mapped(memory: &PhysicalMemory) -> Mapping {
    let mut mapping = memory.map().unwrap();
    let host = AccessDesc::read_write(Location::Host);
    mapping.set_access(&[host]).unwrap();
    mapping
}

/// Returns the nodes of all pages, of which those that do not exist are created by this thread.
fn nodes_once_touched(memory: &PhysicalMemory) -> BTreeMap<i32, usize> {
    let mapping = mapped(memory);
    let range = (mapping.device_ptr().0, mapping.size().padded());
    touch(range);
    nodes_of(range)
}

/// Takes all pages of exported memory away.
fn punch(handle: &ShareableHandle) {
    use rustix::fs::{FallocateFlags, fallocate};

    let ShareableHandle::PosixFd(fd) = handle else {
        panic!("{handle:?}");
    };
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(fd, flags, 0, 4 * MIB).unwrap();
}

on_machine! { "three";
    fn exported_pages_exist_on_their_node() {
        let driver = stub();
        let _bound = Topology::of_host().bind_thread(NodeId(0)).unwrap();
        let memory = shareable(&driver, 2);
        // Never mapped.
        let handle = memory.export(HandleType::PosixFd).unwrap();
        let import = || PhysicalMemory::import(&driver, &handle, 4 * MIB);
        assert_eq!(nodes_once_touched(&import().unwrap()), all_on(2, 4 * MIB));
        punch(&handle);
        let error = import().unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { what: "fd", .. }), "{error}");
        drop(memory.export(HandleType::PosixFd).unwrap());
        assert_eq!(nodes_once_touched(&import().unwrap()), all_on(2, 4 * MIB));
    }

    fn pages_that_come_back_are_on_their_node() {
        let driver = stub();
        let _bound = Topology::of_host().bind_thread(NodeId(0)).unwrap();
        let memory = shareable(&driver, 1);
        drop(mapped(&memory));
        punch(&memory.export(HandleType::PosixFd).unwrap());
        assert_eq!(nodes_once_touched(&memory), all_on(1, 4 * MIB));
    }

    /// As in a container whose filter of system calls forbids those for nodes.
    fn where_calls_for_nodes_are_forbidden_the_cpus_of_a_node_decide() {
        let name = "where_calls_for_nodes_are_forbidden_the_cpus_of_a_node_decide";
        egmem_tests::alone_as(egmem_tests::child(module_path!(), name), || {
            let driver = stub();
            assert!(refuse(&[libc::SYS_set_mempolicy, libc::SYS_move_pages, libc::SYS_mbind]));
            for types in [HandleTypes::NONE, HandleTypes::POSIX_FD] {
                let on = |node| options(node).backing(Backing::Registered).handle_types(types).allocate(&driver);
                for node in [0, 1] {
                    on(node).unwrap().put(9 * MIB, 7_u64).unwrap();
                }
                // It has no CPUs.
                let error = on(2).unwrap_err();
                assert!(error.to_string().contains("placing pages on NUMA node 2"), "{error}");
            }
        });
    }

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
