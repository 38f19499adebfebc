//! The table of ranges: each is a node linked to its neighbours in memory; free ones are in lists by size.

use std::hint::select_unpredictable;
use std::io;

use super::bins::{self, GROWABLE_END, Occupied};
use super::table::{Ahead, View};
use lend::{BATCH, Spare};

mod lend;

/// The index of a range's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RangeId(u32);

impl RangeId {
    /// The index of no range.
    pub(super) const NONE: Self = Self(0);

    const fn at(index: usize) -> Self {
        Self(index as u32)
    }

    #[inline]
    const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the index as a number below 2³¹, to store it elsewhere.
    #[inline]
    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    /// Returns the node with that number.
    #[inline]
    pub(crate) const fn from_number(number: u32) -> Self {
        Self(number)
    }
}

/// The extent that a free range must have room for, in granules.
#[derive(Clone, Copy)]
pub(super) struct Need {
    pub(super) size: u32,
    /// A power of two.
    pub(super) align: u64,
    /// The address of offset 0, which alignment applies to; less than `align`.
    pub(super) origin: u64,
}

impl Need {
    /// Returns the granules in a range before its first multiple of the alignment.
    pub(super) fn gap(&self, node: &Node) -> u64 {
        (node.start + self.origin).wrapping_neg() & (self.align - 1)
    }

    fn fits(&self, node: &Node) -> bool {
        self.gap(node) + u64::from(self.size) <= u64::from(node.size)
    }
}

/// The kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeState {
    /// A range in use, or the empty first or last node of a span.
    Used,
    /// A free range, in a list.
    Free,
    /// An unused node.
    Vacant,
}

/// A range. Two nodes share a cache line, and none lies in two.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(super) struct Node {
    /// In granules from the heap's start.
    pub(super) start: u64,
    /// In granules.
    pub(super) size: u32,
    pub(super) state: NodeState,
    /// Whether more memory may be added right behind it. For a span's first node, which is empty: whether
    /// it may be added in front.
    pub(super) growable_end: bool,
    /// The list of a free range.
    pub(super) bin: u16,
    /// The range before it in memory.
    pub(super) previous: RangeId,
    /// The range after it in memory; for a vacant node, the next vacant one.
    pub(super) next: RangeId,
    /// Its neighbours in its list.
    before: RangeId,
    pub(super) after: RangeId,
}

const _: () = assert!(size_of::<Node>() == 32);

const VACANT: Node = Node {
    start: 0,
    size: 0,
    state: NodeState::Vacant,
    growable_end: false,
    bin: 0,
    previous: RangeId::NONE,
    next: RangeId::NONE,
    before: RangeId::NONE,
    after: RangeId::NONE,
};

/// How many nodes are added at once: half a kernel page of 4 KiB.
const MORE: usize = BATCH;

/// All nodes, or a shard's, in one common table, so that nodes keep their indexes when they
/// move between the two.
pub(crate) struct Nodes {
    /// The core alone adds nodes to the table; it [lends](Self::lend) some to shards.
    nodes: View<Node>,
    /// The end of each bin's list: a sentinel that can be read and written like any other node.
    pub(super) none: RangeId,
    /// The first of each bin's list.
    pub(super) heads: Box<[RangeId; GROWABLE_END + 1]>,
    vacant: RangeId,
    pub(super) occupied: Occupied,
    spare: Spare,
    /// How many nodes there are, without the sentinel, and how many of them are not vacant.
    owned: usize,
    pub(super) count: usize,
}

impl Nodes {
    /// Creates a table of at most `most` nodes, without any.
    ///
    /// # Errors
    /// The kernel's error if it has no addresses for that many.
    pub(super) fn new(most: usize) -> io::Result<Self> {
        let most = most.saturating_add(2).next_multiple_of(MORE);
        let mut this = Self::of(View::new(most)?);
        this.set_sentinel();
        Ok(this)
    }

    fn of(nodes: View<Node>) -> Self {
        Self {
            nodes,
            none: RangeId::NONE,
            heads: Box::new([RangeId::NONE; GROWABLE_END + 1]),
            vacant: RangeId::NONE,
            occupied: Occupied::new(),
            spare: Spare::new(),
            owned: 0,
            count: 0,
        }
    }

    fn set_sentinel(&mut self) {
        self.none = self.add(0, 0, RangeId::NONE, RangeId::NONE);
        self.heads.fill(self.none);
        (self.owned, self.count) = (self.owned - 1, 0);
    }

    /// Returns how many nodes are vacant.
    #[inline]
    pub(super) fn vacancies(&self) -> usize {
        self.owned - self.count
    }

    #[inline]
    pub(super) fn get(&self, node: RangeId) -> &Node {
        &self.nodes[node.index()]
    }

    #[inline]
    pub(super) fn get_mut(&mut self, node: RangeId) -> &mut Node {
        &mut self.nodes[node.index()]
    }

    /// Returns whether there is such a node.
    #[cfg(test)]
    pub(super) fn has(&self, node: RangeId) -> bool {
        node.index() < self.nodes.len()
    }

    /// Adds a node that is in use and in no list.
    #[inline(always)]
    pub(super) fn add(
        &mut self,
        start: u64,
        size: u32,
        previous: RangeId,
        next: RangeId,
    ) -> RangeId {
        if self.vacant == RangeId::NONE {
            self.add_vacant();
        }
        let id = self.vacant;
        // Word by word: writing the whole node would go through memory in pieces that store forwarding cannot
        // serve.
        let node = &mut self.nodes[id.index()];
        self.vacant = node.next;
        node.start = start;
        node.size = size;
        node.state = NodeState::Used;
        node.growable_end = false;
        node.previous = previous;
        node.next = next;
        self.count += 1;
        id
    }

    #[cold]
    #[inline(never)]
    fn add_vacant(&mut self) {
        if !self.use_spare() {
            // Index 0 is no range's.
            self.vacant = RangeId::at(self.extend().max(1));
        }
    }

    /// Adds a batch to the table, linked but in no list; returns its index.
    fn extend(&mut self) -> usize {
        let first = self.nodes.len();
        self.nodes.extend(MORE, |index| Node {
            next: RangeId::at(index + 1),
            ..VACANT
        });
        self.nodes[first + MORE - 1].next = RangeId::NONE;
        self.owned += if first == 0 { MORE - 1 } else { MORE };
        first
    }

    /// Returns the part of the table to populate so that `more` nodes can be added.
    pub(crate) fn ahead(&self, more: usize) -> Option<Ahead> {
        self.nodes.ahead(more.saturating_sub(self.vacancies()))
    }

    /// Notes that a part is populated.
    pub(crate) fn populated(&mut self, ahead: &Ahead) {
        self.nodes.populated(ahead);
    }

    /// Adds a node between `next` and the one before it.
    #[inline]
    pub(super) fn insert_before(&mut self, next: RangeId, start: u64, size: u32) -> RangeId {
        self.insert_between(self.get(next).previous, next, start, size)
    }

    /// Adds a node between two neighbours. If the first one was at a growable end, the new one is
    /// instead.
    #[inline(always)]
    pub(super) fn insert_between(
        &mut self,
        previous: RangeId,
        next: RangeId,
        start: u64,
        size: u32,
    ) -> RangeId {
        let node = self.add(start, size, previous, next);
        // Dereferences once: otherwise the table's address is loaded again after each write to it.
        let mut nodes = self.nodes.elements();
        let before = &mut nodes[previous.index()];
        before.next = node;
        let growable_end = std::mem::take(&mut before.growable_end);
        nodes[next.index()].previous = node;
        nodes[node.index()].growable_end = growable_end;
        node
    }

    /// Makes a node that is in no list vacant.
    #[inline]
    pub(super) fn retire(&mut self, node: RangeId) {
        self.count -= 1;
        let vacant = std::mem::replace(&mut self.vacant, node);
        let node = self.get_mut(node);
        node.state = NodeState::Vacant;
        node.next = vacant;
    }

    /// Puts a node in the list of its size, or in the list of growable ends.
    #[inline(always)]
    pub(super) fn link(&mut self, node: RangeId) {
        let mut nodes = self.nodes.elements();
        let this = &nodes[node.index()];
        let bin = select_unpredictable(this.growable_end, GROWABLE_END, bins::bin_of(this.size));
        let first = std::mem::replace(&mut self.heads[bin], node);
        nodes[first.index()].before = node;
        let this = &mut nodes[node.index()];
        this.before = self.none;
        this.after = first;
        this.state = NodeState::Free;
        this.bin = bin as u16;
        self.occupied.set(bin);
    }

    /// Takes a node out of its list: it is in use.
    #[inline(always)]
    pub(super) fn unlink(&mut self, node: RangeId) {
        let mut nodes = self.nodes.elements();
        let this = &mut nodes[node.index()];
        let (before, after, bin) = (this.before, this.after, usize::from(this.bin));
        this.state = NodeState::Used;
        // Without a branch, which would be unpredictable; so this also writes to the sentinel.
        nodes[after.index()].before = before;
        nodes[before.index()].after = after;
        let first = before == self.none;
        let head = &mut self.heads[bin];
        *head = select_unpredictable(first, after, *head);
        self.occupied.reset_if(bin, first & (after == self.none));
    }

    /// Returns a free node of at least `size` granules, more than 0: the last freed of its own bin if that
    /// fits; otherwise one of the next bin that has any, growable ends last. May miss one in its own bin or at
    /// a growable end.
    #[inline(always)]
    pub(super) fn pick(&self, size: u32) -> Option<RangeId> {
        let own = bins::bin_of(size);
        let first = self.heads[own];
        // Looks both up and chooses one without a branch, which would be unpredictable.
        let next = self.occupied.next(own + 1);
        let next = next.map_or(self.none, |bin| self.heads[bin]);
        let found = select_unpredictable(self.get(first).size >= size, first, next);
        // Not if there is none, and not always at a growable end.
        (self.get(found).size >= size).then_some(found)
    }

    /// Returns a free range that fits, at a growable end last. Searches at most `looks` ranges, by ascending bins, if
    /// [`pick`](Self::pick) finds none.
    pub(super) fn find(&self, need: Need, looks: usize) -> Option<RangeId> {
        // A range of this size has room for the block at the first multiple of `align`, wherever that lies.
        let ample = u32::try_from(u64::from(need.size) + need.align - 1);
        let fits = |&node: &RangeId| need.fits(self.get(node));
        let near = self.pick(need.size).filter(fits);
        near.or_else(|| self.pick(ample.ok()?))
            .or_else(|| self.listed_from(need.size).take(looks).find(fits))
    }

    /// Iterates over the nodes of a bin, the latest first.
    fn list(&self, bin: usize) -> impl Iterator<Item = RangeId> {
        let mut node = self.heads[bin];
        std::iter::from_fn(move || {
            let this = node;
            node = self.get(this).after;
            (this != self.none).then_some(this)
        })
    }

    /// Iterates over the free nodes of a size's bin and all later ones.
    fn listed_from(&self, size: u32) -> impl Iterator<Item = RangeId> {
        let mut from = bins::bin_of(size);
        let bins = std::iter::from_fn(move || {
            let bin = self.occupied.next(from)?;
            from = bin + 1;
            Some(bin)
        });
        bins.flat_map(|bin| self.list(bin))
    }

    /// Iterates over the free nodes of at least `size` granules, by ascending bins.
    pub(super) fn at_least(&self, size: u32) -> impl Iterator<Item = RangeId> {
        let nodes = self.listed_from(size);
        nodes.filter(move |&node| self.get(node).size >= size)
    }

    /// Returns the size of the largest among the first `looks` nodes of the last bin and as many at growable
    /// ends.
    pub(super) fn largest(&self, looks: usize) -> u32 {
        let bins = self.occupied.last().into_iter().chain([GROWABLE_END]);
        let nodes = bins.flat_map(|bin| self.list(bin).take(looks));
        nodes.map(|node| self.get(node).size).max().unwrap_or(0)
    }

    /// Returns the table's size, in bytes.
    pub(super) fn metadata(&self) -> usize {
        self.nodes.bytes() + size_of::<Occupied>() + size_of_val(&*self.heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_used_again() {
        let mut nodes = Nodes::new(1 << 20).unwrap();
        let add = |nodes: &mut Nodes| nodes.add(0, 1, RangeId::NONE, RangeId::NONE);
        let (a, b) = (add(&mut nodes), add(&mut nodes));
        assert_ne!(a, b);
        nodes.retire(a);
        nodes.retire(b);
        assert_eq!((nodes.get(b).state, nodes.count), (NodeState::Vacant, 0));
        assert_eq!((add(&mut nodes), add(&mut nodes)), (b, a));
        assert!(add(&mut nodes).index() > b.index());
        assert_eq!(nodes.count, 3);
    }
}
