//! A bit map of vacant nodes, where those that fill whole cache lines are found.
//!
//! Two nodes share a line, and processors fetch lines in pairs.

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

    /// Puts the node with this index here.
    pub(super) fn put(&mut self, index: usize) {
        let (batch, bit) = (index / BATCH, index % BATCH);
        if batch >= self.batches.len() {
            self.batches.resize(batch + 1, 0);
        }
        self.batches[batch] |= 1 << bit;
        self.first = self.first.min(batch);
        if pairs(self.batches[batch]) != 0 {
            self.first_pair = self.first_pair.min(batch);
        }
    }

    /// Takes the nodes of the first batch that has any, or any whole pair. Returns the batch, and a bit for each node.
    pub(super) fn take(&mut self, whole_pairs: bool) -> Option<(usize, u64)> {
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

#[cfg(test)]
mod tests;
