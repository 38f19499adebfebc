//! The allocator itself: which offsets are in use. It is pure: it accesses no memory of the heap and makes no
//! driver calls.

mod bins;
mod extents;
mod nodes;
mod pages;
mod refusals;
mod slabs;
mod spans;
mod stripes;
mod table;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

pub(super) use bins::{Occupied, bin_of};
pub(super) use extents::{MAX_RANGE, Ranges};
pub(super) use nodes::RangeId;
pub(super) use pages::Owner;
pub(super) use refusals::{CachedBound, Request};
pub(super) use slabs::SlabId;
pub(super) use stripes::{HeldSlabs, OwnStripe, Stripes};
pub(super) use table::Ahead;

use self::extents::LOG_GRANULE;
use self::nodes::NodeState;
use self::refusals::Refusals;
use super::classes::{Class, GRANULE, PAGE};
use super::piece::Extent;
use crate::{Error, Result};

/// How many vacant nodes a shard keeps when it returns segments. Each time that it needs more, it visits the core.
const NODES: usize = 256;
/// How many vacant nodes a shard has at least before it gets a segment, which takes three at first.
const NODES_FOR_SEGMENT: usize = 8;

/// How many free ranges are searched before the heap grows: some 10 µs. It searches all before it refuses.
const LOOKS: usize = if cfg!(test) { 3 } else { 1024 };

/// The block at an offset.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A block of a slab.
    Small(Class),
    /// A range, and its size in bytes.
    Range(RangeId, u64),
}

/// All of a heap's memory by offsets: ranges, and slabs of small blocks within them.
pub(super) struct Core {
    /// The most memory there ever was, in bytes.
    pub(super) total_high_water: u64,
    /// The most that was not free since [`take_peak`](Self::take_peak), in bytes.
    high_water: u64,
    /// The most that was not free before.
    earlier_high_water: u64,
    pub(super) ranges: Ranges,
    slabs: Arc<Stripes>,
    refusals: Refusals,
    /// Shards that ended, with their numbers.
    shards: Vec<(u8, Ranges)>,
    /// How many numbers shards have; 0 is none's.
    numbers: u8,
    /// The most memory, in bytes.
    limit: u64,
    /// Whether each search looks at all free ranges.
    exhaustive: bool,
    /// The least piece of memory that does not join others, in bytes: the heap replaces several, and holes, by one for a block
    /// that may find no room in it.
    least_apart: u64,
}

impl Core {
    /// Creates a core without memory. Offset 0 will be at the address `origin`, a multiple of [`PAGE`], and
    /// all memory below `limit`.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel has no addresses for the tables, a 32nd of `limit`.
    pub(super) fn new(origin: u64, limit: u64) -> Result<Self> {
        debug_assert!(origin.is_multiple_of(PAGE));
        let ranges = Ranges::new(origin, limit)
            .map_err(|error| Error::system("reserving addresses for a heap's tables", &error))?;
        Ok(Self {
            total_high_water: 0,
            high_water: 0,
            earlier_high_water: 0,
            ranges,
            slabs: Arc::new(Stripes::new(limit)),
            refusals: Refusals::NONE,
            shards: Vec::new(),
            numbers: 0,
            limit,
            exhaustive: false,
            least_apart: u64::MAX,
        })
    }

    /// Adds memory, in whole granules; with `joins`, blocks may reach across its ends.
    pub(super) fn add(&mut self, range: Range<u64>, joins: bool) {
        if !joins {
            self.least_apart = self.least_apart.min(range.end - range.start);
        }
        self.ranges.add(range, joins);
        self.forget_refusals();
        self.total_high_water = self.total_high_water.max(self.ranges.total());
    }

    /// Removes memory if all of it is free; returns whether it did.
    pub(super) fn remove(&mut self, range: Range<u64>) -> bool {
        self.forget_refusals();
        let removed = self.ranges.remove(range);
        if self.least_apart < u64::MAX {
            self.least_apart = self.ranges.least_span();
        }
        removed
    }

    /// Returns the bytes that were ever freed, or more.
    fn given(&self, slabs: &HeldSlabs<'_>) -> u64 {
        (self.ranges.given << LOG_GRANULE).wrapping_add(slabs.given())
    }

    /// Returns the granules that a range for `bytes` takes.
    #[inline]
    pub(super) fn range_granules(bytes: u64) -> u64 {
        bytes.max(PAGE).div_ceil(GRANULE)
    }

    /// Returns the bytes that a range for `bytes` takes.
    #[inline]
    pub(super) fn range_bytes(bytes: u64) -> Option<u64> {
        Self::range_granules(bytes).checked_mul(GRANULE)
    }

    /// Allocates a range of at least `bytes`, at an address that is a multiple of `align`, a power of two. Outside of
    /// [`exhaustively`](Self::exhaustively) it may miss a range that fits among more than [`LOOKS`] that do not.
    #[inline(never)]
    pub(super) fn allocate(&mut self, bytes: u64, align: u64) -> Option<Extent> {
        let looks = if self.exhaustive { usize::MAX } else { LOOKS };
        let extent = self.ranges.allocate(bytes, align, looks)?;
        self.mark_high_water();
        Some(extent)
    }

    /// Allocates for a request from what is free here and in slabs.
    pub(super) fn serve(&mut self, request: &Request) -> Option<Extent> {
        if let Some(class) = request.class {
            let mut offset = [0];
            if self.fill(&OwnStripe::default(), class, &mut offset) > 0 {
                return Some(Extent::small(offset[0], class));
            }
            if !class.may_be_range(request.align) {
                return None;
            }
        }
        self.allocate(request.bytes, request.align)
    }

    /// Returns a shard without memory, which belongs to this core, and its number, if there is one left.
    pub(super) fn new_shard(&mut self) -> Option<(u8, Ranges)> {
        self.shards.pop().or_else(|| {
            self.numbers = self.numbers.checked_add(1)?;
            Some((self.numbers, self.ranges.split()))
        })
    }

    /// Keeps a shard that has no segments for the next thread.
    pub(super) fn end_shard(&mut self, id: u8, mut shard: Ranges) {
        debug_assert!(shard.total() == 0);
        let nodes = &mut shard.nodes;
        nodes.give_back(&mut self.ranges.nodes, usize::MAX);
        self.shards.push((id, shard));
    }

    /// Gives a shard vacant nodes, more to one that has many.
    pub(super) fn lend_nodes(&mut self, shard: &mut Ranges) {
        let nodes = &mut shard.nodes;
        let enough = nodes.vacancies() + (NODES / 4).max(nodes.count / 8);
        while nodes.vacancies() < enough {
            self.ranges.nodes.lend(nodes);
        }
    }

    /// Gives a shard a segment of `bytes`, at an address that is a multiple of `align`; returns its place.
    pub(super) fn feed(
        &mut self,
        shard: &mut Ranges,
        bytes: u64,
        align: u64,
    ) -> Option<Range<u64>> {
        // The thread can do without.
        const LOOKS: usize = 16;
        let extent = self.ranges.allocate_slowly(bytes, align, LOOKS)?;
        self.mark_high_water();
        if shard.nodes.vacancies() < NODES_FOR_SEGMENT {
            self.lend_nodes(shard);
        }
        let place = extent.offset..extent.offset + bytes;
        shard.add(place.clone(), false);
        let at = shard.span_at(place.start >> LOG_GRANULE)?; // always
        shard.spans[at].whole = extent.node();
        Some(place)
    }

    /// Takes the segment of a shard that starts at `start` bytes back, with its blocks; returns its place.
    pub(super) fn take_segment(&mut self, shard: &mut Ranges, start: u64) -> Option<Range<u64>> {
        let own = shard;
        let at = own.span_at(start >> LOG_GRANULE)?;
        let span = own.spans.remove(at);
        let (mut free, mut taken) = (Vec::new(), 0);
        let head = own.nodes.get(span.first).next;
        let mut at = head;
        while at != span.last {
            let node = *own.nodes.get(at);
            if node.state == NodeState::Free {
                own.nodes.unlink(at);
                own.free -= u64::from(node.size);
                free.push(at);
            }
            (at, taken) = (node.next, taken + 1);
        }
        let last = *own.nodes.get(span.last);
        own.total -= last.start - span.start;
        own.nodes.retire(span.first);
        own.nodes.retire(span.last);
        let nodes = &mut self.ranges.nodes;
        nodes.take_over(&mut own.nodes, taken);
        let vacant = own.nodes.vacancies().saturating_sub(NODES);
        own.nodes.give_back(nodes, vacant);
        // The segment's nodes take the place of the one that it was here.
        let whole = *nodes.get(span.whole);
        nodes.get_mut(whole.previous).next = head;
        nodes.get_mut(head).previous = whole.previous;
        nodes.get_mut(whole.next).previous = last.previous;
        let tail = nodes.get_mut(last.previous);
        (tail.next, tail.growable_end) = (whole.next, whole.growable_end);
        nodes.retire(span.whole);
        // Only `free` coalesces.
        for node in free {
            self.ranges.free(node);
        }
        Some(start..last.start << LOG_GRANULE)
    }

    /// Returns the slabs, which have locks of their own.
    pub(super) fn slabs(&self) -> &Arc<Stripes> {
        &self.slabs
    }

    /// Grows a range in use to at least `bytes` in place; returns whether there was room behind it.
    pub(super) fn extend(&mut self, node: RangeId, bytes: u64) -> bool {
        let extended = self.ranges.extend(node, bytes);
        self.mark_high_water();
        extended
    }

    /// Frees the bytes of a range in use beyond `bytes`.
    pub(super) fn shrink(&mut self, node: RangeId, bytes: u64) {
        self.forget_refusals();
        self.ranges.shrink(node, bytes);
    }

    /// Frees a range; returns whether it was in use.
    #[inline(always)]
    pub(super) fn free(&mut self, node: RangeId) -> bool {
        self.ranges.free(node)
    }

    /// Frees many ranges; returns how many of them were in use.
    #[inline]
    pub(super) fn free_all(&mut self, ranges: &[Extent]) -> usize {
        // Each range's neighbours are far from the others': reads all of them first, so that the cache misses
        // overlap.
        if ranges.len() > 2 {
            let touched = ranges
                .iter()
                .fold(0, |sum, range| sum ^ self.ranges.touch(range.node()));
            std::hint::black_box(touched);
        }
        let freed = ranges
            .iter()
            .map(|range| usize::from(self.ranges.free(range.node())));
        freed.sum()
    }

    /// Calls `f` when memory is so short that a search of all free ranges is worthwhile.
    pub(super) fn exhaustively<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        self.exhaustive = true;
        let result = f(self);
        self.exhaustive = false;
        result
    }

    /// Writes the offsets of blocks of `class` to `out`; returns their number. It is smaller only if memory
    /// runs out. Outside of [`exhaustively`](Self::exhaustively) it may be smaller although single pages are free.
    pub(super) fn fill(&mut self, own: &OwnStripe, class: Class, out: &mut [u64]) -> usize {
        let filled = (self.slabs).fill(own, class, &mut self.ranges, out, self.exhaustive);
        self.mark_high_water();
        filled
    }

    #[inline]
    fn mark_high_water(&mut self) {
        self.high_water = self.high_water.max(self.used());
    }

    /// Returns the bytes that are in use, including blocks in caches and slabs.
    #[inline]
    pub(super) fn used(&self) -> u64 {
        self.ranges.total().saturating_sub(self.ranges.free_bytes())
    }

    /// Returns the most bytes that were in use at once since the last call, including blocks in caches and slabs.
    pub(super) fn take_peak(&mut self) -> u64 {
        let peak = self.high_water;
        self.high_water = self.used();
        self.earlier_high_water = self.earlier_high_water.max(peak);
        peak
    }

    /// Returns the most bytes that were ever in use at once, including blocks in caches and slabs.
    pub(super) fn used_high_water(&self) -> u64 {
        self.high_water.max(self.earlier_high_water)
    }

    /// Frees small blocks; returns how many were not in use. Slabs without a block in use end, unless they are the last `kept` of
    /// their class in their stripe that have free blocks.
    pub(super) fn give(&mut self, offsets: &[u64], kept: usize) -> usize {
        let mut empty = Vec::new();
        let unknown = self.slabs.give(offsets, kept, &mut empty);
        self.end_slabs(&empty, kept);
        unknown
    }

    /// Gives a thread's stripe back for the next thread.
    pub(super) fn leave(&mut self, own: &mut OwnStripe) {
        self.slabs.leave(own, &mut self.ranges);
    }

    /// Ends those of the slabs that have no block in use, but for `kept` of a class.
    pub(super) fn end_slabs(&mut self, empty: &[SlabId], kept: usize) {
        self.slabs.end(empty, kept, &mut self.ranges);
    }

    /// Returns the block in use, or the range in use and named in the page map, that begins at `offset`. Blocks
    /// in caches count as in use here.
    #[cfg(test)]
    pub(super) fn at(&self, offset: u64) -> Option<Found> {
        match self.slabs.pages.get(offset)? {
            Owner::Slab(slab) => self.slabs.hold().block_at(slab, offset).map(Found::Small),
            Owner::Range(node) => {
                let bytes = self.ranges.used_at(node, offset)?;
                Some(Found::Range(node, bytes))
            }
        }
    }

    /// Frees slabs without a block in use, so that their memory can serve other sizes.
    pub(super) fn release_empty_slabs(&mut self) {
        self.slabs.release_empty(&mut self.ranges);
    }

    /// Iterates over the ranges in use, including slabs, in the order of offsets.
    pub(super) fn used_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let all = self.ranges.all();
        all.filter_map(|(range, node)| node.map(|_| range))
    }

    /// Iterates over all ranges in the order of offsets, and whether each is in use, including slabs.
    #[cfg(test)]
    pub(super) fn all_ranges(&self) -> impl Iterator<Item = (Range<u64>, bool)> {
        let all = self.ranges.all();
        all.map(|(range, node)| (range, node.is_some()))
    }

    /// Returns the size of the tables of ranges and pages, in bytes.
    pub(super) fn metadata(&self) -> usize {
        self.ranges.metadata() + self.slabs.pages.metadata()
    }
}
