//! Adds memory to the ranges and removes it.

use std::ops::Range;

use super::extents::{LOG_GRANULE, MAX_RANGE, Ranges, Span};
use super::nodes::{NodeState, RangeId};
use crate::piece::Extent;

/// The longest span, in granules.
const MOST: u64 = MAX_RANGE >> LOG_GRANULE;

/// Returns whether spans end here even if they join. Range limits do not depend on the order in which memory
/// was added, so growth can compute them.
const fn is_range_limit(granule: u64) -> bool {
    granule.is_multiple_of(MOST)
}

const fn range_limit_after(granule: u64) -> u64 {
    (granule / MOST + 1) * MOST
}

/// What a shard needs, whose segments are spans.
impl Ranges {
    /// Allocates a range of at least `bytes`, more than 0.
    #[inline(always)]
    pub(crate) fn allocate_in_shard(&mut self, bytes: u64) -> Option<Extent> {
        if self.needs_nodes() {
            None
        } else {
            self.allocate(bytes, 1, usize::MAX)
        }
    }

    /// Returns whether nothing can be allocated before the core [lends](super::Core::lend_nodes) nodes.
    #[inline]
    pub(crate) fn needs_nodes(&self) -> bool {
        self.nodes.vacancies() == 0
    }

    /// Iterates over the free ranges.
    pub(crate) fn free_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let free = self.all().filter(|(_, node)| node.is_none());
        free.map(|(range, _)| range)
    }

    /// Returns the start of each segment, in bytes, and whether it has no block.
    pub(crate) fn segments(&self) -> Vec<(u64, bool)> {
        let segment = |span: &Span| {
            let only = self.nodes.get(self.nodes.get(span.first).next);
            let is_empty = only.state == NodeState::Free && only.next == span.last;
            (span.start << LOG_GRANULE, is_empty)
        };
        self.spans.iter().map(segment).collect()
    }
}

impl Ranges {
    /// Adds memory, in bytes; with `joins` ranges may reach across its ends to adjacent memory that joins
    /// too. The memory must not have been added already.
    pub(super) fn add(&mut self, range: Range<u64>, joins: bool) {
        let mut start = range.start >> LOG_GRANULE;
        let end = range.end >> LOG_GRANULE;
        while start < end {
            let last = if joins {
                range_limit_after(start)
            } else {
                start + MOST
            };
            self.add_part(start..end.min(last), joins);
            start = end.min(last);
        }
    }

    /// Returns the bytes of the smallest span; `u64::MAX` without any.
    pub(super) fn least_span(&self) -> u64 {
        let spans = self.spans.iter();
        let sizes = spans.map(|span| self.nodes.get(span.last).start - span.start);
        sizes.min().map_or(u64::MAX, |least| least << LOG_GRANULE)
    }

    fn add_part(&mut self, part: Range<u64>, joins: bool) {
        let size = part.end - part.start;
        self.total += size;
        let mut at = self.spans_before(part.start);
        let left = at.checked_sub(1).map(|left| self.spans[left].last);
        let joins_at = |granule| joins && !is_range_limit(granule);
        if left.is_some_and(|last| self.nodes.get(last).start == part.start && joins_at(part.start))
        {
            at -= 1;
        } else {
            let first = self.nodes.add(part.start, 0, RangeId::NONE, RangeId::NONE);
            let last = self.nodes.add(part.start, 0, first, RangeId::NONE);
            let begin = self.nodes.get_mut(first);
            begin.next = last;
            begin.growable_end = joins;
            let span = Span {
                start: part.start,
                first,
                last,
                whole: RangeId::NONE,
            };
            self.spans.insert(at, span);
        }
        // Adds it as a used range and then frees it: only `free` coalesces.
        let last = self.spans[at].last;
        let node = self.nodes.insert_before(last, part.start, size as u32); // no more than a range may have
        self.nodes.get_mut(last).start = part.end;
        if joins_at(part.end)
            && self
                .spans
                .get(at + 1)
                .is_some_and(|right| right.start == part.end)
        {
            self.join_right(at);
        }
        self.free(node);
    }

    /// Merges the span at an index and the next one.
    fn join_right(&mut self, at: usize) {
        let right = self.spans.remove(at + 1);
        let last = std::mem::replace(&mut self.spans[at].last, right.last);
        let before = self.nodes.get(last).previous;
        let after = self.nodes.get(right.first).next;
        let left = self.nodes.get_mut(before);
        left.next = after;
        left.growable_end = false;
        self.nodes.get_mut(after).previous = before;
        self.nodes.retire(last);
        self.nodes.retire(right.first);
    }

    /// Removes memory, in bytes, if all of it is free; returns whether it did.
    pub(super) fn remove(&mut self, range: Range<u64>) -> bool {
        let (start, end) = (range.start >> LOG_GRANULE, range.end >> LOG_GRANULE);
        let Some(node) = self.free_range_around(start, end) else {
            return false;
        };
        let Some(at) = self.spans_before(start + 1).checked_sub(1) else {
            return false;
        };
        self.nodes.unlink(node);
        let whole = *self.nodes.get(node);
        let whole_end = whole.start + u64::from(whole.size);
        self.free -= end - start;
        self.total -= end - start;
        let span = self.spans.remove(at);
        // The memory becomes two empty nodes: the last of the span before it, and the first of the one behind it.
        let (left, before) = if whole.start == start {
            (node, whole.previous)
        } else {
            (self.nodes.insert_between(node, whole.next, start, 0), node)
        };
        let right = self.nodes.insert_between(left, whole.next, end, 0);
        let size = (whole_end - end) as u32;
        let rest = (size > 0).then(|| self.nodes.insert_between(right, whole.next, end, size));
        self.nodes.get_mut(left).size = 0;
        self.nodes.get_mut(left).next = RangeId::NONE;
        self.nodes.get_mut(right).previous = RangeId::NONE;
        self.nodes.get_mut(before).growable_end = true;
        if before == node {
            self.nodes.get_mut(node).size = (start - whole.start) as u32;
            self.nodes.link(node);
        }
        // Last, so that of two that fit equally the next allocation takes this one.
        if let Some(rest) = rest {
            self.nodes.link(rest);
        }
        let behind = Span {
            start: end,
            first: right,
            ..span
        };
        self.insert_span(at, behind);
        self.insert_span(at, Span { last: left, ..span });
        true
    }

    /// Inserts a span at an index, or retires its ends if nothing lies between them.
    fn insert_span(&mut self, at: usize, span: Span) {
        if self.nodes.get(span.first).next == span.last {
            self.nodes.retire(span.first);
            self.nodes.retire(span.last);
        } else {
            self.spans.insert(at, span);
        }
    }

    /// Returns the free range that contains everything from `start` to `end` granules.
    fn free_range_around(&self, start: u64, end: u64) -> Option<RangeId> {
        let size = u32::try_from(end - start).ok()?;
        self.nodes.at_least(size).find(|&node| {
            let node = self.nodes.get(node);
            node.start <= start && end <= node.start + u64::from(node.size)
        })
    }
}

#[cfg(test)]
impl Ranges {
    /// Checks all invariants of the tables; panics if one fails. `joins`: all memory joins.
    pub(super) fn check(&self, joins: bool) {
        let (mut free, mut total, mut ranges, mut free_nodes) = (0, 0, 0, 0);
        for &Span {
            start, first, last, ..
        } in &self.spans
        {
            let ends = [first, last].map(|node| *self.nodes.get(node));
            assert!(
                ends.iter()
                    .all(|end| end.size == 0 && end.state == NodeState::Used)
            );
            let (mut node, mut before, mut at) = (ends[0].next, first, start);
            assert_eq!(ends[0].start, start);
            let mut was_free = false;
            while node != last {
                let this = *self.nodes.get(node);
                assert_eq!((this.previous, this.start), (before, at));
                assert_eq!(this.growable_end, joins && this.next == last, "at {at}");
                assert!(this.size > 0);
                total += u64::from(this.size);
                let is_free = this.state == NodeState::Free;
                assert!(!(was_free && is_free), "two free ranges side by side");
                assert!(is_free || this.state == NodeState::Used);
                was_free = is_free;
                if is_free {
                    free += u64::from(this.size);
                    free_nodes += 1;
                    let mut listed = self.nodes.at_least(this.size);
                    assert!(listed.any(|other| other == node));
                }
                ranges += 1;
                at += u64::from(this.size);
                before = node;
                node = this.next;
            }
            assert_eq!((ends[1].previous, ends[1].start), (before, at));
        }
        assert_eq!((free, total), (self.free, self.total));
        assert_eq!(self.nodes.at_least(1).count(), free_nodes);
        assert_eq!(self.nodes.count, ranges + 2 * self.spans.len());
    }
}
