//! Ranges in use that become larger or smaller where they lie.

use super::nodes::{NodeId, State};
use super::ranges::{GRANULE, LOG_GRANULE, MAX_RANGE, Ranges};

impl Ranges {
    /// Makes a range in use one of at least `bytes` where it lies; whether there is room for that right
    /// behind it. It never becomes smaller by this.
    pub(super) fn extend(&mut self, node: NodeId, bytes: u64) -> bool {
        let this = self.nodes.get(node);
        let size = bytes.div_ceil(GRANULE);
        let Some(more) = size.checked_sub(this.size.into()).filter(|&more| more > 0) else {
            return true;
        };
        let next = this.next;
        let right = *self.nodes.get(next);
        if bytes > MAX_RANGE || right.state != State::Free || more > right.size.into() {
            return false;
        }
        self.nodes.unlink(next);
        self.free -= more;
        self.nodes.get_mut(node).size = size as u32; // at most the largest range's
        let rest = right.size - more as u32;
        if rest == 0 {
            let this = self.nodes.get_mut(node);
            this.next = right.next;
            this.edge = right.edge;
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

    /// Where a range in use begins, and where memory ends behind it, in bytes: only if nothing but free bytes
    /// lies in between.
    pub(super) fn end_of_memory_behind(&self, node: NodeId) -> Option<(u64, u64)> {
        let this = self.nodes.get(node);
        let mut next = self.nodes.get(this.next);
        if next.state == State::Free {
            next = self.nodes.get(next.next);
        }
        // Only the end of a stretch has no bytes.
        (next.size == 0).then_some((this.start << LOG_GRANULE, next.start << LOG_GRANULE))
    }

    /// Gives back what a range in use has beyond `bytes`, which are more than 0.
    pub(super) fn shrink(&mut self, node: NodeId, bytes: u64) {
        let this = *self.nodes.get(node);
        let size = bytes.div_ceil(GRANULE);
        if let Some(rest) = u64::from(this.size)
            .checked_sub(size)
            .filter(|&rest| rest > 0)
        {
            self.nodes.get_mut(node).size = size as u32; // less than it was
            // A range of its own, in use, which is then freed: freeing alone knows how to coalesce.
            let start = this.start + size;
            let rest = self
                .nodes
                .insert_between(node, this.next, start, rest as u32);
            self.free(rest);
        }
    }
}
