//! Dynamo's own types over egmem's memory, on the simulator.

use std::alloc::Layout;
use std::sync::Arc;

use dynamo_memory::nixl::{MemType, NixlCompatible, NixlMemory};
use dynamo_memory::{ArenaAllocator, Buffer as AnyStorage, MemoryDescriptor, StorageKind};
use egmem::driver::{Location, NodeId};
use egmem::{Buffer, Driver, Heap, Machine, Memory};
use egmem_dynamo_example::Storage;

fn driver() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

#[test]
fn a_buffer_tells_dynamo_what_it_is() {
    let driver = driver();
    let buffer = Buffer::on(NodeId(2))
        .bytes(3 << 20)
        .allocate(&driver)
        .unwrap();
    let address = buffer.device_ptr().0 as usize;
    let storage = Storage::new(buffer);
    assert_eq!((storage.addr(), storage.size()), (address, 3 << 20));
    assert_eq!(storage.storage_kind(), StorageKind::Pinned);
    let (pointer, bytes, kind, device) = storage.nixl_params();
    assert_eq!(
        (pointer.addr(), bytes, kind, device),
        (address, 3 << 20, MemType::Dram, 0)
    );
    assert!(storage.nixl_descriptor().is_none());

    let of_gpu = Buffer::on(Location::Device(3))
        .bytes(1)
        .allocate(&driver)
        .unwrap();
    let of_gpu = Storage::new(of_gpu);
    assert_eq!(of_gpu.storage_kind(), StorageKind::Device(3));
    let (_, _, kind, device) = of_gpu.nixl_params();
    assert_eq!((kind, device), (MemType::Vram, 3));
}

#[test]
fn a_block_lives_as_long_as_dynamo_has_it() {
    let heap = Heap::on(NodeId(1)).build(&driver()).unwrap();
    let layout = Layout::from_size_align(100_000, 4096).unwrap();
    let block = heap.allocate(layout).unwrap();
    block.write_at(0, &[7_u8; 100]).unwrap();
    let erased: Arc<dyn NixlMemory + Send + Sync> = Arc::new(Storage::new(block));
    let storage = AnyStorage::from(erased);
    assert_eq!((storage.size(), storage.addr() % 4096), (100_000, 0));
    assert_eq!(heap.stats().live_blocks, 1);
    let clone = storage.clone();
    drop(storage);
    assert_eq!(heap.stats().live_blocks, 1);
    drop(clone);
    assert_eq!(heap.stats().live_blocks, 0);
}

#[test]
fn dynamo_s_arena_cuts_a_buffer_that_others_share() {
    let buffer = Arc::new(
        Buffer::on(NodeId(0))
            .bytes(1 << 20)
            .allocate(&driver())
            .unwrap(),
    );
    let arena = ArenaAllocator::new(Storage::new(Arc::clone(&buffer)), 64 << 10).unwrap();
    let blocks: Vec<_> = (0..16).map(|_| arena.allocate(64 << 10).unwrap()).collect();
    assert!(arena.allocate(1).is_err(), "the buffer has 16 pages");
    let base = buffer.device_ptr().0 as usize;
    let mut offsets: Vec<_> = blocks.iter().map(|block| block.addr() - base).collect();
    offsets.sort_unstable();
    assert_eq!(offsets, (0..16).map(|page| page << 16).collect::<Vec<_>>());
    drop((blocks, arena));
    assert_eq!(Arc::strong_count(&buffer), 1);
}
