//! A heap's counts beside its threads' tallies.

use std::sync::atomic::AtomicU64;

/// Counts of rare events, written without a lock.
#[derive(Default)]
pub(super) struct Counters {
    /// Allocations that failed.
    pub(super) failed: AtomicU64,
    /// How often the heap took the caches of all threads.
    pub(super) takings: AtomicU64,
}
