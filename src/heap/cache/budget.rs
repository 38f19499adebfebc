//! How many larger blocks each thread may keep.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::core::GRANULE;

/// Each thread may keep at least this many bytes of larger blocks, and at most a 512th of all memory.
const LEAST: u64 = 128 << 10;
const SHARE: u64 = 512;

/// While threads share the core, each may cache at most this fraction (1/16) of the heap's addresses.
const SHARED_PART: u64 = 16;

/// How many granules of larger blocks a thread may cache. Read and written without a lock.
pub(crate) struct Budget {
    /// The option of this name, in bytes.
    thread_cache: u64,
    alone: AtomicU64,
    /// The highest value that `alone` ever had.
    most_alone: AtomicU64,
    shared: u64,
}

impl Budget {
    /// Creates the budget of a heap without memory, with addresses below `limit`. Both are in bytes.
    pub(crate) fn new(thread_cache: u64, limit: u64) -> Self {
        let budget = Self {
            thread_cache,
            alone: AtomicU64::new(0),
            most_alone: AtomicU64::new(0),
            shared: thread_cache.min(limit / SHARED_PART) / GRANULE,
        };
        budget.follow(0);
        budget
    }

    /// Returns the granules of larger blocks that a thread may cache.
    #[inline]
    pub(crate) fn alone(&self) -> u64 {
        self.alone.load(Relaxed)
    }

    /// Returns the same while several threads use the core, if it is more.
    #[inline]
    pub(crate) fn shared(&self) -> u64 {
        self.shared
    }

    /// Adapts the budget to the heap's memory, in bytes.
    pub(crate) fn follow(&self, backed: u64) {
        let most = (backed / SHARE).max(LEAST);
        let bytes = most.min(self.thread_cache);
        self.most_alone.fetch_max(bytes / GRANULE, Relaxed);
        self.alone.store(bytes / GRANULE, Relaxed);
    }

    /// Returns the most bytes of larger blocks that any thread was ever allowed to keep, with those on their way to
    /// shards.
    pub(super) fn most_ever(&self) -> u64 {
        (self.most_alone.load(Relaxed).max(self.shared) + self.shared) * GRANULE
    }
}
