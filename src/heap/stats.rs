//! Statistics of a heap.

use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};

use super::DriverCounts;
use super::backing::Backing;
use super::classes::Class;
use super::inner::HeapInner;
use super::occupancy::fragmentation;

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
    /// Bytes in threads' caches, and on their way between threads.
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
    /// The most bytes that were ever in use, in caches or in slabs at once.
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
        fragmentation(self.free, self.largest_free)
    }
}

impl HeapInner {
    pub(super) fn stats(&self) -> HeapStats {
        let (tally, kept, threads) = self.front.tally();
        let backing = self.supply.backing();
        let driver = backing.as_ref().map(Backing::counts).unwrap_or_default();
        drop(backing);
        let quarantined = self.watch.as_ref().map_or(0, |watch| watch.quarantined());
        let deferred = self.deferral.pending();
        let core = self.core();
        let (free, backed) = (core.ranges.free_bytes(), core.ranges.total());
        let slabs = self.slabs.hold();
        let (free_in_slabs, slab_ends) = slabs.bytes();
        let (counts, tables) = (slabs.class_counts(), slabs.metadata());
        drop(slabs);
        let out = backed.saturating_sub(free + free_in_slabs + slab_ends);
        let cached = (kept + self.front.posted()).min(out);
        let quarantined = quarantined.min(out - cached);
        let classes = Class::all().zip(counts);
        let classes = classes.filter(|(_, (_, blocks))| *blocks > 0);
        HeapStats {
            live_blocks: tally.live(),
            live: tally.live_bytes(),
            used: out - cached - quarantined,
            cached,
            quarantined,
            deferred_blocks: deferred as u64,
            free,
            free_in_slabs,
            slab_ends,
            largest_free: core.ranges.largest_free(),
            backed,
            backed_high_water: core.total_high_water,
            used_high_water: core.used_high_water(),
            limit: self.facts.limit,
            metadata: (core.metadata() + tables) as u64,
            allocated_blocks: tally.allocated,
            freed_blocks: tally.freed,
            failed: self.failed.load(Relaxed),
            cache_takings: self.takings.load(Relaxed),
            threads: threads as u64,
            classes: classes
                .map(|(class, (free, blocks))| ClassStats {
                    bytes: class.bytes(),
                    blocks,
                    free,
                })
                .collect(),
            driver,
        }
    }
}
