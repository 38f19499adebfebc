//! A summary of a thread's cache that other threads read without stopping the thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::magazine::Magazine;
use crate::classes::{CLASSES, Class};

/// An upper bound of a cache's contents: one bit for each size class that may have blocks, and one for larger
/// blocks. Bits are set before blocks arrive, only on cold
/// paths, and cleared when the core has all of the blocks. So a reader never misses a block that was in a
/// cache when it began to read.
///
/// Beside it are the free bytes of the thread's shard, after each change, and the least there were.
// On cache lines of its own: 128 bytes, since x86 fetches lines in pairs.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Kept(AtomicU64, AtomicU64, AtomicU64);

impl Kept {
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

    /// Returns whether there may be larger blocks, or free memory in a shard.
    pub(crate) fn has_larger(&self) -> bool {
        self.has(Self::LARGER) || self.shard() > 0
    }

    /// Returns the most bytes that the cache may hold, with at most `larger` bytes of larger blocks.
    pub(crate) fn bytes(&self, larger: u64) -> u64 {
        let bits = self.0.load(Relaxed);
        let small = Class::all().filter(|class| bits & Self::small(*class) != 0);
        // Two magazines of each class, and one that is being handed over.
        let small: u64 = small
            .map(|class| 2 * Magazine::rounds(class) as u64 * class.bytes())
            .sum();
        let larger = match bits & Self::LARGER {
            0 => 0,
            _ => larger,
        };
        small + larger + self.shard()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_counts_until_it_is_forgotten() {
        let kept = Kept::default();
        let (one, other) = (Class::from_index(0), Class::from_index(CLASSES - 1));
        assert_eq!(kept.bytes(1000), 0);
        kept.note(Kept::small(one));
        kept.note(Kept::small(other));
        assert_eq!(kept.bytes(1000), 2 * (64 * 16 + (32 << 10)));
        kept.note(Kept::LARGER);
        kept.forget(Kept::small(other));
        assert!(kept.has(Kept::small(one)) && !kept.has(Kept::small(other)));
        kept.note_shard(7);
        assert_eq!(kept.bytes(1000), 1000 + 2 * 64 * 16 + 7);
        kept.forget(u64::MAX);
        assert_eq!(kept.bytes(1000), 7);
    }
}
