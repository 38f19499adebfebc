//! Nodes change hands between the core and its shards.
//!
//! Where two shards have nodes in the same pair of cache lines, each change by one thread takes the lines from the other's
//! CPU. So a shard gets all nodes of a pair where it can.

use crate::ranges::nodes::{MORE, Nodes, RangeId};

/// At most so many nodes leave the list at once, since other threads wait for the core meanwhile.
const MOST_SORTED: usize = 64 * MORE;
/// A shard gets any nodes where so many more are vacant than in use: the table must not grow for ever.
const MOST_VACANT: usize = 16 * MORE;

impl Nodes {
    /// Returns another list of nodes in the same table, for a shard, without any.
    pub(in crate::ranges) fn split(&mut self) -> Self {
        // SAFETY: nodes change lists in `lend`, `give_back` and `take_over`, which have exclusive references
        // to both, and links lead to nodes of the same list. An index that comes from outside, to free or resize
        // a range, is used with the list that has the node: the heap keeps record of each shard's addresses.
        // Only unsafe code can free a range of its own making.
        let nodes = unsafe { self.nodes.split() };
        let mut other = Self::of(nodes);
        // Each change of a list writes to the sentinel, so no other list's node may be near.
        self.lend(&mut other);
        other.set_sentinel();
        other
    }

    /// Notes that `nodes` nodes of `other` are this list's now: vacant but in no list, or neighbours in memory.
    pub(in crate::ranges) fn take_over(&mut self, other: &mut Self, nodes: usize) {
        self.nodes.learn(&other.nodes);
        self.owned += nodes;
        self.count += nodes;
        other.owned -= nodes;
        other.count -= nodes;
    }

    /// Gives another list, a shard's, some vacant nodes.
    pub(in crate::ranges) fn lend(&mut self, other: &mut Self) {
        let mut found = self.spare.take(true);
        if found.is_none() {
            self.sort();
            found = self.spare.take(true);
        }
        let scattered = self.vacancies() > self.count + MOST_VACANT || !self.nodes.is_half_empty();
        if found.is_none() && scattered {
            found = self.spare.take(false);
        }
        let (batch, nodes) = found.unwrap_or_else(|| (self.extend() / MORE, u64::MAX));
        other.nodes.learn(&self.nodes);
        other.enlist(batch, nodes);
        let more = nodes.count_ones() as usize;
        other.owned += more;
        self.owned -= more;
    }

    /// Adds nodes of a batch to the list of vacant nodes.
    fn enlist(&mut self, batch: usize, mut nodes: u64) {
        while nodes != 0 {
            let bit = nodes.ilog2();
            nodes ^= 1 << bit;
            let index = batch * MORE + bit as usize;
            self.nodes[index].next = std::mem::replace(&mut self.vacant, RangeId::at(index));
        }
    }

    /// Adds spare nodes to the list; returns whether there were any.
    pub(super) fn use_spare(&mut self) -> bool {
        let found = self.spare.take(false);
        if let Some((batch, nodes)) = found {
            self.enlist(batch, nodes);
        }
        found.is_some()
    }

    /// Makes nodes of the list spare.
    #[cold]
    fn sort(&mut self) {
        for _ in 0..MOST_SORTED {
            let Some(node) = self.pop() else {
                return;
            };
            self.spare.put(node.index());
        }
    }

    fn pop(&mut self) -> Option<RangeId> {
        let node = self.vacant;
        (node != RangeId::NONE).then(|| {
            self.vacant = self.get(node).next;
            node
        })
    }

    /// Returns `some` vacant nodes of a shard to the core.
    pub(in crate::ranges) fn give_back(&mut self, core: &mut Self, some: usize) {
        for _ in 0..some {
            let Some(node) = self.pop() else {
                return;
            };
            core.spare.put(node.index());
            self.owned -= 1;
            core.owned += 1;
        }
    }
}

/// How many nodes a batch has, a word of the map.
pub(super) const BATCH: usize = u64::BITS as usize;
/// How many nodes a pair of lines has.
pub(super) const PAIR: usize = 4;
/// The first node of each pair of a batch.
const FIRST_OF_PAIRS: u64 = 0x1111_1111_1111_1111;

/// Vacant nodes of the core that are in no list.
pub(super) struct Spare {
    /// A word for each batch of the table, a bit for each node.
    batches: Vec<u64>,
    /// No batch before this one has a node here.
    first: usize,
}

impl Spare {
    pub(super) const fn new() -> Self {
        Self {
            batches: Vec::new(),
            first: 0,
        }
    }

    /// Puts the node with this index here.
    pub(super) fn put(&mut self, index: usize) {
        let (batch, bit) = (index / BATCH, index % BATCH);
        if batch >= self.batches.len() {
            self.batches.resize(batch + 1, 0);
        }
        self.batches[batch] |= 1 << bit;
        self.first = self.first.min(batch);
    }

    /// Takes the nodes of the first batch that has any, or any whole pair. Returns the batch, and a bit for each node.
    pub(super) fn take(&mut self, whole_pairs: bool) -> Option<(usize, u64)> {
        let choose = |nodes| if whole_pairs { pairs(nodes) } else { nodes };
        let rest = self.batches.get(self.first..).unwrap_or_default();
        let found = rest.iter().position(|&nodes| choose(nodes) != 0);
        let batch = self.first + found.unwrap_or(rest.len());
        if !whole_pairs {
            self.first = batch;
        }
        let nodes = choose(*self.batches.get(batch)?);
        self.batches[batch] &= !nodes;
        Some((batch, nodes))
    }
}

/// Returns the nodes of a batch that come in whole pairs.
const fn pairs(nodes: u64) -> u64 {
    let first = nodes & nodes >> 1 & nodes >> 2 & nodes >> 3 & FIRST_OF_PAIRS;
    first * ((1 << PAIR) - 1)
}

#[cfg(test)]
mod tests;
