//! Cached blocks stay within reach of all threads.

use std::alloc::Layout;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use super::*;
use crate::debug::DebugOptions;
use crate::driver::NodeId;
use crate::{Driver, Machine, Stream};
use crate::{Heap, HeapOptions};

/// Returns whether another thread can see `kept` cleared before `empty` has reached the core, where it
/// returns what a freed block has left.
fn is_ever_out_of_reach(
    options: impl FnOnce(HeapOptions) -> HeapOptions,
    empty: fn(&HeapInner),
    kept: fn(&HeapInner) -> u64,
) -> bool {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = options(Heap::on(NodeId(0)).limit(64 << 20));
    let heap = heap.build(&driver).unwrap();
    let inner: &HeapInner = heap.inner();
    let (turns, core_is_free) = (Barrier::new(2), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(heap.allocate(Layout::new::<[u8; 65_536]>()).unwrap());
            assert!(kept(inner) > 0);
            turns.wait();
            turns.wait();
            empty(inner);
        });
        turns.wait();
        let core = inner.core();
        turns.wait();
        let looks = scope.spawn(|| {
            while kept(inner) > 0 {
                thread::sleep(Duration::from_millis(1));
            }
            !core_is_free.load(SeqCst)
        });
        thread::sleep(Duration::from_millis(50));
        core_is_free.store(true, SeqCst);
        drop(core);
        looks.join().unwrap()
    })
}

fn cached(heap: &HeapInner) -> u64 {
    heap.tally().1
}

#[test]
fn what_a_thread_gives_back_of_its_own_is_never_out_of_reach() {
    let empty = |heap: &HeapInner| {
        assert!(heap.after_own_cache(&|_| None::<()>).is_none());
    };
    assert!(!is_ever_out_of_reach(|heap| heap, empty, cached));
}

#[test]
fn what_all_threads_give_back_is_never_out_of_reach() {
    let empty = |heap: &HeapInner| {
        heap.empty_all_caches();
    };
    assert!(!is_ever_out_of_reach(|heap| heap, empty, cached));
}

#[test]
fn what_leaves_quarantine_is_never_out_of_reach() {
    let empty = |heap: &HeapInner| {
        heap.empty_all_caches();
    };
    let debug = |heap: HeapOptions| heap.debug(DebugOptions::new());
    let kept = |heap: &HeapInner| heap.watch.as_ref().unwrap().quarantined();
    assert!(!is_ever_out_of_reach(debug, empty, kept));
}

#[test]
fn what_has_passed_is_waited_for_until_the_core_has_it() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let block = heap.allocate(Layout::new::<[u8; 65_536]>()).unwrap();
    block.free_after(&stream).unwrap();
    stream.synchronize().unwrap();
    let inner: &HeapInner = heap.inner();
    thread::scope(|scope| {
        let core = inner.core();
        let collects = scope.spawn(|| inner.collect_passed().unwrap());
        while inner.deferred_blocks() > 0 {
            thread::yield_now();
        }
        let waits = inner.collecting.try_lock().is_err();
        drop(core);
        assert_eq!((collects.join().unwrap(), waits), (1, true));
    });
}
