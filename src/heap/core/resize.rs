//! Resizes ranges in use in place.

use super::nodes::{NodeState, RangeId};
use super::ranges::{GRANULE, LOG_GRANULE, MAX_RANGE, Ranges};

impl Ranges {
    /// Grows a range in use to at least `bytes` in place; returns whether there is room right behind it.
    /// Never shrinks it.
    pub(super) fn extend(&mut self, node: RangeId, bytes: u64) -> bool {
        let this = self.nodes.get(node);
        let size = bytes.div_ceil(GRANULE);
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
    pub(super) fn shrink(&mut self, node: RangeId, bytes: u64) {
        let this = *self.nodes.get(node);
        let size = bytes.div_ceil(GRANULE);
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
