//! Findings of the heap under its locks are logged with none held: a subscriber may use the heap.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egmem::Stream;
use egmem::driver::{Access, Call, Code, Location};
use egmem::heap::debug::DebugOptions;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::*;

/// Uses the heap at each warning, and notes whether that succeeded or waited for the thread that warns.
struct Listener {
    heap: Heap,
    went: Mutex<Vec<bool>>,
}

impl Listener {
    /// In another thread, so that a deadlock fails the test instead of hanging it.
    fn uses_the_heap(&self) -> Receiver<()> {
        let (done, went) = channel();
        let heap = self.heap.clone();
        std::thread::spawn(move || {
            let _ = heap.live_blocks();
            let _ = (heap.collect(), heap.backed());
            drop(heap.allocate(layout(5000)));
            let _ = done.send(());
        });
        went
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.target().starts_with("egmem_heap")
    }
    fn event(&self, _: &Event<'_>) {
        let went = self.uses_the_heap().recv_timeout(Duration::from_secs(300));
        self.went.lock().unwrap().push(went.is_ok());
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Of each warning that comes while `f` runs, whether the heap could be used.
fn warnings(heap: &Heap, f: impl FnOnce()) -> Vec<bool> {
    let listener = Arc::new(Listener {
        heap: heap.clone(),
        went: Mutex::default(),
    });
    egmem_tests::with_subscriber(Arc::clone(&listener), f);
    std::mem::take(&mut *listener.went.lock().unwrap())
}

/// In debug mode, where the CPU may not write: a GPU does, which can be made to fail.
fn watched_by_the_gpu(driver: &Driver) -> Heap {
    on(driver)
        .access(Location::Host, Access::None)
        .debug(DebugOptions::new())
        .build(driver)
        .unwrap()
}

#[test]
fn unwritable_guards_are_logged_once_with_no_lock_held() {
    let driver = simulated();
    let heap = watched_by_the_gpu(&driver);
    let sim = driver.sim().unwrap();
    let told = warnings(&heap, || {
        sim.fail(Call::MemsetD8Async, 1, Code::INVALID_VALUE);
        drop(heap.allocate(layout(100)).unwrap());
    });
    assert_eq!(told, [true]);
}

#[test]
fn unfillable_freed_blocks_are_logged_once_with_no_lock_held() {
    let driver = simulated();
    let heap = watched_by_the_gpu(&driver);
    let block = heap.allocate(layout(100)).unwrap();
    let sim = driver.sim().unwrap();
    let told = warnings(&heap, || {
        sim.fail(Call::MemsetD8Async, 1, Code::INVALID_VALUE);
        drop(block);
    });
    assert_eq!(told, [true]);
}

#[cfg(feature = "portable")]
#[test]
fn a_double_free_is_logged_once_with_no_lock_held() {
    use allocator_api2::alloc::Allocator;

    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    // As many as are given back, or the heap would count less than none.
    std::mem::forget(heap.allocate(layout(5000)).unwrap());
    let memory = Allocator::allocate(&&heap, layout(100)).unwrap().cast();
    let told = warnings(&heap, || {
        for _ in 0..2 {
            // SAFETY: none, the second time: the test is about that. No other thread has blocks of this size.
            unsafe { Allocator::deallocate(&&heap, memory, layout(100)) };
            // The thread's cached blocks go back.
            heap.trim().unwrap();
        }
    });
    assert_eq!(told, [true]);
}

#[test]
fn an_unscrubbed_block_is_logged_with_no_lock_held() {
    let driver = simulated();
    let heap = on(&driver).access(Location::Host, Access::None);
    let heap = heap.scrub_on_free(true).build(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let block = heap.allocate(layout(100)).unwrap();
    block.free_after(&stream).unwrap();
    stream.synchronize().unwrap();
    let sim = driver.sim().unwrap();
    let told = warnings(&heap, || {
        sim.fail(Call::MemsetD8Async, 1, Code::INVALID_VALUE);
        assert_eq!(heap.collect(), Ok(1));
    });
    assert_eq!(told, [true]);
}

#[test]
fn a_lost_gpu_is_logged_with_no_lock_held() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let other = on(&driver).build(&driver).unwrap();
    let gone = other.allocate(layout(8)).unwrap();
    // SAFETY: none: the memory goes before the stream gets to it. The simulator finds that out.
    unsafe { stream.memset_async(gone.device_ptr(), 0, 8).unwrap() };
    drop((gone, other));
    let block = heap.allocate(layout(100)).unwrap();
    block.free_after(&stream).unwrap();
    let told = warnings(&heap, || assert_eq!(heap.collect(), Ok(1)));
    assert_eq!(told, [true]);
}

#[test]
fn memory_that_the_driver_does_not_release_is_logged_with_no_lock_held() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    heap.reserve(16 * MIB).unwrap();
    let sim = driver.sim().unwrap();
    let told = warnings(&heap, || {
        // Each release is tried twice: that of the first chunk, and again before the second goes back.
        for _ in 0..4 {
            sim.fail(Call::MemRelease, 1, Code::NOT_PERMITTED);
        }
        assert_eq!(heap.trim(), Ok(16 * MIB));
    });
    assert_eq!(told, [true]);
}
