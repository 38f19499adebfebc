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
use super::nodes::{NodeState, RangeId};
use crate::classes::PAGE;
use crate::piece::Extent;

/// A thread's segments, each a span. It belongs to the core that made it.
pub(crate) struct Shard {
    pub(super) ranges: Ranges,
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

#[cfg(test)]
impl Shard {
    /// Checks all invariants of the tables; panics if one fails.
    pub(super) fn check(&self) {
        self.ranges.check(false);
    }
}

#[cfg(test)]
mod tests;
