//! Vacant nodes in the order of the table, for shards.
//!
//! Two nodes share a cache line, and processors fetch lines in pairs. Where the shards of two threads have nodes in
//! the same pair, each change by one thread takes the lines from the other's cache. So a shard gets all nodes of a
//! pair, where it can.

use super::{MORE, Nodes, RangeId};

/// How many nodes a pair of lines has.
const PAIR: usize = 4;
/// The first node of each pair of a batch.
const FIRST_OF_PAIRS: u64 = 0x1111_1111_1111_1111;
/// At most so many nodes leave the list at once, since other threads wait for the core meanwhile.
const MOST_SORTED: usize = 64 * MORE;
/// A shard gets any nodes where so many more are vacant than in use: the table must not grow for ever.
const MOST_VACANT: usize = 16 * MORE;

const _: () = assert!(MORE == u64::BITS as usize);

/// Vacant nodes of the core that are in no list.
pub(super) struct Spare {
    /// A word for each batch of the table, a bit for each node.
    batches: Vec<u64>,
    /// No batch before this one has a node here.
    first: usize,
    /// No batch before this one has a whole pair here.
    first_pair: usize,
}

impl Spare {
    pub(super) const fn new() -> Self {
        Self {
            batches: Vec::new(),
            first: 0,
            first_pair: 0,
        }
    }

    fn put(&mut self, node: RangeId) {
        let (batch, bit) = (node.index() / MORE, node.index() % MORE);
        if batch >= self.batches.len() {
            self.batches.resize(batch + 1, 0);
        }
        self.batches[batch] |= 1 << bit;
        self.first = self.first.min(batch);
        if pairs(self.batches[batch]) != 0 {
            self.first_pair = self.first_pair.min(batch);
        }
    }

    /// Takes the nodes of the first batch that has any, or any whole pair.
    fn take(&mut self, whole_pairs: bool) -> Option<(usize, u64)> {
        let first = match whole_pairs {
            true => &mut self.first_pair,
            false => &mut self.first,
        };
        let choose = |nodes| if whole_pairs { pairs(nodes) } else { nodes };
        let rest = self.batches.get_mut(*first..).unwrap_or_default();
        let found = rest.iter().position(|&nodes| choose(nodes) != 0);
        *first += found.unwrap_or(rest.len());
        let batch = rest.get_mut(found?)?;
        let nodes = choose(*batch);
        *batch &= !nodes;
        Some((*first, nodes))
    }
}

/// Returns the nodes of a batch that come in whole pairs.
const fn pairs(nodes: u64) -> u64 {
    let first = nodes & nodes >> 1 & nodes >> 2 & nodes >> 3 & FIRST_OF_PAIRS;
    first * ((1 << PAIR) - 1)
}

impl Nodes {
    /// Gives another list, a shard's, some vacant nodes.
    pub(in crate::core) fn lend(&mut self, other: &mut Self) {
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
        self.forget_used();
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
            self.spare.put(node);
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
    pub(in crate::core) fn give_back(&mut self, core: &mut Self, some: usize) {
        for _ in 0..some {
            let Some(node) = self.pop() else {
                return;
            };
            core.spare.put(node);
            self.owned -= 1;
            core.owned += 1;
        }
    }
}

#[cfg(test)]
mod tests;
