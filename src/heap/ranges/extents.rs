//! Ranges of the heap's memory, used and free, in the order of their offsets.
//!
//! Each range is a node, linked to its neighbours in memory; a free one is in a list by size as well. Nodes
//! lie in a table of their own, never in the memory that they describe.

use std::io;
use std::ops::Range;

use crate::classes::{GRANULE, PAGE};
use crate::piece::Extent;
use crate::ranges::nodes::{Need, NodeState, Nodes, RangeId};

/// The unit of sizes and offsets here.
pub(super) const LOG_GRANULE: u32 = GRANULE.ilog2();

/// The smallest span, and how many there may be at least.
const MIN_SPAN: u64 = 64 << 10;
const LEAST_SPANS: u64 = 1 << 14;

/// The largest range, because sizes are 32 bits of granules. No range crosses a multiple of this in memory
/// that joins: spans end there. Chunks can end there too.
pub(crate) const MAX_RANGE: u64 = (1 << 40) - (2 << 20);

/// Returns the most ranges that so many bytes of memory can have: each range in use takes at least a page
/// and has at most one free range before it, and each span has one more and its two ends. Memory is added
/// in larger pieces than [`MIN_SPAN`], and shards get larger ones. Of a table that is half full, shards get no more
/// new nodes while any are vacant, and they keep far fewer vacant than the few spans leave over.
fn most_nodes(limit: u64) -> usize {
    let spans = limit / MIN_SPAN + LEAST_SPANS;
    usize::try_from(limit / PAGE * 2 + spans * 3)
        .unwrap_or(usize::MAX)
        .min((1 << 31) - 128)
}

/// All ranges. A range ends where the next one starts; the first and the last node of a span are empty.
pub(crate) struct Ranges {
    pub(crate) nodes: Nodes,
    /// Memory without a gap or a range limit, by ascending starts.
    pub(super) spans: Vec<Span>,
    /// The address of offset 0, in granules: alignment applies to addresses.
    origin: u64,
    pub(super) free: u64,
    pub(super) total: u64,
    /// Granules that were ever freed.
    pub(super) given: u64,
}

/// Memory in a row.
#[derive(Clone, Copy)]
pub(super) struct Span {
    /// In granules.
    pub(super) start: u64,
    /// Its first and last nodes, which are empty.
    pub(super) first: RangeId,
    pub(super) last: RangeId,
    /// Of a shard's segment, its node in the core.
    pub(super) whole: RangeId,
}

impl Ranges {
    /// Creates a table without memory. Offset 0 will be at the address `origin`, a multiple of the granule,
    /// and all memory below `limit`.
    ///
    /// # Errors
    /// The kernel's error if it has no addresses for the table.
    pub(super) fn new(origin: u64, limit: u64) -> io::Result<Self> {
        let nodes = Nodes::new(most_nodes(limit))?;
        Ok(Self::of(nodes, origin >> LOG_GRANULE))
    }

    /// Returns ranges without memory, for a shard.
    pub(super) fn split(&mut self) -> Self {
        Self::of(self.nodes.split(), self.origin)
    }

    const fn of(nodes: Nodes, origin: u64) -> Self {
        Self {
            nodes,
            spans: Vec::new(),
            origin,
            free: 0,
            total: 0,
            given: 0,
        }
    }

    /// Returns all memory, in bytes.
    #[inline]
    pub(crate) fn total(&self) -> u64 {
        self.total << LOG_GRANULE
    }

    /// Returns the free bytes.
    #[inline]
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free << LOG_GRANULE
    }

    /// Returns the size of the largest free range, in bytes.
    pub(crate) fn largest_free(&self) -> u64 {
        u64::from(self.nodes.largest(usize::MAX)) << LOG_GRANULE
    }

    /// Returns [`largest_free`](Self::largest_free) or at most a 64th less, without visiting every range;
    /// still less if more than 16 ranges lie at growable ends.
    pub(crate) fn nearly_largest_free(&self) -> u64 {
        const LOOKS: usize = 16;
        u64::from(self.nodes.largest(LOOKS)) << LOG_GRANULE
    }

    /// Returns the size of the tables, in bytes.
    pub(super) fn metadata(&self) -> usize {
        self.nodes.metadata()
    }

    /// Allocates a range of at least `bytes`, and a page, at an address that is a multiple of `align`, a
    /// power of two. Searches at most `looks` ranges.
    #[inline(always)]
    pub(super) fn allocate(&mut self, bytes: u64, align: u64, looks: usize) -> Option<Extent> {
        let bytes = bytes.max(PAGE);
        let size = bytes.div_ceil(GRANULE) as u32;
        if align <= GRANULE
            && bytes <= MAX_RANGE
            && let Some(node) = self.nodes.pick(size)
        {
            return Some(self.take(node, size));
        }
        self.allocate_slowly(bytes, align, looks)
    }

    /// As [`allocate`](Self::allocate), also for the pages of slabs and the segments of shards.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_slowly(
        &mut self,
        bytes: u64,
        align: u64,
        looks: usize,
    ) -> Option<Extent> {
        if bytes > MAX_RANGE {
            return None;
        }
        let align = align.max(GRANULE) >> LOG_GRANULE;
        let need = Need {
            size: bytes.div_ceil(GRANULE) as u32,
            align,
            origin: self.origin & (align - 1),
        };
        let node = self.nodes.find(need, looks)?;
        Some(self.take_aligned(node, need))
    }

    /// Returns the first offset from `offset` on whose address is a multiple of `align`, in bytes.
    pub(super) fn aligned(&self, offset: u64, align: u64) -> u64 {
        let address = offset + (self.origin << LOG_GRANULE);
        offset.saturating_add(address.wrapping_neg() & (align - 1))
    }

    /// Takes an extent for `need` out of a free range that has room for it.
    fn take_aligned(&mut self, node: RangeId, need: Need) -> Extent {
        let (gap, size) = (need.gap(self.nodes.get(node)) as u32, need.size); // less than the range
        if gap == 0 {
            return self.take(node, size);
        }
        // The gap keeps the node; the range after it gets a node of its own.
        self.nodes.unlink(node);
        let whole = *self.nodes.get(node);
        self.nodes.get_mut(node).size = gap;
        let start = whole.start + u64::from(gap);
        let rest = self
            .nodes
            .insert_between(node, whole.next, start, whole.size - gap);
        self.nodes.link(node);
        self.nodes.link(rest);
        self.take(rest, size)
    }

    /// Takes the first `size` granules of a free range.
    #[inline(always)]
    fn take(&mut self, node: RangeId, size: u32) -> Extent {
        self.nodes.unlink(node);
        self.free -= u64::from(size);
        let this = self.nodes.get_mut(node);
        let (start, next) = (this.start, this.next);
        let rest = this.size - size;
        this.size = size;
        if rest > 0 {
            // Does not read the next node: it may be far away.
            let start = start + u64::from(size);
            let rest = self.nodes.insert_between(node, next, start, rest);
            self.nodes.link(rest);
        }
        Extent::new(start << LOG_GRANULE, node, size)
    }

    /// Frees a used range; returns whether it was in use. Changes nothing if it was not, which only unsafe
    /// code can cause.
    #[inline(always)]
    pub(crate) fn free(&mut self, node: RangeId) -> bool {
        let this = self.nodes.get(node);
        if this.state != NodeState::Used {
            return false;
        }
        let (own, previous, mut next) = (this.size, this.previous, this.next);
        let mut growable_end = this.growable_end;
        self.free += u64::from(own);
        self.given = self.given.wrapping_add(own.into());
        let mut size = own;
        let right = self.nodes.get(next);
        if right.state == NodeState::Free {
            size += right.size;
            growable_end = right.growable_end;
            let after = right.next;
            self.nodes.unlink(next);
            self.nodes.retire(next);
            next = after;
            self.nodes.get_mut(next).previous = node;
            self.nodes.get_mut(node).next = next;
        }
        let mut node = node;
        if self.nodes.get(previous).state == NodeState::Free {
            self.nodes.unlink(previous);
            self.nodes.retire(node);
            node = previous;
            size += self.nodes.get(node).size;
            self.nodes.get_mut(node).next = next;
            self.nodes.get_mut(next).previous = node;
        }
        let this = self.nodes.get_mut(node);
        this.size = size;
        this.growable_end = growable_end;
        self.nodes.link(node);
        true
    }

    /// Returns the size in bytes of the range in use `node`, if it begins at `offset`.
    #[cfg(test)]
    pub(super) fn used_at(&self, node: RangeId, offset: u64) -> Option<u64> {
        let this = self.nodes.has(node).then(|| self.nodes.get(node))?;
        let in_use = this.state == NodeState::Used && this.start << LOG_GRANULE == offset;
        (in_use && this.size > 0).then(|| u64::from(this.size) << LOG_GRANULE)
    }

    /// Reads the nodes that freeing this one will read, so that the cache misses of many overlap.
    #[inline]
    pub(super) fn touch(&self, node: RangeId) -> u32 {
        let node = self.nodes.get(node);
        self.nodes.get(node.previous).size ^ self.nodes.get(node.next).size
    }

    fn bytes_of(&self, node: RangeId) -> Range<u64> {
        let node = self.nodes.get(node);
        node.start << LOG_GRANULE..(node.start + u64::from(node.size)) << LOG_GRANULE
    }

    /// Iterates over all ranges in the order of offsets, in bytes, each with its node if it is in use.
    pub(super) fn all(&self) -> impl Iterator<Item = (Range<u64>, Option<RangeId>)> {
        self.each_span().flatten()
    }

    /// As [`all`](Self::all), separately for each span.
    pub(super) fn each_span(&self) -> impl Iterator<Item = SpanRanges<'_>> + Clone {
        self.spans.iter().map(|span| SpanRanges {
            ranges: self,
            node: self.nodes.get(span.first).next,
            last: span.last,
        })
    }

    /// Returns the free bytes right before `end`, the end of a span, in bytes: memory added there would
    /// join them.
    pub(crate) fn free_before(&self, end: u64) -> u64 {
        let end = end >> LOG_GRANULE;
        let before = self.spans[..self.spans_before(end)].last();
        let last = before.map(|span| self.nodes.get(span.last));
        let last = last.filter(|last| last.start == end);
        last.map_or(0, |last| self.free_at(last.previous))
    }

    /// Returns the free bytes right after `start`, the start of a span, in bytes.
    pub(crate) fn free_after(&self, start: u64) -> u64 {
        let span = self.span_at(start >> LOG_GRANULE).map(|at| self.spans[at]);
        span.map_or(0, |span| self.free_at(self.nodes.get(span.first).next))
    }

    /// Returns how many spans start before `granule`.
    pub(super) fn spans_before(&self, granule: u64) -> usize {
        self.spans.partition_point(|span| span.start < granule)
    }

    /// Returns the index of the span that starts at `granule`.
    pub(super) fn span_at(&self, granule: u64) -> Option<usize> {
        let at = self.spans.binary_search_by_key(&granule, |span| span.start);
        at.ok()
    }

    fn free_at(&self, node: RangeId) -> u64 {
        let node = self.nodes.get(node);
        match node.state {
            NodeState::Free => u64::from(node.size) << LOG_GRANULE,
            _ => 0,
        }
    }
}

/// Iterates over the ranges of a span in the order of offsets.
#[derive(Clone)]
pub(super) struct SpanRanges<'a> {
    ranges: &'a Ranges,
    node: RangeId,
    last: RangeId,
}

impl Iterator for SpanRanges<'_> {
    type Item = (Range<u64>, Option<RangeId>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.node == self.last {
            return None;
        }
        let this = self.node;
        self.node = self.ranges.nodes.get(this).next;
        let used = self.ranges.nodes.get(this).state == NodeState::Used;
        Some((self.ranges.bytes_of(this), used.then_some(this)))
    }
}

impl Ranges {
    /// Grows a range in use to at least `bytes` in place; returns whether there is room right behind it.
    /// Never shrinks it.
    pub(crate) fn extend(&mut self, node: RangeId, bytes: u64) -> bool {
        let this = self.nodes.get(node);
        let size = bytes.max(PAGE).div_ceil(GRANULE);
        let Some(more) = size.checked_sub(this.size.into()).filter(|&more| more > 0) else {
            return true;
        };
        let next = this.next;
        let right = *self.nodes.get(next);
        if bytes > MAX_RANGE || right.state != NodeState::Free || more > right.size.into() {
            return false;
        }
        self.nodes.unlink(next);
        self.free -= more;
        self.nodes.get_mut(node).size = size as u32; // at most the largest range's
        let rest = right.size - more as u32;
        if rest == 0 {
            let this = self.nodes.get_mut(node);
            this.next = right.next;
            this.growable_end = right.growable_end;
            self.nodes.get_mut(right.next).previous = node;
            self.nodes.retire(next);
        } else {
            let right = self.nodes.get_mut(next);
            right.start += more;
            right.size = rest;
            self.nodes.link(next);
        }
        true
    }

    /// Returns where a range in use begins and where the memory behind it ends, in bytes, if only free bytes
    /// lie in between.
    pub(crate) fn end_of_memory_behind(&self, node: RangeId) -> Option<(u64, u64)> {
        let this = self.nodes.get(node);
        let mut next = self.nodes.get(this.next);
        if next.state == NodeState::Free {
            next = self.nodes.get(next.next);
        }
        // Only the end of a span has size 0.
        (next.size == 0).then_some((this.start << LOG_GRANULE, next.start << LOG_GRANULE))
    }

    /// Frees the bytes of a range in use beyond `bytes`, more than 0.
    pub(crate) fn shrink(&mut self, node: RangeId, bytes: u64) {
        let this = *self.nodes.get(node);
        let size = bytes.max(PAGE).div_ceil(GRANULE);
        if let Some(rest) = u64::from(this.size)
            .checked_sub(size)
            .filter(|&rest| rest > 0)
        {
            self.nodes.get_mut(node).size = size as u32; // less than it was
            // Adds it as a range in use and then frees it: only `free` coalesces.
            let start = this.start + size;
            let rest = self
                .nodes
                .insert_between(node, this.next, start, rest as u32);
            self.free(rest);
        }
    }
}
