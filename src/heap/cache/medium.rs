//! Blocks above the small ones, cached by exact size, so that no size class wastes part of them.

use std::sync::Arc;

use super::kept::Kept;
use crate::core::{Extent, RangeId};

/// The most sizes that a cache can have blocks of at once.
const SLOTS: usize = 512;
const NONE: u32 = u32::MAX;

/// How much a hit raises the score: caching pays if it serves one request in this many.
const HIT: u32 = 6;
const HIGH: u32 = 64;
/// While caching does not pay, one block in this many is cached anyway.
const SAMPLE: u32 = 32;

/// Blocks of one size.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// In granules; 0: unused.
    size: u32,
    first: u32,
}

/// A block in its slot's list.
#[derive(Clone, Copy, Debug)]
struct Entry {
    extent: Extent,
    next: u32,
}

/// A thread's cache of larger blocks.
#[derive(Debug)]
pub(crate) struct Medium {
    slots: Box<[Slot; SLOTS]>,
    entries: Vec<Entry>,
    vacant: u32,
    granules: u64,
    /// A bit for each slot that has blocks.
    full: [u64; SLOTS / 64],
    /// The slot to evict next.
    hand: usize,
    /// Blocks on their way back to the core, and their granules.
    leaving: Vec<RangeId>,
    leaving_granules: u64,
    /// Rises with each hit and falls with each miss; at 0 caching does not pay.
    score: u32,
    /// Blocks not cached since the last sample, which tests whether caching pays again.
    skipped: u32,
    /// The size that was missed last, and how often in a row.
    missed: (u32, u32),
    kept: Arc<Kept>,
    /// Whether `kept` already says that there may be blocks; saves writing to it.
    noted: bool,
}

impl Medium {
    pub(super) fn new(kept: Arc<Kept>) -> Self {
        let empty = Slot {
            size: 0,
            first: NONE,
        };
        Self {
            slots: Box::new([empty; SLOTS]),
            entries: Vec::new(),
            vacant: NONE,
            granules: 0,
            full: [0; SLOTS / 64],
            hand: 0,
            leaving: Vec::new(),
            leaving_granules: 0,
            score: HIGH,
            skipped: 0,
            missed: (0, 0),
            kept,
            noted: false,
        }
    }

    #[cold]
    fn note(&mut self) {
        self.kept.note_larger();
        self.noted = true;
    }

    /// Clears the bit in `kept` if there are no blocks.
    pub(super) fn forget_if_empty(&mut self) {
        if self.is_empty() {
            self.kept.forget_larger();
            self.noted = false;
        }
    }

    #[inline]
    fn slot(size: u32) -> usize {
        // Fibonacci hashing: powers of two do not collide.
        (size.wrapping_mul(0x9E37_79B9) >> (32 - SLOTS.ilog2())) as usize
    }

    /// Removes and returns a block of exactly `size` granules.
    #[inline]
    pub(crate) fn pop(&mut self, size: u32) -> Option<Extent> {
        let index = Self::slot(size);
        let slot = &mut self.slots[index];
        if slot.size != size || slot.first == NONE {
            self.score = self.score.saturating_sub(1);
            return None;
        }
        self.score = (self.score + HIT).min(HIGH);
        let at = slot.first;
        let entry = &mut self.entries[at as usize];
        slot.first = entry.next;
        if slot.first == NONE {
            self.full[index / 64] &= !(1 << (index % 64));
        }
        entry.next = self.vacant;
        let extent = entry.extent;
        self.vacant = at;
        self.granules -= u64::from(size);
        Some(extent)
    }

    /// Returns whether caching blocks pays now.
    #[inline]
    pub(crate) fn pays(&self) -> bool {
        self.score > 0
    }

    /// Returns whether to cache the next block: always if caching pays, otherwise one in [`SAMPLE`].
    #[inline]
    pub(crate) fn keeps(&mut self) -> bool {
        if self.pays() {
            return true;
        }
        self.skipped += 1;
        self.skipped > SAMPLE
    }

    /// Adds a block of `size` granules, to [keep](Self::keeps) it.
    #[inline]
    pub(crate) fn put(&mut self, size: u32, extent: Extent) {
        if !self.pays() {
            self.skipped = 0;
            self.shrink(0);
        }
        self.push(size, extent);
    }

    /// Returns whether the cache has more than `budget` granules; if so, the caller returns the
    /// [leaving](Self::leaving) blocks to the core now.
    #[inline]
    pub(crate) fn is_over(&mut self, budget: u64) -> bool {
        if self.granules + self.leaving_granules <= budget {
            return false;
        }
        // Half of the blocks, so that evictions are rare and large; a sample stays.
        let most = if self.pays() { budget / 2 } else { budget };
        if self.granules > most {
            self.shrink(most);
        }
        true
    }

    /// Caches a block of `size` granules.
    #[inline]
    pub(crate) fn push(&mut self, size: u32, extent: Extent) {
        if !self.noted {
            self.note();
        }
        let index = Self::slot(size);
        if self.slots[index].size != size {
            self.evict(index);
            self.slots[index].size = size;
        }
        self.full[index / 64] |= 1 << (index % 64);
        let entry = Entry {
            extent,
            next: self.slots[index].first,
        };
        let at = match self.entries.get_mut(self.vacant as usize) {
            Some(vacant) => {
                let at = self.vacant;
                self.vacant = vacant.next;
                *vacant = entry;
                at
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.slots[index].first = at;
        self.granules += u64::from(size);
    }

    /// Calls `name` with the offset and bytes of each cached block.
    pub(super) fn each(&self, name: &mut impl FnMut(u64, u64)) {
        for slot in self.slots.iter() {
            let mut at = slot.first;
            while let Some(entry) = self.entries.get(at as usize) {
                let bytes = u64::from(slot.size) * crate::core::GRANULE;
                name(entry.extent.offset, bytes);
                at = entry.next;
            }
        }
    }

    /// Adds a block of `size` granules to those leaving, instead of caching it.
    #[inline]
    pub(crate) fn pass_on(&mut self, size: u32, node: RangeId) {
        if !self.noted {
            self.note();
        }
        self.leaving.push(node);
        self.leaving_granules += u64::from(size);
    }

    /// Returns the blocks that have to return to the core.
    #[inline]
    pub(crate) fn leaving(&self) -> &[RangeId] {
        &self.leaving
    }

    /// Notes that the core has them. Keeps the vector's capacity.
    #[inline]
    pub(crate) fn left(&mut self) {
        self.leaving.clear();
        self.leaving_granules = 0;
    }

    /// Takes the blocks that have to return to the core.
    pub(crate) fn take_leaving(&mut self) -> Vec<RangeId> {
        self.leaving_granules = 0;
        std::mem::take(&mut self.leaving)
    }

    /// Evicts whole slots in turn until `most` granules remain.
    #[cold]
    fn shrink(&mut self, most: u64) {
        while self.granules > most {
            let Some(next) = self.next_full() else {
                break;
            };
            self.hand = (next + 1) % SLOTS;
            self.evict(next);
        }
    }

    /// Returns the first slot with blocks from the hand on, wrapping around.
    fn next_full(&self) -> Option<usize> {
        let words = self.full.len();
        let (word, bit) = (self.hand / 64, self.hand % 64);
        let first = self.full[word] & (u64::MAX << bit);
        let rest = (1..=words).map(|step| (word + step) % words);
        std::iter::once((word, first))
            .chain(rest.map(|word| (word, self.full[word])))
            .find(|&(_, bits)| bits != 0)
            .map(|(word, bits)| word * 64 + bits.trailing_zeros() as usize)
    }

    fn evict(&mut self, index: usize) {
        let Slot { size, first } = self.slots[index];
        let mut at = first;
        while let Some(entry) = self.entries.get_mut(at as usize) {
            self.leaving.push(entry.extent.node);
            let next = std::mem::replace(&mut entry.next, self.vacant);
            self.vacant = at;
            self.granules -= u64::from(size);
            self.leaving_granules += u64::from(size);
            at = next;
        }
        self.slots[index].first = NONE;
        self.full[index / 64] &= !(1 << (index % 64));
    }

    /// Takes all blocks.
    pub(super) fn take_all(&mut self) -> Vec<RangeId> {
        while let Some(next) = self.next_full() {
            self.evict(next);
        }
        self.missed = (0, 0);
        // The caller clears the note once the core has the blocks.
        self.noted = false;
        self.take_leaving()
    }

    /// Returns how many blocks of `size` granules to fetch besides the one that was missed, to
    /// [push](Self::push) them. Blocks that [leave](Self::leaving) to make room for them return to the core
    /// first.
    #[inline]
    pub(crate) fn more(&mut self, size: u32, budget: u64) -> u32 {
        if !self.pays() {
            return 0;
        }
        let more = self.wanted(size, budget) - 1;
        // A thread that only allocates checks its budget nowhere else.
        if self.granules + u64::from(more) * u64::from(size) > budget {
            // The fetched blocks are at most a fourth of the budget.
            self.shrink(budget / 2);
        }
        more
    }

    /// Returns how many blocks to fetch after a miss: one, and more each time the same size is missed again
    /// with no other in between.
    #[inline]
    fn wanted(&mut self, size: u32, budget: u64) -> u32 {
        const MOST: u32 = 16;
        if self.missed.0 != size {
            self.missed = (size, 1);
            return 1;
        }
        self.missed.1 = (self.missed.1 * 2).min(MOST);
        let room = budget / 4 / u64::from(size.max(1));
        u64::from(self.missed.1).min(room).max(1) as u32
    }

    /// Returns the bytes of all blocks.
    pub(super) fn bytes(&self) -> u64 {
        (self.granules + self.leaving_granules) * crate::core::GRANULE
    }

    /// Returns whether there are no blocks.
    pub(crate) fn is_empty(&self) -> bool {
        self.granules + self.leaving_granules == 0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_gives_out_what_it_keeps_by_exact_size_and_loses_nothing(
            steps in proptest::collection::vec((0..3, 8_u32..600), 0..3000),
            budget in 0_u64..20_000,
        ) {
            let mut medium = Medium::new(Arc::default());
            let mut kept: HashMap<RangeId, u32> = HashMap::new();
            let mut numbers = 0..;
            let mut new = || {
                let number = numbers.next().unwrap();
                let node = RangeId::from_number(number);
                Extent { offset: number.into(), node }
            };
            for (step, size) in steps {
                let fits = u64::from(size) <= budget;
                if step == 0 && fits {
                    let extent = new();
                    let node = extent.node;
                    match medium.keeps() {
                        true => medium.put(size, extent),
                        false => medium.pass_on(size, node),
                    }
                    kept.insert(node, size);
                    if medium.is_over(budget) {
                        for left in medium.take_leaving() {
                            prop_assert!(kept.remove(&left).is_some());
                        }
                    }
                } else {
                    // Once, or as a thread that needs many of a size.
                    for _ in 0..if step == 1 { 1 } else { 12 } {
                        if let Some(extent) = medium.pop(size) {
                            prop_assert_eq!(kept.remove(&extent.node), Some(size));
                            prop_assert_eq!(extent.offset, u64::from(extent.node.number()));
                            continue;
                        }
                        let more = medium.more(size, budget);
                        for left in medium.take_leaving() {
                            prop_assert!(kept.remove(&left).is_some());
                        }
                        for _ in 0..more {
                            let extent = new();
                            kept.insert(extent.node, size);
                            medium.push(size, extent);
                        }
                    }
                }
                prop_assert!(medium.granules + medium.leaving_granules <= budget);
                let granules: u64 = kept.values().map(|&size| u64::from(size)).sum();
                prop_assert_eq!(medium.granules + medium.leaving_granules, granules);
            }
            let mut left: Vec<u32> = medium.take_all().iter().map(|node| node.number()).collect();
            let mut expected: Vec<u32> = kept.keys().map(|node| node.number()).collect();
            left.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(left, expected);
            prop_assert!(medium.is_empty());
        }
    }

    #[test]
    fn more_is_fetched_of_what_is_missed_again_and_again() {
        let mut medium = Medium::new(Arc::default());
        let ample = 1 << 20;
        let wanted: Vec<u32> = (0..6).map(|_| medium.wanted(16, ample)).collect();
        assert_eq!(wanted, [1, 2, 4, 8, 16, 16]);
        assert_eq!(medium.wanted(17, ample), 1);
        assert_eq!(medium.wanted(17, 8 * 17), 2);
        assert_eq!(
            medium.wanted(17, 8 * 17),
            2,
            "no more than a fourth of the budget"
        );
        assert_eq!(medium.wanted(17, 0), 1);
    }
}
