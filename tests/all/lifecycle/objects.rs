//! Objects of all kinds: which go together, and in what order they go back.

use std::sync::Arc;

use egmem::driver::NodeId;
use egmem::memory::{CpuMemory, ParallelCopy};
use egmem::pinned::{DeviceMemory, PinnedHost};
use egmem::proof::Prover;
use egmem::vmm::{PhysicalMemory, Reservation};
use egmem::{Buffer, Driver, Error, Event, Pool, Stream};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::lifecycle::{MIB, grace, last, node, nothing_held};

/// CUDA's calls work from any thread, and so does all that is made by them.
#[test]
fn everything_can_be_sent_and_shared() {
    fn both<T: Send + Sync>() {}
    both::<Driver>();
    both::<PhysicalMemory>();
    both::<egmem::driver::ShareableHandle>();
    both::<Reservation>();
    both::<egmem::vmm::Mapping>();
    both::<Buffer>();
    both::<egmem::memory::CpuView<'_>>();
    both::<ParallelCopy>();
    both::<(PinnedHost, DeviceMemory)>();
    both::<(Stream, Event, egmem::Transfer<Buffer>)>();
    both::<(egmem::Heap, egmem::Block, egmem::HeapOptions)>();
    both::<(Pool, egmem::PoolBuffer, egmem::pool::DevicePoolGuard)>();
    both::<Prover>();
    both::<egmem::capability::Capabilities>();
    both::<(egmem::Topology, Error)>();
}

#[test]
fn another_drivers_objects_are_refused() {
    let (one, two) = (grace(), grace());
    let physical = PhysicalMemory::options(NodeId(0))
        .create(&one, MIB)
        .unwrap();
    let range = Arc::new(Reservation::options().reserve(&two, 2 * MIB).unwrap());
    assert!(matches!(
        range.map(0, &physical),
        Err(Error::InvalidArgument { .. })
    ));
    let stream = Stream::new(&two, 0).unwrap();
    let pool = Pool::options(NodeId(0)).create(&one).unwrap();
    assert!(matches!(
        pool.allocate(1, &stream),
        Err(Error::InvalidArgument { .. })
    ));
    // The two drivers' first streams have the same handle.
    let own = Stream::new(&one, 0).unwrap();
    let mut buffer = pool.allocate(4096, &own).unwrap();
    for refused in [buffer.use_on(&stream), buffer.free_on(&stream)] {
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })));
    }
    own.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 0, "freed on its own stream");
    let buffer = Buffer::near(&one, 0, MIB).unwrap();
    assert!(matches!(
        stream.fill(&buffer, 0, 1, 0),
        Err(Error::InvalidArgument { .. })
    ));
}

type Thing = Option<Box<dyn std::any::Any>>;

/// Physical memory, mappings and reservations are dropped in random orders.
pub fn objects_go_back_in_any_order(driver: &Driver) {
    let mut runner = TestRunner::new(ProptestConfig::with_cases(64));
    let orders = Just((0..6_usize).collect::<Vec<_>>()).prop_shuffle();
    let (near, far) = (node(driver, 0), node(driver, last(driver)));
    let dropped = runner.run(&orders, |order| {
        let range = Arc::new(Reservation::options().reserve(driver, 8 * MIB).unwrap());
        let one = PhysicalMemory::options(near)
            .create(driver, 2 * MIB)
            .unwrap();
        let two = PhysicalMemory::options(far)
            .create(driver, 2 * MIB)
            .unwrap();
        let mut things: Vec<Thing> = vec![
            Some(Box::new(range.map(0, &one).unwrap())),
            Some(Box::new(range.map(2 * MIB, &two).unwrap())),
            Some(Box::new(one.map().unwrap())),
            Some(Box::new(one)),
            Some(Box::new(two)),
            Some(Box::new(range)),
        ];
        for index in order {
            drop(things[index].take());
        }
        nothing_held(driver);
        Ok(())
    });
    dropped.unwrap();
}

/// A function that takes any memory.
fn round_trip(memory: &impl CpuMemory) {
    let end = memory.cpu().unwrap().len() - 6;
    memory.cpu().unwrap().write_at(end, b"ending").unwrap();
    let error = memory.cpu().unwrap().put(end + 6, 0_u8).unwrap_err();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    let mut text = [0_u8; 6];
    memory.cpu().unwrap().read_at(end, &mut text).unwrap();
    assert_eq!(&text, b"ending");
}

pub fn functions_take_any_memory_of_the_cpu(driver: &Driver) {
    let pinned = PinnedHost::new(driver, 0, 4096).unwrap();
    round_trip(&pinned);
    round_trip(&pinned.cpu());
    let buffer = Buffer::near(driver, 0, MIB).unwrap();
    round_trip(&buffer.mappings()[0]);
    round_trip(&Arc::new(buffer));
    let heap = egmem::Heap::on(node(driver, 0)).build(driver).unwrap();
    round_trip(&Box::new(
        heap.allocate(std::alloc::Layout::new::<[u8; 100]>())
            .unwrap(),
    ));
    let stream = Stream::new(driver, 0).unwrap();
    let pool = Pool::options(node(driver, 0)).create(driver).unwrap();
    round_trip(&pool.allocate(4096, &stream).unwrap());
}
