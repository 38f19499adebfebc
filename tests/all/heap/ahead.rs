//! Growth in advance.

use std::thread;
use std::time::{Duration, Instant};

use egmem::Stream;
use egmem::driver::Call;
use egmem::heap::Relief;

use super::*;

/// Longer than the thread looks by itself.
const REST: Duration = Duration::from_millis(700);

/// Waits, for longer than any machine needs.
fn until(heap: &Heap, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed().as_secs() < 300, "{:?}", heap.stats());
        thread::yield_now();
    }
}

/// And fills it first.
#[test]
fn it_stops_at_the_soft_limit() {
    for chunk in [8, 64] {
        let driver = simulated();
        let heap = on(&driver)
            .chunk(chunk * MIB)
            .grow_ahead(32 * MIB)
            .soft_limit(20 * MIB, |_| Relief::Refuse)
            .build(&driver)
            .unwrap();
        until(&heap, || heap.backed() >= 20 * MIB);
        // Less is free than there should be, so the thread tries again.
        thread::sleep(Duration::from_millis(50));
        drop(heap.allocate(layout(MIB)).unwrap());
        thread::sleep(Duration::from_millis(250));
        assert_eq!(heap.backed(), 20 * MIB);
    }
}

#[test]
fn it_fills_the_room_below_the_limit() {
    let driver = simulated();
    let options = on(&driver).limit(20 * MIB).grow_ahead(32 * MIB);
    let heap = options.build(&driver).unwrap();
    until(&heap, || heap.backed() == 20 * MIB);
}

#[test]
fn memory_is_added_before_it_is_needed() {
    for driver in drivers() {
        let heap = on(&driver).grow_ahead(16 * MIB).build(&driver).unwrap();
        let mut blocks = Vec::new();
        for _ in 0..40 {
            until(&heap, || heap.stats().free >= 2 * MIB);
            blocks.push(heap.allocate(layout(MIB)).unwrap());
        }
    }
}

/// A thread that waits for memory need not wait for all of it.
#[test]
fn it_lets_others_in_between_its_steps() {
    let driver = simulated();
    // It may be done before this thread has its turn.
    let begun = Instant::now();
    let mut tries = std::iter::repeat(()).take_while(|()| begun.elapsed().as_secs() < 300);
    let seen = tries.any(|()| {
        let options = on(&driver).chunk(2 * MIB).grow_ahead(200 * MIB);
        let heap = options.build(&driver).unwrap();
        let mut between = 0;
        until(&heap, || match heap.backed() {
            0 => false,
            bytes if bytes >= 200 * MIB => true,
            _ => {
                between += 1;
                false
            }
        });
        between > 0
    });
    assert!(seen, "it had the lock all the time");
}

#[test]
fn it_goes_on_after_a_rest() {
    let driver = simulated();
    let heap = on(&driver).grow_ahead(16 * MIB).build(&driver).unwrap();
    let mut blocks = Vec::new();
    // Small ones come from slabs, which take of the same memory.
    for bytes in [16 * MIB, 16 * MIB, 100, 16 * MIB] {
        let backed = heap.backed();
        blocks.push(heap.allocate(layout(bytes)).unwrap());
        // The thread backed it, because no request asks for more.
        until(&heap, || {
            heap.stats().free >= 16 * MIB && heap.backed() > backed
        });
        thread::sleep(REST);
    }
}

#[test]
fn it_goes_on_for_small_blocks_alone() {
    let driver = simulated();
    let heap = on(&driver).grow_ahead(16 * MIB).build(&driver).unwrap();
    until(&heap, || heap.stats().free >= 16 * MIB);
    thread::sleep(REST);
    let backed = heap.backed();
    let mut blocks = Vec::new();
    while heap.stats().free >= 15 * MIB && heap.backed() == backed {
        blocks.extend((0..100).map(|_| heap.allocate(layout(2000)).unwrap()));
    }
    until(&heap, || heap.backed() > backed);
}

#[test]
fn it_first_collects_blocks_that_gpus_are_done_with() {
    for driver in drivers() {
        let options = on(&driver).grow_ahead(8 * MIB);
        let heap = options.build(&driver).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        for _ in 0..8 {
            until(&heap, || heap.stats().free >= 8 * MIB);
            let block = heap.allocate(layout(8 * MIB)).unwrap();
            block.free_after(&stream).unwrap();
            stream.synchronize().unwrap();
        }
        // One that is allocated, one that is free, and one that another took the place of.
        assert!(heap.backed() <= 24 * MIB, "{} MiB", heap.backed() / MIB);
    }
}

#[test]
fn what_nobody_can_allocate_from_does_not_grow() {
    let driver = simulated();
    let options = on(&driver).chunk(2 * MIB).grow_ahead(200 * MIB);
    let heap = options.build(&driver).unwrap();
    let _block = heap.allocate(layout(100)).unwrap();
    drop(heap);
    let creates = || driver.sim().unwrap().count(Call::MemCreate);
    let (before, begun) = (creates(), Instant::now());
    while begun.elapsed().as_millis() < 300 {
        // One may have been under way.
        assert!(
            creates() <= before + 1,
            "{} chunks more",
            creates() - before
        );
        thread::yield_now();
    }
}

#[test]
fn idle_memory_goes_back_by_itself_down_to_what_was_there_from_the_start() {
    let driver = simulated();
    let options = on(&driver).chunk(2 * MIB).reserve(4 * MIB);
    let options = options.decay(Duration::from_millis(8));
    let heap = options.build(&driver).unwrap();
    let block = heap.allocate(layout(20 * MIB)).unwrap();
    assert!(heap.backed() >= 20 * MIB);
    drop(block);
    until(&heap, || heap.backed() == 4 * MIB);
    drop(heap.allocate(layout(20 * MIB)).unwrap());
    until(&heap, || heap.backed() == 4 * MIB);
}
