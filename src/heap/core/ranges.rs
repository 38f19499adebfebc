//! Ranges of the heap's memory, used and free, in the order of their offsets.
//!
//! Each range is a node, beside its neighbours in memory; a free one is in a bin of its size as well.
//! Nodes lie in tables of their own, never in the memory that they describe.

mod resize;

use std::collections::BTreeMap;
use std::ops::Range;

use super::bins::{Bins, Free};

/// The unit of sizes and offsets here, in bytes.
pub(in crate::heap) const GRANULE: u64 = 256;
const LOG_GRANULE: u32 = 8;

/// No range is larger: sizes are 32 bits of granules. Memory beyond lies in several stretches.
pub(in crate::heap) const MAX_RANGE: u64 = (u32::MAX as u64) << LOG_GRANULE;

/// Names a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::heap) struct NodeId(pub(super) u32);

impl NodeId {
    const NONE: Self = Self(u32::MAX);

    #[inline]
    fn index(self) -> usize {
        self.0 as usize
    }

    /// As a number, to keep it elsewhere.
    #[inline]
    pub(in crate::heap) const fn number(self) -> u32 {
        self.0
    }

    /// The node of that number.
    #[inline]
    pub(in crate::heap) const fn from_number(number: u32) -> Self {
        Self(number)
    }
}

/// A range in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::heap) struct Extent {
    /// In bytes from the heap's start.
    pub(in crate::heap) offset: u64,
    pub(in crate::heap) node: NodeId,
}

/// A range of a stretch; it ends where the next one starts. The last of a stretch is empty.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// In granules from the heap's start.
    start: u64,
    previous: NodeId,
    next: NodeId,
}

/// In place of a free node's place in its bin: the node is in use, or the empty first or last one of
/// a stretch.
const USED: u32 = u32::MAX;
/// The node is not in use at all.
const VACANT: u32 = u32::MAX - 1;

/// Who has which memory.
#[derive(Debug)]
pub(in crate::heap) struct Ranges {
    nodes: Vec<Node>,
    /// Of each node, its place in its bin, [`USED`] or [`VACANT`]. Apart from the nodes, since moves
    /// within bins touch these alone.
    places: Vec<u32>,
    vacant: Vec<NodeId>,
    bins: Bins,
    /// Memory without a gap or a border: from its start, its empty first and last nodes.
    stretches: BTreeMap<u64, (NodeId, NodeId)>,
    /// The address of offset 0, in granules: alignment is of addresses.
    origin: u64,
    free: u64,
    total: u64,
}

impl Ranges {
    /// No memory yet, of which offset 0 will be at the address `origin`, a multiple of the granule.
    pub(super) fn new(origin: u64) -> Self {
        Self {
            nodes: Vec::new(),
            places: Vec::new(),
            vacant: Vec::new(),
            bins: Bins::new(),
            stretches: BTreeMap::new(),
            origin: origin >> LOG_GRANULE,
            free: 0,
            total: 0,
        }
    }

    /// All memory, in bytes.
    pub(super) fn total(&self) -> u64 {
        self.total << LOG_GRANULE
    }

    /// What is free, in bytes.
    pub(super) fn free_bytes(&self) -> u64 {
        self.free << LOG_GRANULE
    }

    /// The largest free range, in bytes.
    pub(super) fn largest_free(&self) -> u64 {
        u64::from(self.bins.largest()) << LOG_GRANULE
    }

    /// What the tables take, in bytes.
    pub(super) fn metadata(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>()
            + (self.places.capacity() + self.vacant.capacity()) * size_of::<u32>()
            + self.bins.metadata()
    }

    /// Adds memory, in bytes; with `joins` ranges may reach across its borders to memory that is
    /// beside it and joins too. It must not be there already.
    pub(super) fn add(&mut self, range: Range<u64>, joins: bool) {
        let mut start = range.start >> LOG_GRANULE;
        let end = range.end >> LOG_GRANULE;
        while start < end {
            // No stretch is longer than a range may be.
            let most = MAX_RANGE >> LOG_GRANULE;
            let left = self.stretch_before(start).filter(|_| joins);
            let room = left.map_or(most, |first| most - (start - first));
            let part = match room {
                0 => start..end.min(start + most),
                room => start..end.min(start + room),
            };
            start = part.end;
            self.add_part(part, left.filter(|_| room > 0), joins);
        }
    }

    /// The start of the stretch that ends at `end` granules.
    fn stretch_before(&self, end: u64) -> Option<u64> {
        let (&start, &(_, last)) = self.stretches.range(..end).next_back()?;
        (self.nodes[last.index()].start == end).then_some(start)
    }

    fn add_part(&mut self, part: Range<u64>, left: Option<u64>, joins: bool) {
        let size = part.end - part.start;
        self.total += size;
        // As a used range first, which is then freed, so that freeing alone knows how to coalesce.
        let node = match left.and_then(|start| self.stretches.get(&start).copied()) {
            Some((_, last)) => {
                let node = self.insert_before(last, part.start);
                self.nodes[last.index()].start = part.end;
                node
            }
            None => {
                let first = self.vacant_node(part.start, NodeId::NONE, NodeId::NONE);
                let last = self.vacant_node(part.end, first, NodeId::NONE);
                self.nodes[first.index()].next = last;
                self.stretches.insert(part.start, (first, last));
                self.insert_before(last, part.start)
            }
        };
        if joins {
            self.join_right(part.end, left.unwrap_or(part.start));
        }
        self.free(node);
    }

    /// Makes the stretch that starts at `end`, if there is one, part of the one at `start`.
    fn join_right(&mut self, end: u64, start: u64) {
        let Some(&(right_first, right_last)) = self.stretches.get(&end) else {
            return;
        };
        let length = self.nodes[right_last.index()].start - start;
        if length > MAX_RANGE >> LOG_GRANULE {
            return;
        }
        let Some(&(first, last)) = self.stretches.get(&start) else {
            return;
        };
        self.stretches.remove(&end);
        let before = self.nodes[last.index()].previous;
        let after = self.nodes[right_first.index()].next;
        self.nodes[before.index()].next = after;
        self.nodes[after.index()].previous = before;
        self.retire(last);
        self.retire(right_first);
        self.stretches.insert(start, (first, right_last));
    }

    /// A used range of at least `bytes`, more than 0, at an address that is a multiple of `align`, a
    /// power of two.
    #[inline]
    pub(super) fn allocate(&mut self, bytes: u64, align: u64) -> Option<Extent> {
        if bytes > MAX_RANGE {
            return None;
        }
        let size = bytes.div_ceil(GRANULE) as u32;
        let free = match align > GRANULE {
            false => self.bins.find(size)?,
            true => return self.allocate_aligned(size, align >> LOG_GRANULE),
        };
        Some(self.take(free, size))
    }

    fn allocate_aligned(&mut self, size: u32, align: u64) -> Option<Extent> {
        // Where this fits, the block fits wherever in it the first multiple is.
        let ample = u64::from(size) + align - 1;
        let gap = |ranges: &Self, free: Free| {
            let start = ranges.nodes[free.node.index()].start + ranges.origin;
            start.wrapping_neg() & (align - 1)
        };
        let fits =
            |ranges: &Self, free: Free| gap(ranges, free) + u64::from(size) <= u64::from(free.size);
        let near = self.bins.find(size).filter(|&free| fits(self, free));
        let free = near.or_else(|| {
            u32::try_from(ample)
                .ok()
                .and_then(|size| self.bins.find(size))
        });
        let free = match free {
            Some(free) => free,
            None => self.bins.at_least(size).find(|&free| fits(self, free))?,
        };
        let gap = gap(self, free);
        if gap == 0 {
            return Some(self.take(free, size));
        }
        // The gap stays free under its node; what follows it becomes a node of its own.
        self.remove_from_bin(free);
        let next = self.nodes[free.node.index()].next;
        let start = self.nodes[free.node.index()].start;
        let node = self.insert_before(next, start + gap);
        self.insert_into_bin(free.node, gap as u32);
        let rest = free.size - gap as u32;
        self.insert_into_bin(node, rest);
        Some(self.take(Free { node, size: rest }, size))
    }

    /// Makes the first `size` granules of a free range a used one.
    #[inline]
    fn take(&mut self, free: Free, size: u32) -> Extent {
        self.remove_from_bin(free);
        self.free -= u64::from(size);
        let Node { start, next, .. } = self.nodes[free.node.index()];
        self.places[free.node.index()] = USED;
        if free.size > size {
            let rest = self.insert_before(next, start + u64::from(size));
            self.insert_into_bin(rest, free.size - size);
        }
        Extent {
            offset: start << LOG_GRANULE,
            node: free.node,
        }
    }

    /// Gives a used range back; its size in granules.
    #[inline]
    pub(super) fn free(&mut self, node: NodeId) -> u32 {
        let Node {
            start,
            mut previous,
            mut next,
        } = self.nodes[node.index()];
        let end = self.nodes[next.index()].start;
        let own = (end - start) as u32;
        self.free += u64::from(own);
        let mut size = own;
        if self.places[next.index()] < VACANT {
            let after = self.nodes[next.index()].next;
            let more = (self.nodes[after.index()].start - end) as u32;
            self.remove_from_bin(Free {
                node: next,
                size: more,
            });
            self.retire(next);
            size += more;
            next = after;
            self.nodes[next.index()].previous = node;
            self.nodes[node.index()].next = next;
        }
        let mut node = node;
        if self.places[previous.index()] < VACANT {
            let more = (start - self.nodes[previous.index()].start) as u32;
            self.remove_from_bin(Free {
                node: previous,
                size: more,
            });
            self.retire(node);
            size += more;
            std::mem::swap(&mut node, &mut previous);
            self.nodes[node.index()].next = next;
            self.nodes[next.index()].previous = node;
        }
        self.insert_into_bin(node, size);
        own
    }

    /// The size in bytes of the range in use that `node` is, if it begins at `offset`.
    #[cfg(test)]
    pub(super) fn used_at(&self, node: NodeId, offset: u64) -> Option<u64> {
        let this = self.nodes.get(node.index())?;
        let in_use = self.places[node.index()] == USED && this.start << LOG_GRANULE == offset;
        let end = self.nodes.get(this.next.index()).filter(|_| in_use)?.start;
        Some((end - this.start) << LOG_GRANULE).filter(|&bytes| bytes > 0)
    }

    /// Reads what freeing this node will read, so that the misses of many come at once.
    #[inline]
    pub(super) fn touch(&self, node: NodeId) -> u32 {
        let node = &self.nodes[node.index()];
        self.nodes[node.previous.index()].next.0 ^ self.nodes[node.next.index()].next.0
    }

    /// All ranges in the order of offsets, in bytes, each with its node if it is in use.
    pub(super) fn all(&self) -> impl Iterator<Item = (Range<u64>, Option<NodeId>)> {
        self.stretches.values().flat_map(move |&(first, last)| {
            let mut node = self.nodes[first.index()].next;
            std::iter::from_fn(move || {
                if node == last {
                    return None;
                }
                let this = node;
                let start = self.nodes[this.index()].start << LOG_GRANULE;
                node = self.nodes[this.index()].next;
                let end = self.nodes[node.index()].start << LOG_GRANULE;
                let used = (self.places[this.index()] == USED).then_some(this);
                Some((start..end, used))
            })
        })
    }

    /// The free bytes right before `end`, the end of a stretch, in bytes: what more memory there would
    /// add to.
    pub(super) fn free_before(&self, end: u64) -> u64 {
        let end = end >> LOG_GRANULE;
        let Some((_, &(_, last))) = self.stretches.range(..end).next_back() else {
            return 0;
        };
        if self.nodes[last.index()].start != end {
            return 0;
        }
        let node = self.nodes[last.index()].previous;
        match self.places[node.index()] < VACANT {
            true => (end - self.nodes[node.index()].start) << LOG_GRANULE,
            false => 0,
        }
    }

    /// The free bytes right after `start`, the start of a stretch, in bytes.
    pub(super) fn free_after(&self, start: u64) -> u64 {
        let start = start >> LOG_GRANULE;
        let Some(&(first, _)) = self.stretches.get(&start) else {
            return 0;
        };
        let node = self.nodes[first.index()].next;
        match self.places[node.index()] < VACANT {
            true => {
                let next = self.nodes[node.index()].next;
                (self.nodes[next.index()].start - start) << LOG_GRANULE
            }
            false => 0,
        }
    }

    /// Takes memory away, in bytes, if all of it is free; whether it was.
    pub(super) fn remove(&mut self, range: Range<u64>) -> bool {
        let (start, end) = (range.start >> LOG_GRANULE, range.end >> LOG_GRANULE);
        let Some(free) = self.free_range_around(start, end) else {
            return false;
        };
        let Some((&at, &(first, last))) = self.stretches.range(..=start).next_back() else {
            return false;
        };
        self.remove_from_bin(free);
        let from = self.nodes[free.node.index()].start;
        let to = from + u64::from(free.size);
        let Node { previous, next, .. } = self.nodes[free.node.index()];
        self.free -= end - start;
        self.total -= end - start;
        self.stretches.remove(&at);
        // What is left of the range and before it, if anything.
        match (previous == first, from == start) {
            (true, true) => self.retire(first),
            (_, left_over) => {
                let before = if left_over {
                    previous
                } else {
                    let node = self.vacant_node(from, previous, NodeId::NONE);
                    self.nodes[previous.index()].next = node;
                    self.insert_into_bin(node, (start - from) as u32);
                    node
                };
                let end = self.vacant_node(start, before, NodeId::NONE);
                self.nodes[before.index()].next = end;
                self.stretches.insert(at, (first, end));
            }
        }
        // And after it.
        match (next == last, to == end) {
            (true, true) => self.retire(last),
            (_, right_over) => {
                let first = self.vacant_node(end, NodeId::NONE, next);
                self.nodes[next.index()].previous = first;
                self.stretches.insert(end, (first, last));
                if !right_over {
                    let node = self.insert_before(next, end);
                    self.insert_into_bin(node, (to - end) as u32);
                }
            }
        }
        self.retire(free.node);
        true
    }

    /// The free range that has all from `start` to `end` granules.
    fn free_range_around(&self, start: u64, end: u64) -> Option<Free> {
        let size = u32::try_from(end - start).ok()?;
        self.bins.at_least(size).find(|free| {
            let from = self.nodes[free.node.index()].start;
            from <= start && end <= from + u64::from(free.size)
        })
    }

    #[inline]
    fn insert_into_bin(&mut self, node: NodeId, size: u32) {
        self.places[node.index()] = self.bins.insert(Free { node, size });
    }

    #[inline]
    fn remove_from_bin(&mut self, free: Free) {
        let place = self.places[free.node.index()];
        if let Some(moved) = self.bins.remove(free.size, place) {
            self.places[moved.index()] = place;
        }
    }

    /// A new node, in use, that starts at `start` and lies before `next`.
    #[inline]
    fn insert_before(&mut self, next: NodeId, start: u64) -> NodeId {
        let previous = self.nodes[next.index()].previous;
        let node = self.vacant_node(start, previous, next);
        self.nodes[previous.index()].next = node;
        self.nodes[next.index()].previous = node;
        node
    }

    #[inline]
    fn vacant_node(&mut self, start: u64, previous: NodeId, next: NodeId) -> NodeId {
        let node = Node {
            start,
            previous,
            next,
        };
        match self.vacant.pop() {
            Some(id) => {
                self.nodes[id.index()] = node;
                self.places[id.index()] = USED;
                id
            }
            None => {
                self.make_room();
                let id = NodeId(self.nodes.len() as u32);
                self.nodes.push(node);
                self.places.push(USED);
                id
            }
        }
    }

    /// The tables grow by an eighth: doubled, they would be half empty.
    #[inline]
    fn make_room(&mut self) {
        if self.nodes.len() == self.nodes.capacity() {
            let more = (self.nodes.len() / 8).max(1024);
            self.nodes.reserve_exact(more);
            self.places.reserve_exact(more);
        }
    }

    #[inline]
    fn retire(&mut self, node: NodeId) {
        self.places[node.index()] = VACANT;
        self.vacant.push(node);
    }
}

#[cfg(test)]
impl Ranges {
    /// Whether everything that must be true of the tables is; panics otherwise.
    pub(super) fn check(&self) {
        let (mut free, mut total, mut used_nodes, mut free_nodes) = (0, 0, 0, 0);
        for (&start, &(first, last)) in &self.stretches {
            assert_eq!(self.nodes[first.index()].start, start);
            let mut node = self.nodes[first.index()].next;
            let mut before = first;
            let mut was_free = false;
            assert_eq!(self.nodes[node.index()].start, start);
            while node != last {
                let this = self.nodes[node.index()];
                assert_eq!(this.previous, before);
                let size = self.nodes[this.next.index()].start - this.start;
                assert!(size > 0);
                total += size;
                let place = self.places[node.index()];
                let is_free = place < VACANT;
                assert!(!(was_free && is_free), "two free ranges side by side");
                assert!(is_free || place == USED);
                was_free = is_free;
                if is_free {
                    free += size;
                    free_nodes += 1;
                    let size = size as u32;
                    assert_eq!(self.bins.at(size, place), Some(Free { node, size }));
                }
                used_nodes += 1;
                before = node;
                node = this.next;
            }
            assert_eq!(self.nodes[last.index()].previous, before);
        }
        assert_eq!((free, total), (self.free, self.total));
        assert_eq!(self.bins.at_least(1).count(), free_nodes);
        let live = self.nodes.len() - self.vacant.len();
        assert_eq!(live, used_nodes + 2 * self.stretches.len());
    }
}
