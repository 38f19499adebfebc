//! Blocks above the small ones, in bins by their size.
//!
//! A thread that has the core to itself gets blocks of exactly the requested size back, so that none wastes a
//! part, and keeps them only until a request misses: a visit to the core is cheap then. While threads share the core, a miss is expensive: a block may then be up to an eighth larger than
//! the request, and each thread caches more. Either way a block keeps its size, and returns to the core as a
//! whole.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::kept::Kept;
use crate::core::{Extent, GRANULE, RangeId, bin_of};

/// The largest blocks that are cached, in bytes: while threads share the core, and otherwise.
pub(crate) const MAX_CACHED: u64 = 4 << 20;
const MAX_ALONE: u64 = 1 << 20;
/// Requests of at least so many granules, two pages, may get a larger block. What a collection's block has
/// beyond its layout is noted in the page map at the block's second page.
pub(crate) const MIN_INEXACT: u32 = ((4 << 10) / GRANULE) as u32;

const WORDS: usize = bin_of((MAX_CACHED / GRANULE) as u32) / 64 + 1;
/// How many blocks of a bin are compared with a request: the largest bins have many sizes.
const LOOKS: usize = 4;
const NONE: u32 = u32::MAX;

/// How much a hit raises the score: caching pays if it serves one request in this many.
const HIT: u32 = 6;
const HIGH: u32 = 64;
/// While caching does not pay, one block in this many is cached anyway.
const SAMPLE: u32 = 32;

/// A block in its bin's list.
#[derive(Clone, Copy, Debug)]
struct Entry {
    extent: Extent,
    /// In granules.
    size: u32,
    next: u32,
}

/// A thread's cache of larger blocks.
#[derive(Debug)]
pub(crate) struct Medium {
    /// The first entry of each bin.
    firsts: Box<[u32; WORDS * 64]>,
    entries: Vec<Entry>,
    vacant: u32,
    granules: u64,
    /// A bit for each bin that has blocks.
    full: [u64; WORDS],
    /// The bin to evict next.
    hand: usize,
    /// Blocks on their way back to the core, and their granules.
    leaving: Vec<RangeId>,
    leaving_granules: u64,
    /// Whether several threads used the core when this one did last.
    shares: bool,
    /// Rises with each hit and falls with each miss; at 0 caching does not pay, unless threads share the core.
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
        Self {
            firsts: Box::new([NONE; WORDS * 64]),
            entries: Vec::new(),
            vacant: NONE,
            granules: 0,
            full: [0; WORDS],
            hand: 0,
            leaving: Vec::new(),
            leaving_granules: 0,
            shares: false,
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

    /// Removes and returns a block for a request of `size` granules, and the block's size.
    #[inline]
    pub(crate) fn pop(&mut self, size: u32) -> Option<(Extent, u32)> {
        let found = match self.shares {
            false => self.take(bin_of(size), size..=size),
            true => self.take_near(size),
        };
        self.score = match found {
            Some(_) => (self.score + HIT).min(HIGH),
            None => self.score.saturating_sub(1),
        };
        found
    }

    /// As [`pop`](Self::pop), while threads share the core.
    fn take_near(&mut self, size: u32) -> Option<(Extent, u32)> {
        let most = match size < MIN_INEXACT {
            true => size,
            // An eighth of the bytes requested, which take all granules but a part of the last.
            false => size.max((size - 1) + (size - 1) / 8),
        };
        let last = bin_of(most);
        let mut bin = bin_of(size);
        while bin <= last {
            let found = self.take(bin, size..=most);
            if found.is_some() {
                return found;
            }
            bin = self.next_full(bin + 1)?;
        }
        None
    }

    /// Removes and returns a block of a bin with one of these sizes, and its size.
    #[inline]
    fn take(&mut self, bin: usize, sizes: RangeInclusive<u32>) -> Option<(Extent, u32)> {
        let at = self.firsts[bin];
        let Entry { extent, size, next } = *self.entries.get(at as usize)?;
        if !sizes.contains(&size) {
            return self.take_behind(at, &sizes);
        }
        self.firsts[bin] = next;
        if next == NONE {
            self.full[bin / 64] &= !(1 << (bin % 64));
        }
        self.vacate(at);
        self.granules -= u64::from(size);
        Some((extent, size))
    }

    /// As [`take`](Self::take), from the next few entries behind `before`.
    #[cold]
    fn take_behind(
        &mut self,
        mut before: u32,
        sizes: &RangeInclusive<u32>,
    ) -> Option<(Extent, u32)> {
        for _ in 1..LOOKS {
            let at = self.entries[before as usize].next;
            let Entry { extent, size, next } = *self.entries.get(at as usize)?;
            if sizes.contains(&size) {
                self.entries[before as usize].next = next;
                self.vacate(at);
                self.granules -= u64::from(size);
                return Some((extent, size));
            }
            before = at;
        }
        None
    }

    #[inline]
    fn vacate(&mut self, entry: u32) {
        self.entries[entry as usize].next = std::mem::replace(&mut self.vacant, entry);
    }

    /// Returns whether caching blocks pays now.
    #[inline]
    pub(crate) fn pays(&self) -> bool {
        self.shares || self.score > 0
    }

    /// Notes whether threads share the core now, before the core gets a request for `size` granules. A thread that
    /// has the core to itself returns all blocks first: each would keep the free ranges on its sides apart, and the
    /// core would leave holes elsewhere instead. The smallest requests find room anyway.
    #[inline]
    pub(crate) fn note_shares(&mut self, shares: bool, size: u32) {
        if !shares && (self.shares || size > MIN_INEXACT) {
            self.shrink(0);
        }
        self.shares = shares;
    }

    /// Returns the most granules to cache, and the largest block's, for a thread that may cache `alone` granules
    /// and, while threads share the core, `shared`.
    #[inline]
    pub(crate) fn limits(&self, alone: u64, shared: u64) -> (u64, u64) {
        match self.shares {
            false => (alone, alone.min(MAX_ALONE / GRANULE)),
            true => {
                let most = alone.max(shared);
                (most, most.min(MAX_CACHED / GRANULE))
            }
        }
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

    /// Returns whether the cache has more than `budget` granules after a block of `size`; if so, the caller
    /// returns the [leaving](Self::leaving) blocks to the core now.
    #[inline]
    pub(crate) fn is_over(&mut self, size: u32, budget: u64) -> bool {
        let over = |this: &Self| this.granules + this.leaving_granules > budget;
        let most = if self.shares {
            // The rest of the budget is for blocks that leave when the thread allocates from the core next. A
            // large block may take all of it.
            (budget - budget / 4).max(size.into())
        } else if !over(self) {
            return false;
        } else {
            // Half of the blocks, so that evictions are rare and large; a sample stays.
            if self.pays() { budget / 2 } else { budget }
        };
        if self.granules > most {
            self.shrink(most);
        }
        over(self) || !self.shares
    }

    /// Caches a block of `size` granules, at most [`MAX_CACHED`] in bytes.
    #[inline]
    pub(crate) fn push(&mut self, size: u32, extent: Extent) {
        if !self.noted {
            self.note();
        }
        let bin = bin_of(size);
        let next = self.firsts[bin];
        let entry = Entry { extent, size, next };
        let at = match self.entries.get_mut(self.vacant as usize) {
            Some(vacant) => {
                let next = vacant.next;
                *vacant = entry;
                std::mem::replace(&mut self.vacant, next)
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.firsts[bin] = at;
        self.full[bin / 64] |= 1 << (bin % 64);
        self.granules += u64::from(size);
    }

    /// Calls `name` with the offset and bytes of each cached block.
    pub(super) fn each(&self, mut name: impl FnMut(u64, u64)) {
        for &first in self.firsts.iter() {
            let mut at = first;
            while let Some(entry) = self.entries.get(at as usize) {
                name(entry.extent.offset, u64::from(entry.size) * GRANULE);
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

    /// Evicts blocks of each bin in turn until `most` granules remain.
    #[cold]
    fn shrink(&mut self, most: u64) {
        while self.granules > most {
            let Some(next) = self.next_full(self.hand).or_else(|| self.next_full(0)) else {
                break;
            };
            self.hand = next + 1;
            self.evict(next, most);
        }
    }

    /// Returns the first bin with blocks from `bin` on.
    #[inline]
    fn next_full(&self, bin: usize) -> Option<usize> {
        let mut word = bin / 64;
        let mut bits = self.full.get(word)? & (u64::MAX << (bin % 64));
        while bits == 0 {
            word += 1;
            bits = *self.full.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// Evicts blocks of a bin until `most` granules remain.
    fn evict(&mut self, bin: usize, most: u64) {
        while self.granules > most
            && let Some((extent, size)) = self.take(bin, 0..=u32::MAX)
        {
            self.leaving.push(extent.node);
            self.leaving_granules += u64::from(size);
        }
    }

    /// Takes all blocks.
    pub(super) fn take_all(&mut self) -> Vec<RangeId> {
        self.shrink(0);
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
        if !self.shares {
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
        (self.granules + self.leaving_granules) * GRANULE
    }

    /// Returns whether there are no blocks.
    pub(crate) fn is_empty(&self) -> bool {
        self.granules + self.leaving_granules == 0
    }
}

#[cfg(test)]
mod tests;
