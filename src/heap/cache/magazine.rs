//! A thread's small blocks of a class, and a summary of a thread's cache that other threads read without
//! stopping the thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::classes::{CLASSES, Class};

/// The most blocks that go to their slabs at once.
const PART: usize = 64;

/// Their bytes for a larger class: 16 blocks of 2 KiB.
const PART_BYTES: u64 = 32 << 10;

/// The results of [`Magazine::part`]: every free needs one, and a division is slow.
const PARTS: [u8; CLASSES] = {
    let mut parts = [PART as u8; CLASSES];
    let mut index = 0;
    while index < CLASSES {
        let fit = PART_BYTES / Class::from_index(index).bytes();
        if fit < PART as u64 {
            parts[index] = fit as u8;
        }
        index += 1;
    }
    parts
};

/// A stack of small blocks of one class. A full one gives the older half of its blocks to their slabs: a thread that
/// allocates and frees around that boundary exchanges none. (Bonwick and Adams, "Magazines and Vmem", 2001, have two
/// magazines for that.)
pub(crate) struct Magazine {
    len: usize,
    offsets: [u64; 2 * PART],
}

impl Magazine {
    fn empty() -> Box<Self> {
        Box::new(Self {
            len: 0,
            offsets: [0; 2 * PART],
        })
    }

    /// Returns how many blocks of `class` are half of a magazine.
    #[inline]
    pub(crate) const fn part(class: Class) -> usize {
        PARTS[class.index()] as usize
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u64> {
        self.len = self.len.checked_sub(1)?;
        Some(self.offsets[self.len])
    }

    #[inline]
    fn push(&mut self, offset: u64) {
        self.offsets[self.len] = offset;
        self.len += 1;
    }

    pub(crate) fn offsets(&self) -> &[u64] {
        &self.offsets[..self.len]
    }

    /// Lets `fill` write up to `most` offsets to an empty magazine; it returns how many it wrote.
    pub(crate) fn fill(&mut self, most: usize, fill: impl FnOnce(&mut [u64]) -> usize) {
        self.len = fill(&mut self.offsets[..most]);
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

/// The place of a class's magazine. At most one of the two has it.
#[derive(Default)]
pub(crate) struct Shelf {
    magazine: Option<Box<Magazine>>,
    /// In its place until the class's next allocation or free, which puts it back.
    parked: Option<Box<Magazine>>,
}

impl Shelf {
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u64> {
        self.magazine.as_mut()?.pop()
    }

    /// Parks the magazine; returns `false` if it was parked before and the class was not used since.
    pub(super) fn park(&mut self) -> bool {
        let was_used = self.parked.is_none();
        if was_used {
            self.parked = self.magazine.take();
        }
        was_used
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
        if let Some(magazine) = &mut self.magazine
            && magazine.len < 2 * Magazine::part(class)
        {
            magazine.push(offset);
        } else {
            self.push_slowly(class, offset, bound, give);
        }
    }

    #[cold]
    fn push_slowly(
        &mut self,
        class: Class,
        offset: u64,
        bound: &CacheBound,
        give: impl FnOnce(&[u64]),
    ) {
        bound.note(CacheBound::small(class));
        let (magazine, part) = (self.unparked(), Magazine::part(class));
        if magazine.len == 2 * part {
            give(&magazine.offsets[..part]);
            magazine.offsets.copy_within(part..2 * part, 0);
            magazine.len = part;
        }
        magazine.push(offset);
    }

    /// Puts a parked magazine back.
    pub(crate) fn unpark(&mut self) {
        self.magazine = self.magazine.take().or(self.parked.take());
    }

    /// Returns the magazine, not parked any more. The bound has the class's bit: pushes to a magazine do not set it.
    pub(crate) fn unparked(&mut self) -> &mut Magazine {
        self.unpark();
        self.magazine.get_or_insert_with(Magazine::empty)
    }

    /// Returns all blocks.
    pub(super) fn offsets(&self) -> &[u64] {
        let magazine = self.magazine.as_ref().or(self.parked.as_ref());
        magazine.map_or(&[], |magazine| magazine.offsets())
    }

    /// Takes the magazine, if it has blocks.
    pub(super) fn take(&mut self) -> Option<Box<Magazine>> {
        let magazine = self.magazine.take().or(self.parked.take());
        magazine.filter(|magazine| magazine.len > 0)
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
            let part = Magazine::part(class);
            let mut shelf = Shelf::default();
            let mut there: Vec<u64> = Vec::new();
            for (offset, push) in steps.into_iter().enumerate() {
                if push {
                    let mut full = Vec::new();
                    shelf.push(class, offset as u64, &bound, |part| full = part.to_vec());
                    prop_assert!(full.is_empty() || full.len() == part);
                    there.retain(|offset| !full.contains(offset));
                    there.push(offset as u64);
                    prop_assert!(there.len() <= 2 * part);
                } else if let Some(offset) = shelf.pop() {
                    let at = there.iter().position(|&other| other == offset);
                    there.swap_remove(at.expect("it was pushed exactly once"));
                } else {
                    prop_assert!(there.is_empty());
                }
            }
            let mut left: Vec<u64> = shelf.take().map_or(Vec::new(), |full| full.offsets().to_vec());
            left.sort_unstable();
            there.sort_unstable();
            prop_assert_eq!(left, there);
        }
    }
}
