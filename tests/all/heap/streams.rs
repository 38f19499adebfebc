//! Blocks that a GPU still works on.

use std::sync::{Arc, OnceLock};

use egmem::driver::{Call, Code};
use egmem::heap::{NotAllFreed, NotFreed};
use egmem::{Block, Error, Event, Memory, Stream};

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
fn an_allocation_neither_waits_for_nor_reuses_a_busy_block() {
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
fn a_forgotten_block_is_never_reused() {
    // The memory of these blocks is never freed: a leak checker must not report it.
    static HEAP: OnceLock<Heap> = OnceLock::new();
    let driver = simulated();
    let other = simulated();
    let heap = HEAP.get_or_init(|| on(&driver).limit(8 * MIB).build(&driver).unwrap());
    let stream = Stream::new(&other, 0).unwrap();
    let block = || heap.allocate(layout(3 * MIB)).unwrap();
    let error = block().free_after(&stream).map_err(NotFreed::forget);
    assert!(matches!(error, Err(Error::InvalidArgument { .. })));
    let error = heap.free_all_after([block()], &stream);
    let error = error.map_err(NotAllFreed::forget);
    assert!(matches!(error, Err(Error::InvalidArgument { .. })));
    assert_eq!((heap.stats().live_blocks, heap.stats().live), (2, 6 * MIB));
    assert!(heap.allocate(layout(3 * MIB)).is_err());
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

/// Blocks that take all of a heap's 8 MiB, with a GPU's work on each.
fn busy_blocks(heap: &Heap, stream: &Stream) -> Vec<Block> {
    let blocks: Vec<Block> = (0..4)
        .map(|_| heap.allocate(layout(2 * MIB)).unwrap())
        .collect();
    for block in &blocks {
        // SAFETY: the blocks are freed after the stream's work.
        unsafe { stream.memset_async(Memory::device_ptr(block), 1, 2 * MIB) }.unwrap();
    }
    blocks
}

/// Lets the simulator say for so many questions that the work has not run.
fn not_ready(driver: &Driver, questions: u64) {
    let sim = driver.sim().unwrap();
    for nth in 1..=questions {
        sim.fail(Call::EventQuery, nth, Code::NOT_READY);
    }
}

#[test]
fn many_blocks_are_freed_after_one_event() {
    for driver in drivers() {
        let heap = on(&driver).limit(8 * MIB).build(&driver).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let blocks = busy_blocks(&heap, &stream);
        let events = || driver.sim().map(|sim| sim.count(Call::EventRecord));
        let before = events();
        heap.free_all_after(blocks, &stream).unwrap();
        assert_eq!(events(), before.map(|count| count + 1));
        let stats = heap.stats();
        assert_eq!((stats.live_blocks, stats.live), (0, 0));
        stream.synchronize().unwrap();
        assert_eq!(heap.collect().unwrap(), 4);
        assert_eq!(heap.allocate(layout(8 * MIB)).unwrap().offset(), 0);
        heap.free_all_after([], &stream).unwrap();
    }
}

#[test]
fn a_refused_free_of_several_blocks_returns_all_of_them() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let other = on(&driver).build(&driver).unwrap();
    let mut blocks = busy_blocks(&heap, &stream);
    blocks.push(other.allocate(layout(100)).unwrap());
    let refused = heap.free_all_after(blocks, &stream).unwrap_err();
    assert!(matches!(*refused.error, Error::InvalidArgument { .. }));
    assert!(refused.to_string().contains("number 4 "), "{refused}");
    let mut blocks = refused.blocks;
    assert_eq!((blocks.len(), heap.stats().live_blocks), (5, 4));
    blocks.pop();
    // The driver's refusal.
    driver
        .sim()
        .unwrap()
        .fail(Call::EventRecord, 1, Code::UNKNOWN);
    let refused = heap.free_all_after(blocks, &stream).unwrap_err();
    assert_eq!(refused.error.code(), Some(Code::UNKNOWN));
    assert_eq!(refused.blocks.len(), 4);
    assert_eq!(heap.stats().live, 8 * MIB);
    heap.free_all_after(refused.blocks, &stream).unwrap();
    let stats = heap.stats();
    assert_eq!((stats.live, stats.deferred_blocks), (0, 4));
}

#[test]
fn collect_all_waits_for_all_deferred_blocks() {
    for driver in drivers() {
        let heap = on(&driver).limit(8 * MIB).build(&driver).unwrap();
        assert_eq!(heap.collect_all().unwrap(), 0);
        let streams = [0, 0].map(|gpu| Stream::new(&driver, gpu).unwrap());
        let mut blocks = busy_blocks(&heap, &streams[0]);
        let last = blocks.pop().unwrap();
        heap.free_all_after(blocks, &streams[0]).unwrap();
        streams[1].wait_for(&streams[0]).unwrap();
        let event = Arc::new(Event::new(&driver, 0, false).unwrap());
        event.record(&streams[1]).unwrap();
        last.free_after_event(event).unwrap();
        assert_eq!(heap.collect_all().unwrap(), 4);
        assert_eq!(heap.stats().deferred_blocks, 0);
        heap.allocate(layout(8 * MIB)).unwrap();
    }
}

#[test]
fn a_wait_that_fails_loses_no_block() {
    let driver = simulated();
    let heap = on(&driver).limit(8 * MIB).build(&driver).unwrap();
    let streams = [0, 0].map(|gpu| Stream::new(&driver, gpu).unwrap());
    let mut blocks = busy_blocks(&heap, &streams[0]);
    let last = blocks.pop().unwrap();
    heap.free_all_after(blocks, &streams[0]).unwrap();
    last.free_after(&streams[1]).unwrap();
    // The second stream to be asked, whichever that is.
    let sim = driver.sim().unwrap();
    sim.fail(Call::EventSynchronize, 2, Code::UNKNOWN);
    let error = heap.collect_all().unwrap_err();
    assert_eq!(error.code(), Some(Code::UNKNOWN));
    let left = heap.stats().deferred_blocks;
    assert!(left == 1 || left == 3, "{left}");
    assert_eq!(heap.collect_all().unwrap() as u64, left);
    heap.allocate(layout(8 * MIB)).unwrap();
}

#[test]
fn an_allocation_waits_for_a_gpu_only_where_the_heap_is_told_to() {
    for waits in [false, true] {
        let driver = simulated();
        let heap = on(&driver)
            .limit(8 * MIB)
            .wait_for_gpu(waits)
            .build(&driver)
            .unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let blocks = busy_blocks(&heap, &stream);
        heap.free_all_after(blocks, &stream).unwrap();
        not_ready(&driver, 10);
        match heap.allocate(layout(5 * MIB)) {
            Ok(block) => {
                assert!(waits, "it took what a GPU still writes to");
                assert_eq!(block.get::<u8>(5 * MIB - 1).unwrap(), 1);
            }
            Err(error) => {
                assert!(!waits && matches!(error, Error::HeapFull { .. }), "{error}");
                assert_eq!(heap.stats().deferred_blocks, 4);
            }
        }
    }
}

#[test]
fn threads_that_wait_and_free_at_once_lose_no_block() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    std::thread::scope(|scope| {
        for gpu in [0, 0, 0] {
            let (heap, driver) = (&heap, &driver);
            scope.spawn(move || {
                let stream = Stream::new(driver, gpu).unwrap();
                for round in 0..100 {
                    let blocks = (0..3).map(|_| heap.allocate(layout(5000)).unwrap());
                    heap.free_all_after(blocks, &stream).unwrap();
                    if round % 3 == 0 {
                        heap.collect_all().unwrap();
                    } else {
                        heap.collect().unwrap();
                    }
                }
            });
        }
    });
    heap.collect_all().unwrap();
    let stats = heap.stats();
    assert_eq!((stats.deferred_blocks, stats.live_blocks), (0, 0));
    assert_eq!(stats.allocated_blocks, 900);
    drop(heap);
    nothing_held(&driver);
}
