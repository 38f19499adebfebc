//! Slabs: ranges that are divided into blocks of one class, with one bit for each block.

use std::ops::Range;

use super::extents::{Extent, Ranges};
use super::nodes::RangeId;
use super::pages::{Owner, PageMap};
use crate::classes::{CLASSES, Class, PAGE};

/// The index of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlabId(pub(super) u32);

struct Slab {
    /// Bytes from the heap's start.
    start: u64,
    node: RangeId,
    class: Class,
    blocks: u32,
    free: u32,
    /// Its position in its class's list of slabs with free blocks.
    place: Option<u32>,
    /// No word before this one has free blocks.
    hint: u32,
    /// A set bit is a free block.
    words: Box<[u64]>,
}

/// All slabs.
pub(super) struct Slabs {
    slabs: Vec<Slab>,
    vacant: Vec<SlabId>,
    /// For each class, the slabs with free blocks. The last one is used first.
    partial: [Vec<SlabId>; CLASSES],
    /// For each class, the bytes of its slabs.
    totals: [u64; CLASSES],
    /// Bytes in free blocks.
    pub(super) free: u64,
    /// Bytes of blocks that were ever freed.
    pub(super) given: u64,
    /// Bytes at the ends of slabs, too few for a block.
    pub(super) ends: u64,
}

/// How many ranges are searched for a slab while memory can still be added.
const LOOKS: usize = 32;

impl Slabs {
    pub(super) fn new() -> Self {
        Self {
            slabs: Vec::new(),
            vacant: Vec::new(),
            partial: std::array::from_fn(|_| Vec::new()),
            totals: [0; CLASSES],
            free: 0,
            given: 0,
            ends: 0,
        }
    }

    /// Writes the offsets of free blocks to `out`; returns their number. It is smaller only if memory runs
    /// out. Unless `exhaustive`, it may be smaller although single pages are free.
    pub(super) fn fill(
        &mut self,
        class: Class,
        ranges: &mut Ranges,
        pages: &PageMap,
        out: &mut [u64],
        exhaustive: bool,
    ) -> usize {
        let mut filled = 0;
        while filled < out.len() {
            let last = self.partial[class.index()].last().copied();
            let Some(id) = last.or_else(|| self.add(class, ranges, pages, exhaustive)) else {
                break;
            };
            filled += self.slabs[id.0 as usize].take(&mut out[filled..]);
            if self.slabs[id.0 as usize].free == 0 {
                self.partial[class.index()].pop();
                self.slabs[id.0 as usize].place = None;
            }
        }
        self.free -= filled as u64 * class.bytes();
        filled
    }

    fn add(
        &mut self,
        class: Class,
        ranges: &mut Ranges,
        pages: &PageMap,
        exhaustive: bool,
    ) -> Option<SlabId> {
        // Falls back to smaller slabs if no range is large enough; the last is a page.
        for blocks in class.slabs(self.totals[class.index()]) {
            let bytes = class.slab_bytes(blocks);
            let looks = if exhaustive && bytes == PAGE {
                usize::MAX
            } else {
                LOOKS
            };
            if let Some(extent) = ranges.allocate_slowly(bytes, PAGE, looks) {
                return Some(self.insert(class, blocks, extent, pages));
            }
        }
        None
    }

    fn insert(&mut self, class: Class, blocks: u32, extent: Extent, pages: &PageMap) -> SlabId {
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
        let id = match self.vacant.pop() {
            Some(id) => {
                self.slabs[id.0 as usize] = slab;
                id
            }
            None => {
                self.slabs.push(slab);
                SlabId(self.slabs.len() as u32 - 1)
            }
        };
        self.partial[class.index()].push(id);
        self.free += used;
        self.ends += bytes - used;
        self.totals[class.index()] += bytes;
        for at in (extent.offset..extent.offset + bytes).step_by(PAGE as usize) {
            pages.set(at, Owner::Slab(id));
        }
        id
    }

    fn there(&self) -> impl Iterator<Item = &Slab> {
        self.slabs.iter().filter(|slab| !slab.words.is_empty())
    }

    /// Returns the slab's class, if a block in use begins at `offset`.
    #[cfg(test)]
    pub(super) fn block_at(&self, id: SlabId, offset: u64) -> Option<Class> {
        let slab = self.slabs.get(id.0 as usize)?;
        let index = slab.index_of(offset)?;
        (slab.words[index as usize / 64] & (1 << (index % 64)) == 0).then_some(slab.class)
    }

    /// Returns the bytes of blocks in use in the slab, if the range in use `node` is this slab.
    pub(super) fn in_use(&self, id: SlabId, node: RangeId) -> Option<u64> {
        let slab = self.slabs.get(id.0 as usize)?;
        let same = slab.node == node && !slab.words.is_empty();
        same.then(|| slab.in_use())
    }

    /// Iterates over the ranges of slabs with at most so many bytes in use. `None` if there are more slabs than
    /// `most`, with or without blocks.
    pub(super) fn nodes_with_at_most(
        &self,
        in_use: u64,
        most: usize,
    ) -> Option<impl Iterator<Item = RangeId>> {
        let few = self.there().filter(move |slab| slab.in_use() <= in_use);
        (self.slabs.len() <= most).then(|| few.map(|slab| slab.node))
    }

    /// Frees a block; returns whether it was in use. Frees its slab too if no block is in use there and `kept` slabs with free
    /// blocks are left.
    pub(super) fn give(
        &mut self,
        id: SlabId,
        offset: u64,
        ranges: &mut Ranges,
        kept: usize,
    ) -> bool {
        let Some(slab) = self.slabs.get_mut(id.0 as usize) else {
            return false;
        };
        let Some(index) = slab.index_of(offset) else {
            return false;
        };
        let (word, bit) = (index / 64, 1 << (index % 64));
        if slab.words[word as usize] & bit != 0 {
            return false;
        }
        slab.words[word as usize] |= bit;
        slab.hint = slab.hint.min(word);
        slab.free += 1;
        let class = slab.class;
        self.free += class.bytes();
        self.given = self.given.wrapping_add(class.bytes());
        let partial = &mut self.partial[class.index()];
        if slab.place.is_none() {
            slab.place = Some(partial.len() as u32);
            partial.push(id);
        }
        if slab.free == slab.blocks && partial.len() > kept {
            self.end(id, ranges);
        }
        true
    }

    /// Frees the slabs that have no block in use.
    pub(super) fn release_empty(&mut self, ranges: &mut Ranges) {
        for class in Class::all() {
            let empty: Vec<SlabId> = self.partial[class.index()]
                .iter()
                .copied()
                .filter(|id| self.slabs[id.0 as usize].is_empty())
                .collect();
            for id in empty {
                self.end(id, ranges);
            }
        }
    }

    fn end(&mut self, id: SlabId, ranges: &mut Ranges) {
        let slab = &mut self.slabs[id.0 as usize];
        let (class, node) = (slab.class, slab.node);
        let used = u64::from(slab.blocks) * class.bytes();
        let bytes = class.slab_bytes(slab.blocks);
        slab.words = Box::default();
        slab.free = 0;
        if let Some(place) = slab.place.take() {
            let partial = &mut self.partial[class.index()];
            partial.swap_remove(place as usize);
            if let Some(moved) = partial.get(place as usize) {
                self.slabs[moved.0 as usize].place = Some(place);
            }
        }
        self.free -= used;
        self.ends -= bytes - used;
        self.totals[class.index()] -= bytes;
        ranges.free(node);
        self.vacant.push(id);
    }

    /// Iterates over free blocks, and over the unusable ends.
    pub(super) fn free_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.there().flat_map(|slab| {
            let size = slab.class.bytes();
            let end = slab.start + u64::from(slab.blocks) * size;
            let is_free = |block: &u32| slab.words[*block as usize / 64] & (1 << (block % 64)) != 0;
            let free = (0..slab.blocks).filter(is_free).map(move |block| {
                let at = slab.start + u64::from(block) * size;
                at..at + size
            });
            free.chain(std::iter::once(end..end.next_multiple_of(PAGE)))
        })
    }

    /// Returns, for each class, how many blocks are free and how many there are.
    pub(super) fn counts(&self) -> [(u64, u64); CLASSES] {
        let mut counts = [(0, 0); CLASSES];
        for slab in self.there() {
            let (free, all) = &mut counts[slab.class.index()];
            *free += u64::from(slab.free);
            *all += u64::from(slab.blocks);
        }
        counts
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

    /// Returns the bytes of blocks in use.
    fn in_use(&self) -> u64 {
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
