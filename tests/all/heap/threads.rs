//! Many threads at once, some of which free others' blocks.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc;

use egmem::Block;

use super::*;

const ROUNDS: u64 = 20_000;

/// Writes the block's owner, or nothing where the block is shorter than that.
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
    // Blocks that go from thread to thread are used again.
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

/// While several threads use the core, a thread keeps its last large blocks, so that threads do not wait for each
/// other. A thread that has the core for itself gives them back.
#[test]
fn large_blocks_are_kept_only_while_threads_share_the_core() {
    let driver = simulated();
    let heap = on(&driver).limit(64 * MIB).build(&driver).unwrap();
    heap.reserve(64 * MIB).unwrap();
    let cycle = |heap: &Heap, bytes| drop(heap.allocate(layout(bytes)).unwrap());
    cycle(&heap, MIB);
    assert_eq!(heap.stats().cached, 0, "there is no other thread");
    // Blocks above 4 MiB always come from the core.
    std::thread::scope(|scope| scope.spawn(|| cycle(&heap, 8 * MIB)).join().unwrap());
    for bytes in [256 << 10, MIB, 4 * MIB] {
        drop(heap.allocate(layout(64 * MIB)).unwrap()); // takes the threads' caches
        cycle(&heap, bytes);
        assert_eq!(heap.stats().cached, bytes);
        let first = heap.allocate(layout(bytes)).unwrap().offset();
        assert_eq!(heap.allocate(layout(bytes)).unwrap().offset(), first);
        // Others push it out, and no more is kept than the option `thread_cache` says.
        drop([(); 5].map(|()| heap.allocate(layout(MIB + 4096)).unwrap()));
        let cached = heap.stats().cached;
        assert!(cached > 2 * MIB && cached <= 4 * MIB, "{cached}");
    }
    // One more than the thread keeps.
    drop([(); 5].map(|()| heap.allocate(layout(MIB)).unwrap()));
    let cached = heap.stats().cached;
    assert!(cached > 2 * MIB && cached <= 4 * MIB, "{cached}");

    // No request fails because of the caches.
    let all = heap.allocate(layout(64 * MIB)).unwrap();
    assert_eq!(heap.stats().cached, 0);
    drop(all);

    // The only thread for so long has the core reserved for it.
    (0..5000).for_each(|_| cycle(&heap, 8 * MIB));
    cycle(&heap, MIB);
    assert_eq!(heap.stats().cached, 0);

    let ample = on(&driver).thread_cache(16 * MIB).build(&driver).unwrap();
    ample.reserve(16 * MIB).unwrap();
    cycle(&ample, 8 * MIB);
    std::thread::scope(|scope| scope.spawn(|| cycle(&ample, 8 * MIB)).join().unwrap());
    for (bytes, kept) in [(4 * MIB + 256, 0), (4 * MIB, 4 * MIB)] {
        cycle(&ample, bytes);
        assert_eq!(
            ample.stats().cached,
            kept,
            "blocks above 4 MiB are not kept"
        );
    }

    let none = on(&driver).thread_cache(0).build(&driver).unwrap();
    cycle(&none, MIB);
    assert_eq!(none.stats().cached, 0);
}

#[test]
fn a_thread_alone_that_only_allocates_keeps_nothing() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut blocks = Vec::new();
    for size in (2304..16 << 10).step_by(256) {
        // So many that a thread beside others would get some more of each size at a time.
        blocks.extend((0..8).map(|_| heap.allocate(layout(size)).unwrap()));
        assert_eq!(heap.stats().cached, 0, "kept at {size}");
    }
}

/// Processors fetch cache lines of 64 bytes in pairs; a thread that writes takes them from the others.
#[test]
fn small_blocks_of_two_threads_share_no_cache_lines() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    // A block that makes the heap grow is taken alone.
    heap.reserve(1 << 20).unwrap();
    for bytes in [1, 32, 64] {
        let barrier = std::sync::Barrier::new(8);
        let mut lines: Vec<u64> = std::thread::scope(|scope| {
            let allocate = || {
                let blocks = [(); 3].map(|()| heap.allocate(layout(bytes)).unwrap());
                let mut lines = blocks
                    .each_ref()
                    .map(|block| block.device_ptr().0 / 128)
                    .to_vec();
                lines.dedup();
                barrier.wait();
                lines
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(allocate)).collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        });
        lines.sort_unstable();
        assert!(
            lines.is_sorted_by(|one, next| one < next),
            "{bytes}: {lines:?}"
        );
    }
}
