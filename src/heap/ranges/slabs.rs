//! Slabs: ranges that are divided into blocks of one class, with one bit for each block.

use std::ops::Range;

use super::extents::Ranges;
use super::nodes::RangeId;
use super::pages::{Owner, PageMap};
use crate::classes::{CLASSES, Class, PAGE};
use crate::piece::Extent;

/// How many stripes a heap can have.
pub(super) const STRIPES: usize = 64;

/// A slab: the number of its stripe, and its index there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlabId(pub(super) u32);

impl SlabId {
    /// Bits of the index. With those of the stripe they are one fewer than an entry of the page map has.
    const INDEX_BITS: u32 = 31 - STRIPES.ilog2();
    /// The most slabs of a stripe. The last number is none: an entry of the page map could not name it.
    const MOST: usize = (1 << Self::INDEX_BITS) - 1;

    const fn new(stripe: u8, index: u32) -> Self {
        Self((stripe as u32) << Self::INDEX_BITS | index)
    }

    pub(super) const fn stripe(self) -> u8 {
        (self.0 >> Self::INDEX_BITS) as u8
    }

    const fn index(self) -> usize {
        (self.0 & ((1 << Self::INDEX_BITS) - 1)) as usize
    }
}

pub(super) struct Slab {
    /// Bytes from the heap's start.
    start: u64,
    pub(super) node: RangeId,
    pub(super) class: Class,
    pub(super) blocks: u32,
    pub(super) free: u32,
    /// Its position in its class's list of slabs with free blocks.
    place: Option<u32>,
    /// No word before this one has free blocks.
    hint: u32,
    /// A set bit is a free block.
    words: Box<[u64]>,
}

/// The slabs of one stripe.
pub(super) struct Slabs {
    /// The stripe's number.
    pub(super) stripe: u8,
    slabs: Vec<Slab>,
    vacant: Vec<u32>,
    /// For each class, the slabs with free blocks. The last one is used first.
    partial: [Vec<u32>; CLASSES],
    /// For each class, the bytes of its slabs.
    totals: [u64; CLASSES],
    /// Bytes in free blocks.
    pub(super) free: u64,
    /// Bytes of blocks that were ever freed.
    pub(super) given: u64,
    /// Bytes at the ends of slabs, too few for a block.
    pub(super) ends: u64,
}

/// The slabs of a class in a claimed stripe are as large as if there were so many bytes of them: small ones, between ranges,
/// would leave no room for segments of shards.
const CLAIMED: u64 = 64 << 10;

/// How many ranges are searched for a slab while memory can still be added.
const LOOKS: usize = 32;

impl Slabs {
    pub(super) fn new(stripe: u8) -> Self {
        Self {
            stripe,
            slabs: Vec::new(),
            vacant: Vec::new(),
            partial: std::array::from_fn(|_| Vec::new()),
            totals: [0; CLASSES],
            free: 0,
            given: 0,
            ends: 0,
        }
    }

    /// Writes the offsets of free blocks to `out`; returns their number, which is smaller if there are no more.
    pub(super) fn take(&mut self, class: Class, out: &mut [u64]) -> usize {
        let mut taken = 0;
        while taken < out.len()
            && let Some(&index) = self.partial[class.index()].last()
        {
            let slab = &mut self.slabs[index as usize];
            taken += slab.take(&mut out[taken..]);
            if slab.free == 0 {
                slab.place = None;
                self.partial[class.index()].pop();
            }
        }
        self.free -= taken as u64 * class.bytes();
        taken
    }

    /// Returns whether there is a number for another slab.
    pub(super) const fn has_room(&self) -> bool {
        !self.vacant.is_empty() || self.slabs.len() < SlabId::MOST
    }

    /// Adds a slab of `class`; returns whether there was memory for it. Unless `exhaustive`, there may be none although single
    /// pages are free.
    pub(super) fn add(
        &mut self,
        class: Class,
        ranges: &mut Ranges,
        pages: &PageMap,
        exhaustive: bool,
    ) -> bool {
        if !self.has_room() {
            return false;
        }
        // Falls back to smaller slabs if no range is large enough; the last is a page.
        let least = if self.stripe == 0 { 0 } else { CLAIMED };
        for blocks in class.slabs(self.totals[class.index()].max(least)) {
            let bytes = class.slab_bytes(blocks);
            let looks = if exhaustive && bytes == PAGE {
                usize::MAX
            } else {
                LOOKS
            };
            if let Some(extent) = ranges.allocate_slowly(bytes, PAGE, looks) {
                self.insert(class, blocks, extent, pages);
                return true;
            }
        }
        false
    }

    fn insert(&mut self, class: Class, blocks: u32, extent: Extent, pages: &PageMap) {
        let used = u64::from(blocks) * class.bytes();
        let bytes = class.slab_bytes(blocks);
        let mut words = vec![u64::MAX; blocks.div_ceil(64) as usize].into_boxed_slice();
        if let (Some(last), rest @ 1..) = (words.last_mut(), blocks % 64) {
            *last = (1 << rest) - 1;
        }
        let slab = Slab {
            start: extent.offset,
            node: extent.node(),
            class,
            blocks,
            free: blocks,
            place: Some(self.partial[class.index()].len() as u32),
            hint: 0,
            words,
        };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.slabs[index as usize] = slab;
                index
            }
            None => {
                self.slabs.push(slab);
                self.slabs.len() as u32 - 1
            }
        };
        self.partial[class.index()].push(index);
        self.free += used;
        self.ends += bytes - used;
        self.totals[class.index()] += bytes;
        let owner = Owner::Slab(SlabId::new(self.stripe, index));
        for at in (extent.offset..extent.offset + bytes).step_by(PAGE as usize) {
            pages.set(at, owner);
        }
    }

    /// Iterates over all slabs.
    pub(super) fn there(&self) -> impl Iterator<Item = &Slab> {
        self.slabs.iter().filter(|slab| !slab.words.is_empty())
    }

    /// Returns the slab's class, if a block in use begins at `offset`.
    #[cfg(test)]
    pub(super) fn block_at(&self, id: SlabId, offset: u64) -> Option<Class> {
        let slab = self.slabs.get(id.index())?;
        let index = slab.index_of(offset)?;
        (slab.words[index as usize / 64] & (1 << (index % 64)) == 0).then_some(slab.class)
    }

    /// Returns the bytes of blocks in use in the slab, if the range in use `node` is this slab.
    pub(super) fn in_use(&self, id: SlabId, node: RangeId) -> Option<u64> {
        let slab = self.slabs.get(id.index())?;
        let same = slab.node == node && !slab.words.is_empty();
        same.then(|| slab.in_use())
    }

    /// Frees a block; returns `None` if no block in use begins there. The slab stays, also without a block in use. Returns
    /// `true` if it has none, and the class has more than `kept` slabs with free blocks.
    pub(super) fn give(&mut self, id: SlabId, offset: u64, kept: usize) -> Option<bool> {
        let slab = self.slabs.get_mut(id.index())?;
        let block = slab.index_of(offset)?;
        let (word, bit) = (block / 64, 1 << (block % 64));
        if slab.words[word as usize] & bit != 0 {
            return None;
        }
        slab.words[word as usize] |= bit;
        slab.hint = slab.hint.min(word);
        slab.free += 1;
        let bytes = slab.class.bytes();
        self.free += bytes;
        self.given = self.given.wrapping_add(bytes);
        let partial = &mut self.partial[slab.class.index()];
        if slab.place.is_none() {
            slab.place = Some(partial.len() as u32);
            partial.push(id.index() as u32);
        }
        Some(slab.is_empty() && partial.len() > kept)
    }

    /// Frees the slab if it has no block in use and its class has more than `kept` slabs with free blocks.
    pub(super) fn end_if_empty(&mut self, id: SlabId, kept: usize, ranges: &mut Ranges) {
        let slab = self.slabs.get(id.index());
        let class = slab.filter(|slab| slab.is_empty() && !slab.words.is_empty());
        let class = class.map(|slab| slab.class.index());
        if class.is_some_and(|class| self.partial[class].len() > kept) {
            self.end(id.index() as u32, ranges);
        }
    }

    /// Frees the slabs that have no block in use.
    pub(super) fn release_empty(&mut self, ranges: &mut Ranges) {
        for class in Class::all() {
            let mut empty = self.partial[class.index()].clone();
            empty.retain(|&index| self.slabs[index as usize].is_empty());
            empty.into_iter().for_each(|index| self.end(index, ranges));
        }
    }

    fn end(&mut self, index: u32, ranges: &mut Ranges) {
        let slab = &mut self.slabs[index as usize];
        let (class, node) = (slab.class, slab.node);
        let used = u64::from(slab.blocks) * class.bytes();
        let bytes = class.slab_bytes(slab.blocks);
        slab.words = Box::default();
        slab.free = 0;
        if let Some(place) = slab.place.take() {
            let partial = &mut self.partial[class.index()];
            partial.swap_remove(place as usize);
            if let Some(&moved) = partial.get(place as usize) {
                self.slabs[moved as usize].place = Some(place);
            }
        }
        self.free -= used;
        self.ends -= bytes - used;
        self.totals[class.index()] -= bytes;
        ranges.free(node);
        self.vacant.push(index);
    }

    /// Returns the size of the tables, in bytes.
    pub(super) fn metadata(&self) -> usize {
        let words: usize = self.slabs.iter().map(|slab| slab.words.len()).sum();
        self.slabs.capacity() * size_of::<Slab>() + words * size_of::<u64>()
    }
}

impl Slab {
    /// Returns the index of the block that begins at `offset`.
    fn index_of(&self, offset: u64) -> Option<u32> {
        if self.words.is_empty() {
            return None;
        }
        let within = offset.checked_sub(self.start)?;
        if within >= u64::from(self.blocks) * self.class.bytes() {
            return None;
        }
        self.class.block_at(within)
    }

    /// Iterates over free blocks, and over the unusable end.
    pub(super) fn free_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let size = self.class.bytes();
        let end = self.start + u64::from(self.blocks) * size;
        let is_free = |block: &u32| self.words[*block as usize / 64] & (1 << (block % 64)) != 0;
        let free = (0..self.blocks).filter(is_free).map(move |block| {
            let at = self.start + u64::from(block) * size;
            at..at + size
        });
        free.chain(std::iter::once(end..end.next_multiple_of(PAGE)))
    }

    /// Returns the bytes of blocks in use.
    pub(super) fn in_use(&self) -> u64 {
        u64::from(self.blocks - self.free) * self.class.bytes()
    }

    /// Returns whether no block is in use.
    fn is_empty(&self) -> bool {
        self.free == self.blocks
    }

    fn take(&mut self, out: &mut [u64]) -> usize {
        let bytes = self.class.bytes();
        let mut taken = 0;
        while taken < out.len() && self.free > 0 {
            let word = &mut self.words[self.hint as usize];
            while *word != 0 && taken < out.len() {
                let bit = word.trailing_zeros();
                *word &= *word - 1;
                out[taken] = self.start + u64::from(self.hint * 64 + bit) * bytes;
                taken += 1;
                self.free -= 1;
            }
            if *word == 0 && self.free > 0 {
                self.hint += 1;
            }
        }
        taken
    }
}
