//! Many threads at once, some of which free what others allocated.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc;

use egmem::Block;

use super::*;

const ROUNDS: u64 = 20_000;

/// Writes who has the block, and where it is shorter than that nothing.
fn mark(block: &Block, owner: u64) {
    block.put(0, owner).unwrap();
    block.put(block.len() - 8, !owner).unwrap();
}

fn marked(block: &Block, owner: u64) -> bool {
    block.get::<u64>(0).unwrap() == owner && block.get::<u64>(block.len() - 8).unwrap() == !owner
}

fn size(random: &mut Random) -> u64 {
    let most = [200, 3000, 100_000][random.below(3) as usize];
    16 + random.below(most)
}

#[test]
fn no_two_threads_have_the_same_bytes() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let shelf: Mutex<Vec<(Block, u64)>> = Mutex::default();
    std::thread::scope(|scope| {
        for thread in 1..=4_u64 {
            let (heap, shelf) = (&heap, &shelf);
            scope.spawn(move || {
                let mut random = Random(thread);
                let mut own: Vec<(Block, u64)> = Vec::new();
                for round in 0..ROUNDS / 4 {
                    let owner = thread << 32 | round;
                    if let Ok(block) = heap.allocate(layout(size(&mut random))) {
                        mark(&block, owner);
                        own.push((block, owner));
                    }
                    if own.len() > 50 {
                        let (block, owner) = own.swap_remove(random.below(50) as usize);
                        assert!(marked(&block, owner));
                        // Half of them for others to free.
                        if random.below(2) == 0 {
                            let other = {
                                let mut shelf = shelf.lock().unwrap();
                                shelf.push((block, owner));
                                let which = random.below(shelf.len() as u64) as usize;
                                shelf.swap_remove(which)
                            };
                            assert!(marked(&other.0, other.1));
                        }
                    }
                }
            });
        }
    });
    let left = shelf.into_inner().unwrap().len() as u64;
    assert_eq!(left, 0, "as many are taken as are put");
    let stats = heap.stats();
    assert_eq!(stats.live_blocks, left);
    assert_eq!(heap.trim().unwrap(), stats.backed);
}

#[test]
fn one_allocates_and_another_frees() {
    let driver = simulated();
    let heap = on(&driver).limit(64 * MIB).build(&driver).unwrap();
    for bytes in [64, 1024, 4096, 65_536] {
        let (send, receive) = mpsc::sync_channel::<(Block, u64)>(100);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (block, owner) in receive {
                    assert!(marked(&block, owner));
                }
            });
            for owner in 0..ROUNDS / 4 {
                let block = heap.allocate(layout(bytes)).unwrap();
                mark(&block, owner);
                send.send((block, owner)).unwrap();
            }
            drop(send);
        });
    }
    assert_eq!(heap.stats().live_blocks, 0);
    // What goes from thread to thread is used again.
    assert!(heap.backed() <= 32 * MIB, "{}", heap.backed());
}

#[test]
fn caches_are_taken_from_threads_at_work() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 1..=2_u64 {
            let (heap, stop) = (&heap, &stop);
            scope.spawn(move || {
                let mut random = Random(thread);
                let mut owner = thread << 32;
                while !stop.load(SeqCst) {
                    let one = heap.allocate(layout(size(&mut random))).unwrap();
                    let two = heap.allocate(layout(size(&mut random))).unwrap();
                    mark(&one, owner);
                    mark(&two, owner + 1);
                    assert!(marked(&one, owner) && marked(&two, owner + 1));
                    owner += 2;
                }
            });
        }
        for _ in 0..200 {
            heap.trim().unwrap();
            assert!(heap.stats().live_blocks <= 4);
        }
        stop.store(true, SeqCst);
    });
    assert_eq!(heap.stats().live_blocks, 0);
}

#[test]
fn a_thread_that_only_allocates_keeps_no_more_than_one_that_frees() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut blocks = Vec::new();
    for size in (2304..16 << 10).step_by(256) {
        // So many that it gets some more of each size at a time.
        blocks.extend((0..8).map(|_| heap.allocate(layout(size)).unwrap()));
        let cached = heap.stats().cached;
        assert!(cached <= 128 << 10, "{cached} bytes kept at {size}");
    }
    // Not that it gets none.
    assert!(heap.stats().cached > 0);
}
