//! How much threads may cache, and how much they cache at most, as other threads read it without stopping them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::classes::{CLASSES, Class, GRANULE};

/// An upper bound of a cache's contents: one bit for each size class that may have blocks, and one for larger
/// blocks. Bits are set before blocks arrive, only on cold
/// paths, and cleared when the core has all of the blocks. So a reader never misses a block that was in a
/// cache when it began to read.
///
/// Beside it are the free bytes of the thread's shard, after each change, and the least there were.
// On cache lines of its own: 128 bytes, since x86 fetches lines in pairs.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct CacheBound(AtomicU64, AtomicU64, AtomicU64);

impl CacheBound {
    /// The bit of the larger blocks.
    pub(super) const LARGER: u64 = 1 << CLASSES;

    /// Returns the bit of a class.
    #[inline]
    pub(crate) const fn small(class: Class) -> u64 {
        1 << class.index()
    }

    /// Notes that blocks of these kinds may arrive. The caller holds the cache.
    #[cold]
    pub(crate) fn note(&self, bits: u64) {
        self.0.store(self.0.load(Relaxed) | bits, Relaxed);
    }

    /// Notes that there are no blocks of these kinds. The caller holds the cache.
    pub(crate) fn forget(&self, bits: u64) {
        self.0.store(self.0.load(Relaxed) & !bits, Relaxed);
    }

    /// Returns whether there may be blocks of one of these kinds.
    pub(crate) fn has(&self, bits: u64) -> bool {
        self.0.load(Relaxed) & bits != 0
    }

    /// Notes the free bytes of the shard. The caller holds the cache.
    #[inline]
    pub(crate) fn note_shard(&self, bytes: u64) {
        self.1.store(bytes, Relaxed);
        if bytes < self.2.load(Relaxed) {
            self.2.store(bytes, Relaxed);
        }
    }

    /// Returns the free bytes of the shard.
    pub(crate) fn shard(&self) -> u64 {
        self.1.load(Relaxed)
    }

    /// Returns the fewest bytes that were free in the shard since the last call. May miss a change that happens
    /// meanwhile.
    pub(crate) fn take_least_in_shard(&self) -> u64 {
        self.2.swap(self.shard(), Relaxed)
    }

    /// Returns the most bytes that the cache may hold, with at most `larger` bytes of larger blocks.
    pub(crate) fn bytes(&self, larger: u64) -> u64 {
        let bits = self.0.load(Relaxed);
        let small = Class::all().filter(|class| bits & Self::small(*class) != 0);
        // A shelf has room for two magazines.
        let small: u64 = small
            .map(|class| 2 * class.magazine() as u64 * class.bytes())
            .sum();
        let larger = match bits & Self::LARGER {
            0 => 0,
            _ => larger,
        };
        small + larger + self.shard()
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_counts_until_it_is_forgotten() {
        let bound = CacheBound::default();
        let (one, other) = (Class::from_index(0), Class::from_index(CLASSES - 1));
        assert_eq!(bound.bytes(1000), 0);
        bound.note(CacheBound::small(one));
        bound.note(CacheBound::small(other));
        assert_eq!(bound.bytes(1000), 2 * (64 * 16 + (32 << 10)));
        bound.note(CacheBound::LARGER);
        bound.forget(CacheBound::small(other));
        assert!(bound.has(CacheBound::small(one)) && !bound.has(CacheBound::small(other)));
        bound.note_shard(7);
        assert_eq!(bound.bytes(1000), 1000 + 2 * 64 * 16 + 7);
        bound.forget(u64::MAX);
        assert_eq!(bound.bytes(1000), 7);
    }
}
