//! Blocks above the small ones, in bins by their size, and such blocks on their way to where they belong.
//!
//! A thread gets blocks of exactly the requested size back, so that none wastes a part, and while it has the core to
//! itself keeps them only until a request misses: a visit to the core is cheap then. While threads share the core,
//! each caches more.

use std::sync::Arc;

use super::magazine::CacheBound;
use super::shards::{Outgoing, Shards};
use crate::classes::GRANULE;
use crate::piece::Extent;
use crate::ranges::{Occupied, bin_of};

/// The largest blocks that are cached, in bytes: while threads share the core, and otherwise.
pub(crate) const MAX_CACHED: u64 = 4 << 20;
const MAX_ALONE: u64 = 1 << 20;
const BINS: usize = bin_of((MAX_CACHED / GRANULE) as u32) + 1;
/// How many blocks of a bin are compared with a request: the largest bins have many sizes.
const LOOKS: usize = 4;
const NONE: u32 = u32::MAX;
/// The largest requests, in bytes, that find room in the core however much a lone thread caches.
const ALWAYS_FIT: u64 = 4 << 10;

/// How much a hit raises the score: caching pays if it serves one request in this many.
const HIT: u32 = 6;
/// How much more a miss lowers it that cost little.
const CHEAP_MISS: u32 = 5;
const HIGH: u32 = 64;
/// While caching does not pay, one block in this many is cached anyway.
const SAMPLE: u32 = 32;

/// A block in its bin's list.
#[derive(Clone, Copy)]
struct Entry {
    extent: Extent,
    next: u32,
}

/// A thread's cache of larger blocks.
pub(crate) struct Medium {
    /// The first entry of each bin.
    firsts: Box<[u32; BINS]>,
    entries: Vec<Entry>,
    vacant: u32,
    granules: u64,
    /// The bins that have blocks, or had since the last eviction.
    occupied: Occupied,
    /// The bin to evict next.
    hand: usize,
    /// Blocks on their way back to the core, and their granules.
    leaving: Vec<Extent>,
    leaving_granules: u64,
    outgoing: Outgoing,
    /// Whether several threads used the core when this one did last.
    shares: bool,
    /// Rises with each hit and falls with each miss; at 0 caching does not pay.
    score: u32,
    /// Blocks not cached since the last sample, which tests whether caching pays again.
    skipped: u32,
    bound: Arc<CacheBound>,
    /// Whether `bound` already says that there may be blocks; saves writing to it.
    noted: bool,
}

impl Medium {
    pub(super) fn new(bound: Arc<CacheBound>) -> Self {
        Self {
            firsts: Box::new([NONE; BINS]),
            entries: Vec::new(),
            vacant: NONE,
            granules: 0,
            occupied: Occupied::new(),
            hand: 0,
            leaving: Vec::new(),
            leaving_granules: 0,
            outgoing: Outgoing::default(),
            shares: false,
            score: HIGH,
            skipped: 0,
            bound,
            noted: false,
        }
    }

    #[cold]
    fn note(&mut self) {
        self.bound.note(CacheBound::LARGER);
        self.noted = true;
    }

    /// Clears the bit in `bound` if there are no blocks.
    pub(super) fn forget_if_empty(&mut self) {
        if self.is_empty() {
            self.bound.forget(CacheBound::LARGER);
            self.noted = false;
        }
    }

    /// Removes and returns a block of `size` granules.
    #[inline]
    pub(crate) fn pop(&mut self, size: u32) -> Option<Extent> {
        let found = self.take(bin_of(size), size);
        self.score = match found {
            Some(_) => (self.score + HIT).min(HIGH),
            None => self.score.saturating_sub(1),
        };
        found
    }

    /// Removes and returns a block of a bin with this size, if it is one of the first few.
    #[inline]
    fn take(&mut self, bin: usize, size: u32) -> Option<Extent> {
        let (mut before, mut at) = (NONE, self.firsts[bin]);
        for _ in 0..LOOKS {
            let Entry { extent, next } = *self.entries.get(at as usize)?;
            if extent.granules() == size {
                match self.entries.get_mut(before as usize) {
                    Some(before) => before.next = next,
                    None => self.firsts[bin] = next,
                }
                self.entries[at as usize].next = std::mem::replace(&mut self.vacant, at);
                self.granules -= u64::from(size);
                return Some(extent);
            }
            (before, at) = (at, next);
        }
        None
    }

    /// Notes that a miss cost little, because the thread's shard had a block: caching pays only if it serves
    /// more requests than otherwise.
    #[inline]
    pub(crate) fn missed_at_low_cost(&mut self) {
        self.score = self.score.saturating_sub(CHEAP_MISS);
    }

    /// Returns whether caching blocks pays now.
    #[inline]
    fn pays(&self) -> bool {
        self.score > 0
    }

    /// Returns whether threads shared the core when this one used it last.
    #[inline]
    pub(crate) fn shares(&self) -> bool {
        self.shares
    }

    /// Notes whether threads share the core now. When this is the only thread again, it returns all blocks.
    pub(crate) fn note_shares(&mut self, shares: bool) {
        if !shares {
            self.shrink(0);
        }
        self.shares = shares;
    }

    /// Returns all blocks before the core gets a request for `bytes` from the only thread that uses it: each would
    /// keep the free ranges on its sides apart, and the core would leave holes elsewhere instead. The smallest
    /// requests find room anyway.
    #[inline]
    pub(crate) fn make_way(&mut self, bytes: u64) {
        if bytes > ALWAYS_FIT && self.granules > 0 {
            self.shrink(0);
        }
    }

    /// Returns the most granules to cache, and the largest block's, for a thread that may cache `alone` granules
    /// and, while threads share the core, `shared`.
    #[inline]
    pub(crate) fn limits(&self, alone: u64, shared: u64) -> (u64, u64) {
        if self.shares {
            (shared, shared.min(MAX_CACHED / GRANULE))
        } else {
            (alone, alone.min(MAX_ALONE / GRANULE))
        }
    }

    /// Caches a block, at most [`MAX_CACHED`] in bytes: always if caching pays, otherwise one in [`SAMPLE`]. Returns whether
    /// it did.
    #[inline]
    pub(crate) fn keep(&mut self, extent: Extent) -> bool {
        if !self.pays() {
            self.skipped += 1;
            if self.skipped <= SAMPLE {
                return false;
            }
            self.skipped = 0;
            self.shrink(0);
        }
        self.push(extent);
        true
    }

    /// Returns whether the cache has more than `budget` granules; if so, the caller returns the
    /// [leaving](Self::leaving) blocks now.
    #[inline]
    pub(crate) fn is_over(&mut self, budget: u64) -> bool {
        if self.granules + self.leaving_granules <= budget {
            return false;
        }
        // So much less that evictions are rare and large; a sample stays.
        self.shrink(match (self.pays(), self.shares) {
            (false, _) => budget,
            (true, false) => budget / 2,
            (true, true) => budget - budget / 4,
        });
        true
    }

    #[inline]
    fn push(&mut self, extent: Extent) {
        if !self.noted {
            self.note();
        }
        let bin = bin_of(extent.granules());
        let next = self.firsts[bin];
        let entry = Entry { extent, next };
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
        self.occupied.set(bin);
        self.granules += u64::from(extent.granules());
    }

    /// Calls `name` with the offset and bytes of each block that does not [leave](Self::leaving) to the core.
    pub(super) fn each(&self, mut name: impl FnMut(u64, u64)) {
        let mut name =
            |extent: &Extent| name(extent.offset, u64::from(extent.granules()) * GRANULE);
        self.outgoing.blocks().for_each(&mut name);
        for &first in self.firsts.iter() {
            let mut at = first;
            while let Some(entry) = self.entries.get(at as usize) {
                name(&entry.extent);
                at = entry.next;
            }
        }
    }

    /// Adds a block to those leaving, instead of caching it.
    #[inline]
    pub(crate) fn pass_on(&mut self, extent: Extent) {
        if !self.noted {
            self.note();
        }
        self.leaving.push(extent);
        self.leaving_granules += u64::from(extent.granules());
    }

    /// Sends a block to another thread's shard, with others. At most `most` granules wait to be sent.
    pub(crate) fn send_out(&mut self, shard: u8, extent: Extent, most: u64, shards: &Shards) {
        if !self.noted {
            self.note();
        }
        self.outgoing.add(shard, extent, most, shards);
    }

    /// Returns the blocks that have to return to the core.
    #[inline]
    pub(crate) fn leaving(&self) -> &[Extent] {
        &self.leaving
    }

    /// Notes that the core has them. Keeps the vector's capacity.
    #[inline]
    pub(crate) fn left(&mut self) {
        self.leaving.clear();
        self.leaving_granules = 0;
    }

    /// Uses an empty vector again, for its room, if no blocks leave.
    pub(crate) fn keep_room(&mut self, empty: Vec<Extent>) {
        if self.leaving.is_empty() {
            self.leaving = empty;
        }
    }

    /// Takes the blocks that have to return to the core.
    pub(crate) fn take_leaving(&mut self) -> Vec<Extent> {
        self.leaving_granules = 0;
        std::mem::take(&mut self.leaving)
    }

    /// Evicts blocks of each bin in turn until `most` granules remain.
    #[cold]
    fn shrink(&mut self, most: u64) {
        while self.granules > most {
            let next = self.occupied.next(self.hand);
            let Some(bin) = next.or_else(|| self.occupied.next(0)) else {
                break;
            };
            self.hand = bin + 1;
            while self.granules > most
                && let Some(first) = self.entries.get(self.firsts[bin] as usize)
                && let Some(extent) = self.take(bin, first.extent.granules())
            {
                self.pass_on(extent);
            }
            self.occupied.reset_if(bin, self.firsts[bin] == NONE);
        }
    }

    /// Takes all blocks.
    pub(crate) fn take_all(&mut self) -> Vec<Extent> {
        self.shrink(0);
        // The caller clears the note once the core has the blocks.
        self.noted = false;
        let mut all = self.take_leaving();
        all.extend(self.outgoing.take_all());
        all
    }

    /// Returns the bytes of all blocks.
    pub(super) fn bytes(&self) -> u64 {
        (self.granules + self.leaving_granules) * GRANULE + self.outgoing.bytes()
    }

    /// Returns whether there are no blocks.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes() == 0
    }
}

#[cfg(test)]
mod tests;
