//! The background thread and the heap's end, in every order of events (`ci/loom`).

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::*;

/// The parts of a heap that matter to its end.
struct Heap {
    /// The mapped memory: loom fails if it is used while it is unmapped.
    memory: UnsafeCell<bool>,
    /// Blocks that wait for GPU work; `None` after the end.
    deferred: Mutex<Option<usize>>,
    /// Chunks; `None` after the end.
    backing: Mutex<Option<usize>>,
    lifetime: Lifetime,
}

impl Heap {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            memory: UnsafeCell::new(true),
            deferred: Mutex::new(Some(1)),
            backing: Mutex::new(Some(1)),
            lifetime: Lifetime::new(),
        })
    }

    /// Takes the blocks out of their lock, and scrubs them.
    fn collect(&self) {
        let taken = match self.deferred.lock().unwrap().as_mut() {
            Some(blocks) => std::mem::take(blocks),
            None => 0,
        };
        if taken > 0 {
            self.memory.with(|mapped| {
                // SAFETY: loom checks that no other thread writes.
                assert!(unsafe { *mapped }, "unmapped memory is touched");
            });
        }
    }

    /// Maps one more chunk, with the lock held.
    fn grow(&self) {
        if let Some(chunks) = self.backing.lock().unwrap().as_mut() {
            *chunks += 1;
            self.memory.with(|mapped| {
                // SAFETY: loom checks that no other thread writes.
                assert!(unsafe { *mapped }, "a heap that has ended grows");
            });
        }
    }

    fn unmap(&self) {
        self.deferred.lock().unwrap().take();
        self.backing.lock().unwrap().take();
        self.memory.with_mut(|mapped| {
            // SAFETY: loom checks that no other thread is inside.
            unsafe { *mapped = false };
        });
    }
}

#[test]
fn a_heap_ends_beside_a_thread_that_collects() {
    loom::model(|| {
        let heap = Heap::new();
        let collector = {
            let heap = heap.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    if let Some(_mapped) = heap.lifetime.enter() {
                        heap.collect();
                    }
                }
            })
        };
        assert!(heap.lifetime.end());
        heap.unmap();
        collector.join().unwrap();
        assert!(heap.lifetime.enter().is_none());
    });
}

#[test]
fn two_threads_collect_and_one_of_two_ends() {
    loom::model(|| {
        let heap = Heap::new();
        let threads = [false, true].map(|ends| {
            let heap = heap.clone();
            thread::spawn(move || {
                if let Some(_mapped) = heap.lifetime.enter() {
                    heap.collect();
                }
                if ends && heap.lifetime.end() {
                    heap.unmap();
                }
            })
        });
        if heap.lifetime.end() {
            heap.unmap();
        }
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
}

/// The background thread as it runs: it collects, and then it grows.
#[test]
fn a_heap_ends_beside_the_thread_that_grows_it() {
    loom::model(|| {
        let heap = Heap::new();
        let grower = {
            let heap = heap.clone();
            thread::spawn(move || {
                if let Some(_mapped) = heap.lifetime.enter() {
                    heap.collect();
                }
                heap.grow();
            })
        };
        assert!(heap.lifetime.end());
        heap.unmap();
        grower.join().unwrap();
        assert!(heap.backing.lock().unwrap().is_none());
    });
}

/// The queue's own lock does not suffice: it is released before the blocks' memory is accessed.
#[test]
#[should_panic]
fn the_model_fails_for_a_thread_that_does_not_enter() {
    loom::model(|| {
        let heap = Heap::new();
        let collector = {
            let heap = heap.clone();
            thread::spawn(move || heap.collect())
        };
        heap.unmap();
        collector.join().unwrap();
    });
}
