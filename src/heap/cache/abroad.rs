//! Blocks that a thread freed and that are on their way to other threads' shards.

use super::inbox::Node;
use super::shards::Shards;
use crate::core::{Extent, GRANULE};

/// How many batches a thread fills at a time.
const BATCHES: usize = 8;
/// A batch is sent with so many blocks, or with this part of the bytes that the thread may cache.
pub(super) const FULL: usize = 32;
const PART: u64 = 4;

/// Blocks of one shard. Each new batch of the same shard uses one that its thread has emptied, so that threads do
/// not allocate memory that others free.
pub(crate) struct Batch {
    pub(super) granules: u64,
    pub(super) blocks: Vec<Extent>,
}

impl Batch {
    pub(super) fn new() -> Box<Node<Self>> {
        Node::new(Self {
            granules: 0,
            blocks: Vec::with_capacity(FULL),
        })
    }

    pub(super) fn push(&mut self, extent: Extent) {
        self.granules += u64::from(extent.granules());
        self.blocks.push(extent);
    }

    /// Calls `put` with each block; keeps the vector's room.
    pub(super) fn empty(&mut self, put: impl FnMut(Extent)) {
        self.granules = 0;
        self.blocks.drain(..).for_each(put);
    }
}

/// A thread's batches, each with its shard.
#[derive(Default)]
pub(super) struct Abroad {
    batches: [(u8, Option<Box<Node<Batch>>>); BATCHES],
    granules: u64,
}

impl Abroad {
    /// Adds a block of another thread's shard. The batches have at most `most` granules together.
    pub(super) fn add(&mut self, shard: u8, extent: Extent, most: u64, shards: &Shards) {
        let at = usize::from(shard) % BATCHES;
        if self.batches[at].0 != shard {
            self.send(at, shards);
        }
        let (of, batch) = &mut self.batches[at];
        *of = shard;
        let batch = &mut batch.get_or_insert_with(|| shards.empty_batch(shard)).item;
        batch.push(extent);
        let full = batch.blocks.len() >= FULL || batch.granules >= most / PART;
        self.granules += u64::from(extent.granules());
        if full || self.granules > most {
            self.send(at, shards);
        }
    }

    fn send(&mut self, at: usize, shards: &Shards) {
        let (shard, batch) = &mut self.batches[at];
        if let Some(batch) = batch.take() {
            self.granules -= batch.item.granules;
            shards.send(*shard, batch);
        }
    }

    /// Takes all blocks.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Extent> + use<> {
        let batches = std::mem::take(self).batches.into_iter();
        let batches = batches.filter_map(|(_, batch)| batch);
        batches.flat_map(|batch| batch.item.blocks)
    }

    /// Iterates over all blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = &Extent> {
        let batches = self.batches.iter().filter_map(|(_, batch)| batch.as_ref());
        batches.flat_map(|batch| &batch.item.blocks)
    }

    /// Returns the bytes of all blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.granules * GRANULE
    }
}
