//! Findings under the heap's locks, logged later with none held.

use std::sync::Mutex;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{AcqRel, Relaxed, Release},
};

use crate::per_driver::lock;

/// The most reports that wait; more are dropped.
const MOST: usize = 1000;

/// What the heap's threads have found while they held locks. [`tell`](Self::tell) reports it with no lock held, because a log
/// subscriber or a callback of the program may use the heap.
#[derive(Default)]
pub(crate) struct Reports {
    are_waiting: AtomicBool,
    list: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
    /// Frees of blocks that were not in use.
    unknown_frees: AtomicU64,
}

impl std::fmt::Debug for Reports {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reports").finish_non_exhaustive()
    }
}

impl Reports {
    /// Adds a report: a call of `tracing` or of a callback.
    #[cold]
    pub(crate) fn add(&self, report: impl FnOnce() + Send + 'static) {
        let mut list = lock(&self.list);
        if list.len() < MOST {
            list.push(Box::new(report));
        }
        drop(list);
        self.are_waiting.store(true, Release);
    }

    /// Counts frees of blocks that are not in use; only unsafe code can cause them. Free memory is left as it is.
    #[cold]
    pub(crate) fn count_unknown_frees(&self, blocks: usize) {
        self.unknown_frees.fetch_add(blocks as u64, Relaxed);
        self.are_waiting.store(true, Release);
    }

    /// Reports all that waits. The caller holds no lock of the heap.
    pub(crate) fn tell(&self) {
        while self.are_waiting.load(Relaxed) && self.are_waiting.swap(false, AcqRel) {
            let blocks = self.unknown_frees.swap(0, Relaxed);
            if blocks > 0 {
                tracing::error!(blocks, "blocks were freed that are not in use");
            }
            let list = std::mem::take(&mut *lock(&self.list));
            list.into_iter().for_each(|report| report());
        }
    }
}
