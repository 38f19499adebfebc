//! A thread's small blocks of a class, and a summary of a thread's cache that other threads read without
//! stopping the thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::classes::{CLASSES, Class};

/// The most blocks that go to their slabs at once.
const PART: usize = 64;

/// Their bytes for a larger class: 16 blocks of 2 KiB.
const PART_BYTES: u64 = 32 << 10;

/// A stack of small blocks of one class. A full one gives the older half of its blocks to their slabs: a thread that
/// allocates and frees around that boundary exchanges none. (Bonwick and Adams, "Magazines and Vmem", 2001, have two
/// magazines for that.)
#[derive(Default)]
pub(crate) struct Magazine {
    /// Has room for two parts from the first use on, and never grows.
    offsets: Vec<u64>,
    /// The blocks, in place of `offsets`, until the class's next allocation or free.
    parked: Vec<u64>,
}

impl Magazine {
    /// Returns how many blocks of `class` are half of a full magazine.
    pub(crate) fn part(class: Class) -> usize {
        PART.min((PART_BYTES / class.bytes()) as usize)
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u64> {
        self.offsets.pop()
    }

    /// Pushes a block of `class`. If the magazine is full, calls `give` with the older half of its blocks, which leaves it.
    #[inline]
    pub(crate) fn push(
        &mut self,
        class: Class,
        offset: u64,
        bound: &CacheBound,
        give: impl FnOnce(&[u64]),
    ) {
        if self.offsets.len() == self.offsets.capacity() {
            self.make_room(class, bound, give);
        }
        self.offsets.push(offset);
    }

    #[cold]
    #[inline(never)]
    fn make_room(&mut self, class: Class, bound: &CacheBound, give: impl FnOnce(&[u64])) {
        self.ready(class, bound);
        let part = Self::part(class);
        if self.offsets.len() == 2 * part {
            give(&self.offsets[..part]);
            self.offsets.drain(..part);
        }
    }

    /// Lets `fill` write up to `most` offsets to an empty magazine; it returns how many it wrote.
    pub(crate) fn fill(
        &mut self,
        class: Class,
        bound: &CacheBound,
        most: usize,
        fill: impl FnOnce(&mut [u64]) -> usize,
    ) {
        self.ready(class, bound);
        self.offsets.resize(most, 0);
        let filled = fill(&mut self.offsets);
        self.offsets.truncate(filled);
        // The magazine pops from its end, and the lowest offsets are handed out first.
        self.offsets.reverse();
    }

    /// Prepares the magazine for blocks, before they leave their present place.
    fn ready(&mut self, class: Class, bound: &CacheBound) {
        bound.note(CacheBound::small(class));
        self.unpark();
        if self.offsets.capacity() == 0 {
            // Has exactly this room, since a boxed slice has.
            self.offsets = vec![0; 2 * Self::part(class)].into_boxed_slice().into_vec();
            self.offsets.clear();
        }
    }

    /// Parks the blocks; returns `false` if they were parked before and the class was not used since.
    pub(super) fn park(&mut self) -> bool {
        let was_used = self.parked.capacity() == 0;
        if was_used {
            std::mem::swap(&mut self.parked, &mut self.offsets);
        }
        was_used
    }

    /// Puts parked blocks back.
    pub(crate) fn unpark(&mut self) {
        if self.parked.capacity() > 0 {
            self.offsets = std::mem::take(&mut self.parked);
        }
    }

    /// Returns all blocks.
    pub(super) fn offsets(&self) -> &[u64] {
        if self.offsets.is_empty() {
            &self.parked
        } else {
            &self.offsets
        }
    }

    /// Takes all blocks, and returns to the state before the first use.
    pub(super) fn take(&mut self) -> Vec<u64> {
        self.unpark();
        std::mem::take(&mut self.offsets)
    }
}

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

    /// Returns whether there may be larger blocks, or free memory in a shard.
    pub(crate) fn has_larger(&self) -> bool {
        self.has(Self::LARGER) || self.shard() > 0
    }

    /// Returns the most bytes that the cache may hold, with at most `larger` bytes of larger blocks.
    pub(crate) fn bytes(&self, larger: u64) -> u64 {
        let bits = self.0.load(Relaxed);
        let small = Class::all().filter(|class| bits & Self::small(*class) != 0);
        let small: u64 = small
            .map(|class| 2 * Magazine::part(class) as u64 * class.bytes())
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
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn a_magazine_gives_back_what_was_put_in(steps in proptest::collection::vec(any::<bool>(), 0..2000), class in 0..CLASSES) {
            let (class, bound) = (Class::from_index(class), CacheBound::default());
            let part = Magazine::part(class);
            let mut magazine = Magazine::default();
            let mut there: Vec<u64> = Vec::new();
            for (offset, push) in steps.into_iter().enumerate() {
                if push {
                    let mut full = Vec::new();
                    magazine.push(class, offset as u64, &bound, |part| full = part.to_vec());
                    prop_assert!(full.is_empty() || full.len() == part);
                    there.retain(|offset| !full.contains(offset));
                    there.push(offset as u64);
                    prop_assert!(there.len() <= 2 * part);
                } else if let Some(offset) = magazine.pop() {
                    let at = there.iter().position(|&other| other == offset);
                    there.swap_remove(at.expect("it was pushed exactly once"));
                } else {
                    prop_assert!(there.is_empty());
                }
            }
            let mut left = magazine.take();
            left.sort_unstable();
            there.sort_unstable();
            prop_assert_eq!(left, there);
        }
    }
}
