//! A heap whose process loses `membarrier(2)` after the heap was built, as to a filter of system calls that a
//! program puts on itself once it has started.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use egmem::Block;

use super::*;

const ROLE: &str = "EGMEM_REFUSED_CALLS";
/// The line that a child prints where the kernel (an emulator's) knows no filters.
const SKIPPED: &str = "skipped: no filters of system calls here";

/// From now on the kernel answers these calls of all of this process's threads with EPERM. Whether that
/// could be done.
fn refuse(calls: [libc::c_long; 2]) -> bool {
    let statement = |code: u32, yes: u8, no: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt: yes,
        jf: no,
        k,
    };
    let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut filter = [
        // The call's number is the first word of a filter's input.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(equals, 1, 0, calls[0] as u32),
        statement(equals, 0, 1, calls[1] as u32),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, refused),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let (mode, all_threads) = (
        libc::SECCOMP_SET_MODE_FILTER,
        libc::SECCOMP_FILTER_FLAG_TSYNC,
    );
    // SAFETY: the first takes numbers alone; the second reads the program, which lives until after the call.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(libc::SYS_seccomp, mode, all_threads, &program) == 0
    }
}

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
        if !refuse([libc::SYS_membarrier, setaffinity]) {
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
