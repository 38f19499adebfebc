//! Adds memory to the ranges and removes it.

use std::ops::Range;

use super::extents::{LOG_GRANULE, MAX_RANGE, Ranges};
#[cfg(test)]
use super::nodes::NodeState;
use super::nodes::RangeId;

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
            let part = start..end.min(last);
            start = part.end;
            let joins_left = joins && !is_range_limit(part.start);
            let left = self.span_before(part.start).filter(|_| joins_left);
            self.add_part(part, left, joins);
        }
    }

    /// Returns the bytes of the smallest span; `u64::MAX` without any.
    pub(super) fn least_span(&self) -> u64 {
        let spans = self.spans.iter();
        let sizes = spans.map(|(start, &(_, last))| self.nodes.get(last).start - start);
        sizes.min().map_or(u64::MAX, |least| least << LOG_GRANULE)
    }

    /// Returns the start of the span that ends at `end` granules.
    fn span_before(&self, end: u64) -> Option<u64> {
        let (&start, &(_, last)) = self.spans.range(..end).next_back()?;
        (self.nodes.get(last).start == end).then_some(start)
    }

    fn add_part(&mut self, part: Range<u64>, left: Option<u64>, joins: bool) {
        let size = part.end - part.start;
        self.total += size;
        let size = size as u32; // no more than a range may have
        // Adds it as a used range and then frees it: only `free` coalesces.
        let node = match left.and_then(|start| self.spans.get(&start).copied()) {
            Some((_, last)) => {
                let node = self.nodes.insert_before(last, part.start, size);
                self.nodes.get_mut(last).start = part.end;
                node
            }
            None => {
                let first = self.nodes.add(part.start, 0, RangeId::NONE, RangeId::NONE);
                let last = self.nodes.add(part.end, 0, first, RangeId::NONE);
                let begin = self.nodes.get_mut(first);
                begin.next = last;
                begin.growable_end = joins;
                self.spans.insert(part.start, (first, last));
                self.nodes.insert_before(last, part.start, size)
            }
        };
        if joins {
            self.join_right(part.end, left.unwrap_or(part.start));
        }
        self.free(node);
    }

    /// Merges the span that starts at `end`, if there is one, into the one at `start`.
    fn join_right(&mut self, end: u64, start: u64) {
        let (left, right) = (self.spans.get(&start), self.spans.get(&end));
        let (false, Some(&(first, last)), Some(&(right_first, right_last))) =
            (is_range_limit(end), left, right)
        else {
            return;
        };
        self.spans.remove(&end);
        let before = self.nodes.get(last).previous;
        let after = self.nodes.get(right_first).next;
        let left = self.nodes.get_mut(before);
        left.next = after;
        left.growable_end = false;
        self.nodes.get_mut(after).previous = before;
        self.nodes.retire(last);
        self.nodes.retire(right_first);
        self.spans.insert(start, (first, right_last));
    }

    /// Removes memory, in bytes, if all of it is free; returns whether it did.
    pub(super) fn remove(&mut self, range: Range<u64>) -> bool {
        let (start, end) = (range.start >> LOG_GRANULE, range.end >> LOG_GRANULE);
        let Some(node) = self.free_range_around(start, end) else {
            return false;
        };
        let Some((&at, &(first, last))) = self.spans.range(..=start).next_back() else {
            return false;
        };
        self.nodes.unlink(node);
        let whole = *self.nodes.get(node);
        let whole_end = whole.start + u64::from(whole.size);
        self.free -= end - start;
        self.total -= end - start;
        self.spans.remove(&at);
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
        self.set_span(at, first, left);
        self.set_span(end, right, last);
        true
    }

    /// Notes a span, or retires its ends if nothing lies between them.
    fn set_span(&mut self, start: u64, first: RangeId, last: RangeId) {
        if self.nodes.get(first).next == last {
            self.nodes.retire(first);
            self.nodes.retire(last);
        } else {
            self.spans.insert(start, (first, last));
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
        for (&start, &(first, last)) in &self.spans {
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
