//! Blocks that belong to CUDA graphs: each replay uses them.
//!
//! A block that is allocated on a captured stream belongs to the pools of all captures that are under way on its GPU.
//! There is one, unless a capture contains `use_mem_pool`, or several threads capture at once: PyTorch reports the
//! pool of a stream only by a function in C++. Such a block is not reused before all of these pools are released.

use std::collections::HashMap;

use egmem::Block;
use egmem::driver::StreamHandle;
use foldhash::fast::FixedState;

/// PyTorch's name of a graph's pool of memory.
pub type PoolId = [u64; 2];

/// A graph's pool.
#[derive(Default)]
struct GraphPool {
    /// How often a capture into it has begun and was not released: graphs share pools.
    users: u32,
    idle: Idle,
}

/// The pools of all graphs.
#[derive(Default)]
pub struct Graphs {
    pools: Table<PoolId, GraphPool>,
    /// Freed blocks that are not reused, with the pools that they belong to.
    kept: Vec<(Block, Vec<PoolId>)>,
    /// The pools that captures have begun for, by GPU. A pool may be there several times.
    under_way: Table<i32, Vec<PoolId>>,
}

impl Graphs {
    /// Notes that a capture into a pool begins on a GPU.
    pub fn begin(&mut self, gpu: i32, pool: PoolId) {
        self.under_way.entry(gpu).or_default().push(pool);
        self.pools.entry(pool).or_default().users += 1;
    }

    /// Notes that it has ended; returns whether it had begun.
    pub fn end(&mut self, gpu: i32, pool: PoolId) -> bool {
        let pools = self.under_way.entry(gpu).or_default();
        let last = pools.iter().rposition(|other| *other == pool);
        last.map(|index| pools.remove(index)).is_some()
    }

    /// Returns the pools that a block allocated on a captured stream of a GPU belongs to.
    pub fn of_capture(&self, gpu: i32) -> Vec<PoolId> {
        let mut pools = self.under_way.get(&gpu).cloned().unwrap_or_default();
        pools.sort_unstable();
        pools.dedup();
        pools
    }

    /// Leaves out the pools that were released since [`of_capture`](Self::of_capture): a block of theirs would be
    /// kept for ever, because no other release comes.
    pub fn without_released(&self, mut pools: Vec<PoolId>) -> Vec<PoolId> {
        pools.retain(|pool| self.pools.contains_key(pool));
        pools
    }

    /// Takes a freed block that has `size` bytes and belongs to exactly these pools.
    pub fn reuse(&mut self, pools: &[PoolId], stream: StreamHandle, size: u64) -> Option<Block> {
        match pools {
            [pool] => self.pools.get_mut(pool)?.idle.take(stream, size),
            _ => None,
        }
    }

    /// Keeps a freed block. If `reusable`, work of `stream` alone used it.
    pub fn put(&mut self, pools: Vec<PoolId>, block: Block, stream: StreamHandle, reusable: bool) {
        match (&pools[..], reusable) {
            ([pool], true) => self.pools.entry(*pool).or_default().idle.put(stream, block),
            _ => self.kept.push((block, pools)),
        }
    }

    /// Notes that a pool has lost a user. If it was the last, returns the freed blocks that no longer belong to a
    /// pool: replays may still use them. `None` if the pool has users.
    pub fn release(&mut self, pool: PoolId) -> Option<Vec<Block>> {
        let of_pool = self.pools.get_mut(&pool)?;
        of_pool.users = of_pool.users.saturating_sub(1);
        if of_pool.users > 0 {
            return None;
        }
        let mut idle = self.pools.remove(&pool)?.idle;
        let mut unused: Vec<Block> = idle.take_all().into_values().flatten().collect();
        for (block, mut pools) in std::mem::take(&mut self.kept) {
            pools.retain(|other| *other != pool);
            match pools.is_empty() {
                true => unused.push(block),
                false => self.kept.push((block, pools)),
            }
        }
        Some(unused)
    }
}

/// A table by addresses, sizes and handles: an attacker chooses none of them.
pub type Table<K, V> = HashMap<K, V, FixedState>;

/// Idle blocks by stream and size. Work that is submitted to the stream later runs after the work that used them.
#[derive(Default)]
pub struct Idle {
    blocks: Table<(StreamHandle, u64), Vec<Block>>,
    bytes: u64,
}

impl Idle {
    /// Returns the bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes a block of exactly `size` bytes.
    pub fn take(&mut self, stream: StreamHandle, size: u64) -> Option<Block> {
        let block = self.blocks.get_mut(&(stream, size))?.pop()?;
        self.bytes -= size;
        Some(block)
    }

    /// Keeps a block.
    pub fn put(&mut self, stream: StreamHandle, block: Block) {
        self.bytes += block.len();
        self.blocks
            .entry((stream, block.len()))
            .or_default()
            .push(block);
    }

    /// Takes all blocks, by stream.
    pub fn take_all(&mut self) -> Table<StreamHandle, Vec<Block>> {
        self.bytes = 0;
        let mut all: Table<StreamHandle, Vec<Block>> = Table::default();
        for ((stream, _), blocks) in self.blocks.drain() {
            all.entry(stream).or_default().extend(blocks);
        }
        all.retain(|_, blocks| !blocks.is_empty());
        all
    }
}
