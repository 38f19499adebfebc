//! A heap whose process loses `membarrier(2)` after the heap was built, as to a filter of system calls that a
//! program puts on itself once it has started.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use egmem::Block;

use super::*;
use crate::system_calls::refuse;

const ROLE: &str = "EGMEM_REFUSED_CALLS";
/// The line that a child prints where the kernel (an emulator's) knows no filters.
const SKIPPED: &str = "skipped: no filters of system calls here";

/// Keeps the caches and the core busy, and checks that no other thread writes to its blocks.
fn work(heap: &Heap, seed: u64, until: &AtomicBool) {
    let mut random = Random(seed);
    let mut blocks: Vec<(Block, u64)> = Vec::new();
    while !until.load(Relaxed) {
        for _ in 0..100 {
            let most = [200, 3000, 100_000, 3_000_000][random.below(4) as usize];
            if let Ok(block) = heap.allocate(layout(8 + random.below(most))) {
                let mark = seed << 32 | random.below(1 << 32);
                block.put(0, mark).unwrap();
                blocks.push((block, mark));
            }
            if blocks.len() > 8 {
                let (block, mark) = blocks.swap_remove(random.below(8) as usize);
                assert_eq!(block.get::<u64>(0).unwrap(), mark, "another wrote here");
            }
        }
    }
}

/// In a child process, its role; nothing otherwise.
#[test]
fn child_without_membarrier() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let driver = simulated();
    let heap = on(&driver).limit(32 * MIB).build(&driver).unwrap();
    let until = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers = [1, 2, 3].map(|seed| {
            let (heap, until) = (&heap, &until);
            scope.spawn(move || work(heap, seed, until))
        });
        // One thread has the core reserved for it by now.
        (0..500).for_each(|_| drop(heap.allocate(layout(2 * MIB))));
        let setaffinity = match role.as_str() {
            "both" => libc::SYS_sched_setaffinity,
            _ => libc::SYS_membarrier,
        };
        if !refuse(&[libc::SYS_membarrier, setaffinity]) {
            until.store(true, Relaxed);
            return println!("{SKIPPED}");
        }
        for round in 0..8 {
            assert!(heap.stats().backed <= 32 * MIB);
            heap.trim().unwrap();
            // A thread that comes and ends, and a request that takes all caches.
            let short = scope.spawn(|| drop(heap.allocate(layout(100)).unwrap()));
            assert!(
                short.join().is_ok(),
                "a thread's end failed in round {round}"
            );
            assert!(heap.allocate(layout(32 * MIB)).is_err());
        }
        until.store(true, Relaxed);
        for worker in workers {
            assert!(worker.join().is_ok());
        }
    });
    let stats = heap.stats();
    assert_eq!((stats.live_blocks, stats.live), (0, 0));
    heap.trim().unwrap();
    drop(heap.allocate(layout(32 * MIB)).unwrap());
    drop(heap);
    nothing_held(&driver);
    // Others are built from then on.
    let heap = on(&driver).build(&driver).unwrap();
    drop(heap.allocate(layout(100)).unwrap());
    assert_eq!(heap.stats().live_blocks, 0);
    drop(heap);
    nothing_held(&driver);
}

fn survives(role: &str) {
    let child = egmem_tests::child(module_path!(), "child_without_membarrier")
        .env(ROLE, role)
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&child.stdout),
        String::from_utf8_lossy(&child.stderr),
    );
    assert!(child.status.success(), "{}\n{out}\n{err}", child.status);
    assert!(out.contains("1 passed"), "{out}");
    if out.contains(SKIPPED) {
        println!("{SKIPPED}");
    }
}

#[test]
fn a_heap_goes_on_where_membarrier_is_refused_later() {
    survives("membarrier");
}

#[test]
fn a_heap_goes_on_where_the_cpus_cannot_be_visited_either() {
    survives("both");
}
