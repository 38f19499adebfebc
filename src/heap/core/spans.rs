//! Adds memory to the ranges and removes it.

use std::ops::Range;

#[cfg(test)]
use super::nodes::NodeState;
use super::nodes::RangeId;
use super::ranges::{LOG_GRANULE, MAX_RANGE, Ranges};

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
            let left = if joins && !is_range_limit(part.start) {
                self.span_before(part.start)
            } else {
                None
            };
            self.add_part(part, left, joins);
        }
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
        if is_range_limit(end) {
            return;
        }
        let Some(&(right_first, right_last)) = self.spans.get(&end) else {
            return;
        };
        let Some(&(first, last)) = self.spans.get(&start) else {
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
        let (from, to) = (whole.start, whole.start + u64::from(whole.size));
        let (previous, next) = (whole.previous, whole.next);
        self.free -= end - start;
        self.total -= end - start;
        self.spans.remove(&at);
        // The memory left before the range, if any.
        match (previous == first, from == start) {
            (true, true) => self.nodes.retire(first),
            (_, left_over) => {
                let before = if left_over {
                    previous
                } else {
                    let size = (start - from) as u32;
                    let node = self.nodes.add(from, size, previous, RangeId::NONE);
                    self.nodes.get_mut(previous).next = node;
                    node
                };
                let end = self.nodes.add(start, 0, before, RangeId::NONE);
                let left = self.nodes.get_mut(before);
                left.next = end;
                left.growable_end = true;
                if !left_over {
                    self.nodes.link(before);
                }
                self.spans.insert(at, (first, end));
            }
        }
        // The memory left after it.
        match (next == last, to == end) {
            (true, true) => self.nodes.retire(last),
            (_, right_over) => {
                let first = self.nodes.add(end, 0, RangeId::NONE, next);
                self.nodes.get_mut(first).growable_end = whole.growable_end;
                self.nodes.get_mut(next).previous = first;
                self.spans.insert(end, (first, last));
                if !right_over {
                    let node = self.nodes.insert_before(next, end, (to - end) as u32);
                    self.nodes.link(node);
                }
            }
        }
        self.nodes.retire(node);
        true
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
                    assert!(!self.no_free_page || !self.has_page(node));
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
