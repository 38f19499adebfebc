//! Statistics of a heap.

use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};

use super::DriverCounts;
use super::classes::Class;
use super::inner::HeapInner;

/// A heap's statistics at one moment, from [`Heap::stats`](super::Heap::stats). Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeapStats {
    /// Blocks in use.
    pub live_blocks: u64,
    /// Bytes requested for these blocks.
    pub live: u64,
    /// Bytes taken by these blocks and the deferred ones, including rounding and, in [debug
    /// mode](super::debug), guards.
    pub used: u64,
    /// Bytes in threads' caches and in the depots between threads.
    pub cached: u64,
    /// Bytes in the [debug mode](super::debug)'s quarantine: freed blocks, with their guards.
    #[serde(default)]
    pub quarantined: u64,
    /// Freed blocks whose GPU work has not finished. Their bytes count in `used`.
    pub deferred_blocks: u64,
    /// Free bytes outside slabs.
    pub free: u64,
    /// Free bytes in blocks of slabs.
    pub free_in_slabs: u64,
    /// Bytes at the ends of slabs, too few for a block.
    pub slab_ends: u64,
    /// The largest free range.
    pub largest_free: u64,
    /// The memory that the heap has.
    pub backed: u64,
    /// The most memory that the heap ever had.
    pub backed_high_water: u64,
    /// The most bytes that were ever in use or in caches outside the core.
    pub used_high_water: u64,
    /// The most memory that the heap may have: the addresses reserved.
    pub limit: u64,
    /// The size of the heap's own tables, in the process's ordinary memory.
    pub metadata: u64,
    /// Blocks allocated since the heap was made.
    pub allocated_blocks: u64,
    /// Blocks freed since then, including the deferred ones.
    pub freed_blocks: u64,
    /// Allocations that failed.
    pub failed: u64,
    /// How often the heap emptied all threads' caches: to trim, and for requests that nothing else satisfied.
    /// Requests that this cannot help fail without it.
    #[serde(default)]
    pub cache_takings: u64,
    /// Threads that have a cache.
    pub threads: u64,
    /// Small blocks by size class.
    pub classes: Vec<ClassStats>,
    /// Driver calls that created and released chunks.
    pub driver: DriverCounts,
}

/// One size class of [`HeapStats`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClassStats {
    /// The size of a block.
    pub bytes: u64,
    /// The number of blocks that the class's slabs have room for.
    pub blocks: u64,
    /// Blocks that are free in their slabs; the others are in use or in caches.
    pub free: u64,
}

impl HeapStats {
    /// Returns the fraction of the free memory that is not in the largest free range: 0 if all is contiguous,
    /// up to nearly 1.
    pub fn fragmentation(&self) -> f64 {
        match self.free {
            0 => 0.0,
            free => 1.0 - self.largest_free as f64 / free as f64,
        }
    }
}

impl HeapInner {
    pub(super) fn stats(&self) -> HeapStats {
        let (tally, kept) = self.front.tally();
        let deferred = self.deferral.pending();
        let mut stats = HeapStats {
            live_blocks: tally.live(),
            live: tally.live_bytes(),
            deferred_blocks: deferred as u64,
            limit: self.facts.limit,
            allocated_blocks: tally.allocated,
            freed_blocks: tally.freed,
            failed: self.counters.failed.load(Relaxed),
            cache_takings: self.counters.takings.load(Relaxed),
            threads: self.front.threads() as u64,
            ..HeapStats::default()
        };
        if let Some(backing) = self.supply.backing().as_ref() {
            stats.driver = backing.counts();
        }
        let quarantined = self.watch.as_ref().map_or(0, |watch| watch.quarantined());
        let core = self.core();
        let (free_in_slabs, slab_ends) = core.slab_bytes();
        stats.backed = core.total();
        stats.backed_high_water = core.total_high_water();
        stats.free = core.free_bytes();
        stats.free_in_slabs = free_in_slabs;
        stats.largest_free = core.ranges().largest_free();
        stats.slab_ends = slab_ends;
        let idle = stats.free + free_in_slabs + slab_ends;
        let out = stats.backed.saturating_sub(idle);
        stats.used_high_water = core.used_high_water();
        let waiting: u64 = self.front.waiting_bytes();
        stats.cached = (kept + waiting).min(out);
        stats.quarantined = quarantined.min(out - stats.cached);
        stats.used = out - stats.cached - stats.quarantined;
        stats.metadata = core.metadata() as u64;
        let classes = Class::all().zip(core.class_counts());
        stats.classes = classes
            .filter(|(_, (_, blocks))| *blocks > 0)
            .map(|(class, (free, blocks))| ClassStats {
                bytes: class.bytes(),
                blocks,
                free,
            })
            .collect();
        stats
    }
}
