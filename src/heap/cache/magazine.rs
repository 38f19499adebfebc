//! A thread's small blocks of a class, in magazines, and a summary of a thread's cache that other threads read without
//! stopping the thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::classes::{CLASSES, Class};

/// The most offsets in a magazine.
pub(crate) const CAPACITY: usize = 64;

/// Bytes in a full magazine of a larger class: 16 blocks of 2 KiB.
const MAGAZINE_BYTES: u64 = 32 << 10;

/// The results of [`Magazine::capacity`]: every free needs one, and a division is slow.
const CAPACITIES: [u8; CLASSES] = {
    let mut capacity = [CAPACITY as u8; CLASSES];
    let mut index = 0;
    while index < CLASSES {
        let fit = MAGAZINE_BYTES / Class::from_index(index).bytes();
        if fit < CAPACITY as u64 {
            capacity[index] = fit as u8;
        }
        index += 1;
    }
    capacity
};

/// Small blocks of one class, which move between a thread and the slabs together (Bonwick and Adams, "Magazines and
/// Vmem", 2001).
pub(crate) struct Magazine {
    pub(super) len: usize,
    pub(super) offsets: [u64; CAPACITY],
}

impl Magazine {
    pub(crate) fn empty() -> Box<Self> {
        Box::new(Self {
            len: 0,
            offsets: [0; CAPACITY],
        })
    }

    /// Returns how many blocks of `class` fill a magazine.
    #[inline]
    pub(crate) const fn capacity(class: Class) -> usize {
        CAPACITIES[class.index()] as usize
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u64> {
        self.len = self.len.checked_sub(1)?;
        Some(self.offsets[self.len])
    }

    pub(crate) fn offsets(&self) -> &[u64] {
        &self.offsets[..self.len]
    }

    /// Lets `fill` write up to `capacity` offsets; it returns how many it wrote.
    pub(crate) fn fill(&mut self, capacity: usize, fill: impl FnOnce(&mut [u64]) -> usize) {
        self.len = fill(&mut self.offsets[..capacity]);
        // The magazine pops from its end, and the lowest offsets are handed out first.
        self.offsets[..self.len].reverse();
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
        // Two magazines of each class.
        let small: u64 = small
            .map(|class| 2 * Magazine::capacity(class) as u64 * class.bytes())
            .sum();
        let larger = match bits & Self::LARGER {
            0 => 0,
            _ => larger,
        };
        small + larger + self.shard()
    }
}

/// The small blocks of one class, in two magazines: a thread that allocates and frees around the boundary
/// of one exchanges none.
#[derive(Default)]
pub(crate) struct Shelf {
    /// Blocks are popped from and pushed to this one.
    loaded: Option<Box<Magazine>>,
    /// Full or empty, if present.
    spare: Option<Box<Magazine>>,
    /// The loaded one until the class's next allocation or free, which loads it again.
    parked: Option<Box<Magazine>>,
}

impl Shelf {
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u64> {
        match self.loaded.as_mut()?.pop() {
            Some(offset) => Some(offset),
            None => {
                std::mem::swap(&mut self.loaded, &mut self.spare);
                self.loaded.as_mut()?.pop()
            }
        }
    }

    /// Parks the loaded magazine; returns `false` if one was parked before and the class was not used since.
    pub(super) fn park(&mut self) -> bool {
        let was_used = self.parked.is_none();
        if was_used {
            self.parked = self.loaded.take();
        }
        was_used
    }

    /// Loads the parked magazine again, if there is one.
    pub(crate) fn unpark(&mut self) {
        if let Some(parked) = self.parked.take() {
            self.loaded = Some(parked);
        }
    }

    /// Pushes a block of `class`. If both magazines are full, calls `empty` with the older one, which is empty afterwards.
    #[inline]
    pub(crate) fn push(
        &mut self,
        class: Class,
        offset: u64,
        bound: &CacheBound,
        empty: impl FnOnce(&Magazine),
    ) {
        let capacity = Magazine::capacity(class);
        if let Some(loaded) = &mut self.loaded
            && loaded.len < capacity
        {
            loaded.offsets[loaded.len] = offset;
            loaded.len += 1;
        } else {
            self.push_slowly(class, offset, bound, empty);
        }
    }

    #[cold]
    fn push_slowly(
        &mut self,
        class: Class,
        offset: u64,
        bound: &CacheBound,
        empty: impl FnOnce(&Magazine),
    ) {
        self.unpark();
        bound.note(CacheBound::small(class));
        if let Some(loaded) = &self.loaded
            && loaded.len == Magazine::capacity(class)
        {
            std::mem::swap(&mut self.loaded, &mut self.spare);
        }
        let loaded = self.loaded.get_or_insert_with(Magazine::empty);
        if loaded.len == Magazine::capacity(class) {
            empty(loaded);
            loaded.len = 0;
        }
        loaded.offsets[loaded.len] = offset;
        loaded.len += 1;
    }

    /// Returns the magazine to fill when no blocks are left.
    pub(crate) fn to_fill(&mut self) -> &mut Magazine {
        self.unpark();
        self.loaded.get_or_insert_with(Magazine::empty)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Magazine> {
        let all = [&self.loaded, &self.spare, &self.parked];
        all.into_iter().flatten().map(|full| &**full)
    }

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Box<Magazine>> {
        let all = [self.loaded.take(), self.spare.take(), self.parked.take()];
        all.into_iter().flatten().filter(|full| full.len > 0)
    }

    pub(super) fn blocks(&self) -> usize {
        self.all().map(|full| full.len).sum()
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
        fn a_shelf_gives_back_what_was_put_in(steps in proptest::collection::vec(any::<bool>(), 0..2000), class in 0..CLASSES) {
            let (class, bound) = (Class::from_index(class), CacheBound::default());
            let capacity = Magazine::capacity(class);
            let mut shelf = Shelf::default();
            let mut there: Vec<u64> = Vec::new();
            for (offset, push) in steps.into_iter().enumerate() {
                if push {
                    let mut full = Vec::new();
                    shelf.push(class, offset as u64, &bound, |magazine| full = magazine.offsets().to_vec());
                    prop_assert!(full.is_empty() || full.len() == capacity);
                    there.retain(|offset| !full.contains(offset));
                    there.push(offset as u64);
                    prop_assert!(there.len() <= 2 * capacity);
                } else if let Some(offset) = shelf.pop() {
                    let at = there.iter().position(|&other| other == offset);
                    there.swap_remove(at.expect("it was pushed exactly once"));
                } else {
                    prop_assert!(there.is_empty());
                }
            }
            let mut left: Vec<u64> = shelf.take_all().flat_map(|full| full.offsets().to_vec()).collect();
            left.sort_unstable();
            there.sort_unstable();
            prop_assert_eq!(left, there);
        }
    }
}
