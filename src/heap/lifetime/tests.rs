use std::alloc::Layout;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::Heap;
use crate::driver::{Call, NodeId};
use crate::{Driver, Machine, Stream};

#[test]
fn no_thread_enters_after_the_end() {
    let lifetime = Lifetime::new();
    assert!(lifetime.enter().is_some());
    assert!(lifetime.end());
    assert!(lifetime.enter().is_none());
    assert!(!lifetime.end(), "only the first caller ends it");
}

/// The thread inside stands for the background thread while it scrubs a block.
#[test]
fn a_heap_unmaps_nothing_while_a_thread_is_inside() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let unmapped = || driver.sim().unwrap().count(Call::MemUnmap);
    let heap = Heap::on(NodeId(0)).limit(8 << 20).build(&driver).unwrap();
    let block = heap.allocate(Layout::new::<[u8; 1 << 20]>()).unwrap();
    let inner = std::sync::Arc::clone(heap.inner());
    let inside = inner.lifetime.enter().unwrap();
    thread::scope(|scope| {
        let ending = scope.spawn(|| drop((block, heap)));
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            assert_eq!(unmapped(), 0, "memory is unmapped while a thread uses it");
            assert!(!ending.is_finished());
            thread::yield_now();
        }
        drop(inside);
    });
    assert!(unmapped() > 0);
}

#[test]
fn what_is_collected_by_a_thread_without_a_handle_is_entered_for() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(8 << 20).build(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let block = heap.allocate(Layout::new::<[u8; 1 << 20]>()).unwrap();
    block.free_after(&stream).unwrap();
    let inner = std::sync::Arc::clone(heap.inner());
    drop(heap);
    assert_eq!(inner.collect_passed().unwrap(), 0);
    assert_eq!(inner.wait_and_collect().unwrap(), 0);
}
