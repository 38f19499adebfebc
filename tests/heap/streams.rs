//! Blocks that a GPU still works on.

use std::sync::Arc;

use egmem::{Event, Memory, Stream};

use super::*;

#[test]
fn a_block_freed_after_a_stream_is_not_reused_before_its_work_has_run() {
    for driver in drivers() {
        let heap = on(&driver)
            .limit(8 * MIB)
            .reserve(8 * MIB)
            .build(&driver)
            .unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let block = heap.allocate(layout(6 * MIB)).unwrap();
        let at = block.offset();
        // SAFETY: the block is freed after the stream's work.
        unsafe {
            stream
                .memset_async(Memory::device_ptr(&block), 1, 6 * MIB)
                .unwrap()
        };
        block.free_after(&stream).unwrap();
        assert_eq!(heap.stats().live_blocks, 0);
        stream.synchronize().unwrap();
        // It has to be taken back for this.
        let block = heap.allocate(layout(7 * MIB)).unwrap();
        assert_eq!((at, block.offset()), (0, 0));
        assert_eq!(heap.stats().deferred_blocks, 0);
    }
}

#[test]
fn what_has_not_run_is_waited_for_by_nobody() {
    // The simulator runs work as late as it may.
    let driver = simulated();
    let heap = on(&driver).limit(8 * MIB).build(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let block = heap.allocate(layout(MIB)).unwrap();
    // SAFETY: the block is freed after the stream's work.
    unsafe {
        stream
            .memset_async(Memory::device_ptr(&block), 7, MIB)
            .unwrap()
    };
    block.free_after(&stream).unwrap();
    assert_eq!(heap.stats().deferred_blocks, 1);
    let other = heap.allocate(layout(MIB)).unwrap();
    assert_ne!(other.offset(), 0, "given out while the GPU writes to it");
    stream.synchronize().unwrap();
    assert_eq!(heap.collect().unwrap(), 1);
    assert_eq!(heap.stats().deferred_blocks, 0);
}

#[test]
fn a_block_freed_after_an_event_waits_for_it_alone() {
    for driver in drivers() {
        let heap = on(&driver).build(&driver).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let event = Arc::new(Event::new(&driver, 0, false).unwrap());
        let block = heap.allocate(layout(MIB)).unwrap();
        // SAFETY: the block is freed after the stream's work.
        unsafe {
            stream
                .memset_async(Memory::device_ptr(&block), 1, MIB)
                .unwrap()
        };
        event.record(&stream).unwrap();
        block.free_after_event(Arc::clone(&event)).unwrap();
        event.synchronize().unwrap();
        assert_eq!(heap.collect().unwrap(), 1);
    }
}

#[test]
fn a_refused_block_comes_back() {
    let driver = simulated();
    let other = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let stream = Stream::new(&other, 0).unwrap();
    let block = heap.allocate(layout(100)).unwrap();
    block.fill(5).unwrap();
    let refused = block.free_after(&stream).unwrap_err();
    assert_eq!(refused.block.get::<u8>(99).unwrap(), 5);
    assert_eq!(heap.stats().live_blocks, 1);
    drop(refused);
    assert_eq!(heap.stats().live_blocks, 0);
}

#[test]
fn a_heap_waits_for_the_gpu_before_its_memory_goes() {
    for driver in drivers() {
        let heap = on(&driver).build(&driver).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let block = heap.allocate(layout(4 * MIB)).unwrap();
        // SAFETY: the block is freed after the stream's work.
        unsafe {
            stream
                .memset_async(Memory::device_ptr(&block), 1, 4 * MIB)
                .unwrap()
        };
        block.free_after(&stream).unwrap();
        drop(heap);
        // A GPU that touched unmapped addresses would have lost its context.
        stream.synchronize().unwrap();
        drop(stream);
        nothing_held(&driver);
    }
}
