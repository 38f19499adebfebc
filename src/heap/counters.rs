//! What a heap counts beside its threads' tallies.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of rare events, written without a lock.
pub(super) struct Counters {
    /// Allocations that failed.
    failed: AtomicU64,
    /// How often the heap took the caches of all threads.
    takings: AtomicU64,
    /// Frees of blocks that were not in use, not yet reported.
    strays: AtomicU64,
}

impl Counters {
    pub(super) fn new() -> Self {
        Self {
            failed: AtomicU64::new(0),
            takings: AtomicU64::new(0),
            strays: AtomicU64::new(0),
        }
    }

    pub(super) fn note_failed(&self) {
        self.failed.fetch_add(1, Relaxed);
    }

    pub(super) fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    pub(super) fn note_taking(&self) {
        self.takings.fetch_add(1, Relaxed);
    }

    pub(super) fn takings(&self) -> u64 {
        self.takings.load(Relaxed)
    }

    /// Counts frees of blocks that are not in use; only unsafe code can cause them. Free memory is left as it
    /// is. [`tell_strays`](Self::tell_strays) reports them with no lock held, because a log subscriber may use
    /// the heap.
    #[cold]
    pub(super) fn note_strays(&self, blocks: usize) {
        self.strays.fetch_add(blocks as u64, Relaxed);
    }

    /// Reports the strays since the last report. The caller holds no lock of the heap.
    pub(super) fn tell_strays(&self) {
        if self.strays.load(Relaxed) > 0 {
            let blocks = self.strays.swap(0, Relaxed);
            tracing::error!(blocks, "blocks were freed that are not in use");
        }
    }
}
