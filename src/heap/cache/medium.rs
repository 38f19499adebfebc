//! Blocks above the small ones, kept by exact size: no size class wastes part of them.

use crate::heap::core::{Extent, NodeId};

/// Sizes that a cache can have blocks of at once.
const SLOTS: usize = 512;
const NONE: u32 = u32::MAX;

/// Blocks of one size.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// In granules; 0: none yet.
    size: u32,
    first: u32,
}

/// A block, in a list of its slot's.
#[derive(Clone, Copy, Debug)]
struct Entry {
    extent: Extent,
    next: u32,
}

/// A cache's larger blocks.
#[derive(Debug)]
pub(in crate::heap) struct Medium {
    slots: Box<[Slot; SLOTS]>,
    entries: Vec<Entry>,
    vacant: u32,
    granules: u64,
    /// Which slot gives way next.
    hand: usize,
    /// The size that was asked for in vain last, and how often in a row.
    missed: (u32, u32),
}

impl Medium {
    pub(super) fn new() -> Self {
        let empty = Slot {
            size: 0,
            first: NONE,
        };
        Self {
            slots: Box::new([empty; SLOTS]),
            entries: Vec::new(),
            vacant: NONE,
            granules: 0,
            hand: 0,
            missed: (0, 0),
        }
    }

    #[inline]
    fn slot(size: u32) -> usize {
        // Fibonacci hashing: powers of two do not meet.
        (size.wrapping_mul(0x9E37_79B9) >> (32 - SLOTS.ilog2())) as usize
    }

    /// A block of exactly `size` granules.
    #[inline]
    pub(in crate::heap) fn pop(&mut self, size: u32) -> Option<Extent> {
        let slot = &mut self.slots[Self::slot(size)];
        if slot.size != size || slot.first == NONE {
            return None;
        }
        let at = slot.first;
        let entry = &mut self.entries[at as usize];
        slot.first = entry.next;
        entry.next = self.vacant;
        let extent = entry.extent;
        self.vacant = at;
        self.granules -= u64::from(size);
        Some(extent)
    }

    /// Keeps a block of `size` granules. What has to leave for it, so that no more than `budget`
    /// granules are kept, is added to `out`.
    #[inline]
    pub(in crate::heap) fn push(
        &mut self,
        size: u32,
        extent: Extent,
        budget: u64,
        out: &mut Vec<NodeId>,
    ) {
        let index = Self::slot(size);
        if self.slots[index].size != size {
            self.evict(index, out);
            self.slots[index].size = size;
        }
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
        if self.granules > budget {
            self.shrink(budget, out);
        }
    }

    /// Half of everything leaves, whole slots in turn, so that many leave at once and seldom.
    #[cold]
    fn shrink(&mut self, budget: u64, out: &mut Vec<NodeId>) {
        for _ in 0..SLOTS {
            if self.granules <= budget / 2 {
                break;
            }
            self.hand = (self.hand + 1) % SLOTS;
            self.evict(self.hand, out);
        }
    }

    fn evict(&mut self, index: usize, out: &mut Vec<NodeId>) {
        let Slot { size, first } = self.slots[index];
        let mut at = first;
        while let Some(entry) = self.entries.get_mut(at as usize) {
            out.push(entry.extent.node);
            let next = std::mem::replace(&mut entry.next, self.vacant);
            self.vacant = at;
            self.granules -= u64::from(size);
            at = next;
        }
        self.slots[index].first = NONE;
    }

    pub(super) fn take_all(&mut self, out: &mut Vec<NodeId>) {
        (0..SLOTS).for_each(|slot| self.evict(slot, out));
        self.missed = (0, 0);
    }

    /// How many blocks of `size` granules to fetch now that there is none: one, and more each time
    /// that the same size is missed with no other in between.
    pub(in crate::heap) fn wanted(&mut self, size: u32, budget: u64) -> u32 {
        const MOST: u32 = 16;
        self.missed = match self.missed {
            (last, streak) if last == size => (size, (streak * 2).min(MOST)),
            _ => (size, 1),
        };
        let room = budget / 4 / u64::from(size.max(1));
        u64::from(self.missed.1).min(room).max(1) as u32
    }

    /// Bytes of blocks in here.
    pub(super) fn bytes(&self) -> u64 {
        self.granules * crate::heap::core::GRANULE
    }

    /// Whether there are no blocks.
    pub(in crate::heap) fn is_empty(&self) -> bool {
        self.granules == 0
    }
}
