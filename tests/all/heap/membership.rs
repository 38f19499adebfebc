//! Handles, blocks and threads end in any order, and nothing is left.

use std::sync::{Arc, mpsc};

use egmem::Block;
use egmem::heap::Relief;

use super::*;

#[test]
fn blocks_may_outlive_their_heap() {
    for driver in drivers() {
        let heap = on(&driver).build(&driver).unwrap();
        let other = heap.clone();
        let block = other.allocate(layout(5000)).unwrap();
        let small = heap.allocate(layout(40)).unwrap();
        drop(heap);
        let third = other.allocate(layout(2 * MIB)).unwrap();
        drop(other);
        block.fill(1).unwrap();
        drop(block);
        small.fill(2).unwrap();
        std::thread::spawn(move || drop(third)).join().unwrap();
        assert_eq!(small.get::<u8>(39).unwrap(), 2);
        drop(small);
        nothing_held(&driver);
    }
}

#[test]
fn threads_that_end_leave_nothing() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    for _ in 0..20 {
        // Not scoped: the end of a scope does not wait for the destructors of threads' thread-locals.
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let heap = heap.clone();
                std::thread::spawn(move || {
                    let blocks: Vec<Block> = (1..200)
                        .map(|n| heap.allocate(layout(n * 60)).unwrap())
                        .collect();
                    drop(blocks);
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }
    let stats = heap.stats();
    assert_eq!((stats.live_blocks, stats.threads), (0, 0));
    assert_eq!(heap.trim().unwrap(), stats.backed);
    drop(heap);
    nothing_held(&driver);
}

#[test]
fn a_heap_ends_while_other_threads_keep_its_blocks() {
    let driver = simulated();
    for round in 0..50 {
        let heap = on(&driver).build(&driver).unwrap();
        let (send, receive) = mpsc::channel::<Block>();
        let thread = std::thread::spawn(move || {
            for block in receive {
                block.put(0, 1_u8).unwrap();
            }
        });
        for n in 1..=100 {
            send.send(heap.allocate(layout(n * 50)).unwrap()).unwrap();
        }
        if round % 2 == 0 {
            drop(heap);
            drop(send);
            thread.join().unwrap();
        } else {
            drop(send);
            thread.join().unwrap();
            drop(heap);
        }
        nothing_held(&driver);
    }
}

#[test]
fn many_heaps_come_and_go_in_one_thread() {
    let driver = simulated();
    let long = on(&driver).build(&driver).unwrap();
    for _ in 0..100 {
        let heaps: Vec<Heap> = (0..12)
            .map(|_| on(&driver).build(&driver).unwrap())
            .collect();
        for heap in &heaps {
            let block = heap.allocate(layout(100)).unwrap();
            let other = long.allocate(layout(100)).unwrap();
            assert_ne!(block.device_ptr(), other.device_ptr());
        }
    }
    assert_eq!(long.stats().live_blocks, 0);
    drop(long);
    nothing_held(&driver);
}

thread_local! {
    static KEPT: std::cell::RefCell<Vec<(Block, Heap)>> = const { std::cell::RefCell::new(Vec::new()) };
}

#[test]
fn a_block_may_end_with_its_thread() {
    let driver = simulated();
    for touch_first in [false, true] {
        let heap = on(&driver).build(&driver).unwrap();
        let theirs = heap.clone();
        std::thread::spawn(move || {
            // Whichever of the two thread-locals is made first ends last.
            if touch_first {
                KEPT.with(|_| {});
            }
            let block = theirs.allocate(layout(5000)).unwrap();
            KEPT.with(|kept| kept.borrow_mut().push((block, theirs)));
        })
        .join()
        .unwrap();
        assert_eq!(heap.stats().live_blocks, 0);
        drop(heap);
        nothing_held(&driver);
    }
}

#[test]
fn threads_that_go_on_keep_nothing_of_a_heap_that_has_ended() {
    let driver = simulated();
    for last_is_a_block in [false, true] {
        let token = Arc::new(());
        let theirs = Arc::clone(&token);
        let heap = on(&driver)
            .soft_limit(64 * MIB, move |_| {
                let _ = &theirs;
                Relief::Grow
            })
            .build(&driver)
            .unwrap();
        let block = heap.allocate(layout(100)).unwrap();
        match last_is_a_block {
            false => {
                drop(block);
                drop(heap);
            }
            true => {
                drop(heap);
                assert_eq!(Arc::strong_count(&token), 2, "the block keeps the heap");
                drop(block);
            }
        }
        assert_eq!(Arc::strong_count(&token), 1, "{last_is_a_block}");
    }
}
