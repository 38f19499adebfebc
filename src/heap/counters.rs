//! A heap's counts beside its threads' tallies.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of rare events, written without a lock.
#[derive(Default)]
pub(super) struct Counters {
    /// Allocations that failed.
    pub(super) failed: AtomicU64,
    /// How often the heap took the caches of all threads.
    pub(super) takings: AtomicU64,
    /// Frees of blocks that were not in use, not yet reported.
    strays: AtomicU64,
}

impl Counters {
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
