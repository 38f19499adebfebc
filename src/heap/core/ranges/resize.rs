//! Ranges in use that become larger or smaller where they lie.

use super::{GRANULE, LOG_GRANULE, MAX_RANGE, NodeId, Ranges, VACANT};
use crate::heap::core::bins::Free;

impl Ranges {
    /// Makes a range in use one of at least `bytes` where it lies; whether there is room for that right
    /// behind it. It never becomes smaller by this.
    pub(in crate::heap::core) fn extend(&mut self, node: NodeId, bytes: u64) -> bool {
        let size = bytes.div_ceil(GRANULE);
        let start = self.nodes[node.index()].start;
        let next = self.nodes[node.index()].next;
        let end = self.nodes[next.index()].start;
        let Some(more) = (start + size).checked_sub(end).filter(|&more| more > 0) else {
            return true;
        };
        if size > MAX_RANGE >> LOG_GRANULE || self.places[next.index()] >= VACANT {
            return false;
        }
        let after = self.nodes[next.index()].next;
        let room = self.nodes[after.index()].start - end;
        if more > room {
            return false;
        }
        self.remove_from_bin(Free {
            node: next,
            size: room as u32,
        });
        self.free -= more;
        if more == room {
            self.nodes[node.index()].next = after;
            self.nodes[after.index()].previous = node;
            self.retire(next);
        } else {
            self.nodes[next.index()].start = end + more;
            self.insert_into_bin(next, (room - more) as u32);
        }
        true
    }

    /// Gives back what a range in use has beyond `bytes`, which are more than 0.
    pub(in crate::heap::core) fn shrink(&mut self, node: NodeId, bytes: u64) {
        let next = self.nodes[node.index()].next;
        let end = self.nodes[node.index()].start + bytes.div_ceil(GRANULE);
        if end < self.nodes[next.index()].start {
            // A range of its own, in use, which is then freed: freeing alone knows how to coalesce.
            let rest = self.insert_before(next, end);
            self.free(rest);
        }
    }
}
