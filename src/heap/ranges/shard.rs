//! A thread's own part of the memory: segments, ranges of the core that are divided into blocks without it.
//!
//! ```text
//! core:   … ─ in use ─┬─────── segment, in use ────────┬─ free ─ …
//! shard:        first ├─ in use ─┬─ free ─┬─ in use ───┤ last
//! ```
//!
//! A shard's nodes lie in the core's table. So a segment can return to the core at any time, with blocks in
//! use: its nodes take the place of the one node that it was, and free memory at its ends joins the free memory
//! beside it. No block has to be freed first, and no block changes.

use std::ops::Range;

use super::extents::{LOG_GRANULE, Ranges, Span};
use super::nodes::{Node, NodeState, RangeId};
use crate::classes::PAGE;
use crate::piece::Extent;

/// How many vacant nodes a shard keeps when it returns segments. Each time that it needs more, it visits the core.
const NODES: usize = 256;
/// How many vacant nodes a shard has at least before it gets a segment, which takes three at first.
const NODES_FOR_SEGMENT: usize = 8;

/// A thread's segments, each a span. It belongs to the core that made it.
pub(crate) struct Shard {
    ranges: Ranges,
}

impl Shard {
    /// Allocates a range of at least `bytes`, more than 0.
    #[inline(always)]
    pub(crate) fn allocate(&mut self, bytes: u64) -> Option<Extent> {
        if self.needs_nodes() {
            None
        } else {
            self.ranges.allocate(bytes.max(PAGE), 1, usize::MAX)
        }
    }

    /// Returns whether nothing can be allocated before the core [lends](super::Core::lend_nodes) nodes.
    #[inline]
    pub(crate) fn needs_nodes(&self) -> bool {
        self.ranges.nodes.vacancies() == 0
    }

    /// Frees a range of this shard; returns whether it was in use.
    #[inline(always)]
    pub(crate) fn free(&mut self, node: RangeId) -> bool {
        self.ranges.free(node)
    }

    /// Grows a range in use to at least `bytes` in place; returns whether there was room behind it.
    pub(crate) fn extend(&mut self, node: RangeId, bytes: u64) -> bool {
        self.ranges.extend(node, bytes.max(PAGE))
    }

    /// Frees the bytes of a range in use beyond `bytes`; without a node for it, when the range is freed.
    pub(crate) fn shrink(&mut self, node: RangeId, bytes: u64) {
        if !self.needs_nodes() {
            self.ranges.shrink(node, bytes.max(PAGE));
        }
    }

    /// Returns the free bytes.
    #[inline]
    pub(crate) fn free_bytes(&self) -> u64 {
        self.ranges.free_bytes()
    }

    /// Returns the bytes of all segments.
    pub(crate) fn total(&self) -> u64 {
        self.ranges.total()
    }

    /// Iterates over the free ranges.
    pub(crate) fn free_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let free = self.ranges.all().filter(|(_, node)| node.is_none());
        free.map(|(range, _)| range)
    }

    /// Returns the start of each segment, in bytes, and whether it has no block.
    pub(crate) fn segments(&self) -> Vec<(u64, bool)> {
        let nodes = &self.ranges.nodes;
        let segment = |span: &Span| {
            let only = nodes.get(nodes.get(span.first).next);
            let is_empty = only.state == NodeState::Free && only.next == span.last;
            (span.start << LOG_GRANULE, is_empty)
        };
        self.ranges.spans.iter().map(segment).collect()
    }
}

impl Shard {
    /// Creates a shard without memory, of the core with these ranges.
    pub(super) fn new(core: &mut Ranges) -> Self {
        Self {
            ranges: core.split(),
        }
    }

    /// Gets vacant nodes, more for a shard with many.
    pub(super) fn borrow_nodes(&mut self, core: &mut Ranges) {
        let own = &mut self.ranges.nodes;
        let enough = own.vacancies() + (NODES / 4).max(own.count / 8);
        while own.vacancies() < enough {
            core.nodes.lend(own);
        }
    }

    /// Returns the vacant nodes of a shard without segments.
    pub(super) fn end(&mut self, core: &mut Ranges) {
        let vacant = self.ranges.nodes.vacancies();
        self.ranges.nodes.give_back(&mut core.nodes, vacant);
    }

    /// Adds a segment, a range in use of the core.
    pub(super) fn add(&mut self, core: &mut Ranges, node: RangeId, place: Range<u64>) {
        if self.ranges.nodes.vacancies() < NODES_FOR_SEGMENT {
            self.borrow_nodes(core);
        }
        let start = place.start >> LOG_GRANULE;
        self.ranges.add(place, false);
        if let Some(at) = self.ranges.span_at(start) {
            self.ranges.spans[at].whole = node;
        }
    }

    /// Returns the segment that starts at `start` bytes to the core, with its blocks; returns its place.
    pub(super) fn give_back(&mut self, core: &mut Ranges, start: u64) -> Option<Range<u64>> {
        let own = &mut self.ranges;
        let at = own.span_at(start >> LOG_GRANULE)?;
        let Span {
            start,
            first,
            last,
            whole,
        } = own.spans.remove(at);
        let (mut free, mut taken) = (Vec::new(), 0);
        let head = own.nodes.get(first).next;
        let mut at = head;
        while at != last {
            let node = *own.nodes.get(at);
            if node.state == NodeState::Free {
                own.nodes.unlink(at);
                own.free -= u64::from(node.size);
                free.push(at);
            }
            (at, taken) = (node.next, taken + 1);
        }
        let Node {
            start: end,
            previous: tail,
            ..
        } = *own.nodes.get(last);
        own.total -= end - start;
        own.nodes.retire(first);
        own.nodes.retire(last);
        let nodes = &mut core.nodes;
        nodes.take_over(&mut own.nodes, taken);
        let vacant = own.nodes.vacancies().saturating_sub(NODES);
        own.nodes.give_back(nodes, vacant);
        // The segment's nodes take the place of the one that it was in the core.
        let of = *nodes.get(whole);
        nodes.get_mut(of.previous).next = head;
        nodes.get_mut(head).previous = of.previous;
        nodes.get_mut(of.next).previous = tail;
        let tail = nodes.get_mut(tail);
        (tail.next, tail.growable_end) = (of.next, of.growable_end);
        nodes.retire(whole);
        // Only `free` coalesces.
        for node in free {
            core.free(node);
        }
        Some(start << LOG_GRANULE..end << LOG_GRANULE)
    }
}

#[cfg(test)]
impl Shard {
    /// Checks all invariants of the tables; panics if one fails.
    pub(super) fn check(&self) {
        self.ranges.check(false);
    }
}

#[cfg(test)]
mod tests;
