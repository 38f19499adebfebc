//! What a heap has, gave out and asked of the driver.

use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};

use super::classes::Class;
use super::shared::Shared;
use crate::per_driver::lock;

/// A heap's numbers at one moment; made by [`Heap::stats`](super::Heap::stats). Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeapStats {
    /// Blocks that users have.
    pub live_blocks: u64,
    /// What users asked for in these.
    pub live: u64,
    /// What these and the deferred ones take, with what sizes are rounded up by and, in
    /// [debug mode](super::debug), their guards.
    pub used: u64,
    /// Kept by threads, and waiting between them, to be given out again.
    pub cached: u64,
    /// Kept out of use by the [debug mode](super::debug): freed blocks, with their guards.
    #[serde(default)]
    pub quarantined: u64,
    /// Blocks freed by users, but not yet by the GPU work that they named. Their bytes are in `used`.
    pub deferred_blocks: u64,
    /// In no use: the memory outside slabs.
    pub free: u64,
    /// In no use: blocks of slabs.
    pub free_in_slabs: u64,
    /// At the ends of slabs, in no use by any block.
    pub slab_ends: u64,
    /// The largest range that is free.
    pub largest_free: u64,
    /// The memory there is.
    pub backed: u64,
    /// The most memory there was.
    pub backed_high_water: u64,
    /// The most that was in use or in caches outside the core.
    pub used_high_water: u64,
    /// The most memory there may be: the addresses reserved.
    pub limit: u64,
    /// What the heap's own tables take, in the process's ordinary memory.
    pub metadata: u64,
    /// Blocks allocated since the heap was made.
    pub allocated_blocks: u64,
    /// Blocks freed since then, the deferred ones among them.
    pub freed_blocks: u64,
    /// Allocations that failed.
    pub failed: u64,
    /// How often everything that threads keep was taken from them: to trim, and for requests that nothing
    /// else met. Requests that this cannot help are refused without it.
    #[serde(default)]
    pub cache_takings: u64,
    /// Threads that have a cache.
    pub threads: u64,
    /// Small blocks by size class.
    pub classes: Vec<ClassStats>,
    /// Chunks of memory made and given back, and what that took.
    pub driver: DriverCounts,
}

/// One size class of [`HeapStats`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of a block.
    pub bytes: u64,
    /// Blocks that there is room for.
    pub blocks: u64,
    /// Those that are free in their slabs; others are in use or in caches.
    pub free: u64,
}

/// What a heap asked of the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DriverCounts {
    /// `cuMemCreate`.
    pub create: u64,
    /// `cuMemMap`.
    pub map: u64,
    /// `cuMemSetAccess`.
    pub set_access: u64,
    /// `cuMemUnmap`.
    pub unmap: u64,
    /// `cuMemRelease`.
    pub release: u64,
    /// How often less was asked for after OUT_OF_MEMORY.
    pub halvings: u64,
}

impl HeapStats {
    /// How much of the free memory does not lie in one piece: 0, all in one, to nearly 1.
    pub fn fragmentation(&self) -> f64 {
        match self.free {
            0 => 0.0,
            free => 1.0 - self.largest_free as f64 / free as f64,
        }
    }
}

impl Shared {
    pub(super) fn stats(&self) -> HeapStats {
        let (tally, kept) = self.tally();
        let deferred = self.deferred_blocks();
        let mut stats = HeapStats {
            live_blocks: tally.live(),
            live: tally.live_bytes(),
            deferred_blocks: deferred as u64,
            limit: self.limit,
            allocated_blocks: tally.allocated,
            freed_blocks: tally.freed,
            failed: self.failed.load(Relaxed),
            cache_takings: self.takings.load(Relaxed),
            threads: self.threads() as u64,
            ..HeapStats::default()
        };
        if let Some(backing) = lock(&self.backing).as_ref() {
            let counts = backing.counts();
            stats.driver = DriverCounts {
                create: counts.create,
                map: counts.map,
                set_access: counts.set_access,
                unmap: counts.unmap,
                release: counts.release,
                halvings: counts.halvings,
            };
        }
        let quarantined = self.watch.as_ref().map_or(0, |watch| watch.quarantined());
        let core = self.core();
        let (free_in_slabs, slab_ends) = core.slab_bytes();
        stats.backed = core.total();
        stats.backed_high_water = core.total_high_water();
        stats.free = core.free_bytes();
        stats.free_in_slabs = free_in_slabs;
        stats.largest_free = core.largest_free();
        stats.slab_ends = slab_ends;
        let idle = stats.free + free_in_slabs + slab_ends;
        let out = stats.backed.saturating_sub(idle);
        stats.used_high_water = core.used_high_water();
        let waiting: u64 = self.waiting_bytes();
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
