//! A heap's state for its threads: their caches, and the places where blocks wait between threads.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::handover::Depot;
use crate::cache::handover::Inbox;
use crate::cache::local::Tally;
use crate::cache::magazine::Magazine;
use crate::cache::member::Members;
use crate::cache::shards::{Own, Post, Shards};
use crate::classes::{CLASSES, Class};
use crate::per_driver::lock;
use crate::ranges::{CachedBound, Extent, GRANULE, Request};

/// The most full magazines of a class that wait for a thread.
const DEPOT: usize = 4;

/// The threads of a heap and their common state outside the core.
///
/// The only lock is `members`. It comes after `backing`, and before a cache, the debug mode's table and the core.
/// The depots, the inbox and the shards' posts have no lock: any thread may use them under any of these.
pub(crate) struct Front {
    pub(crate) budget: Budget,
    /// Frees that found the core busy: the next thread that enters the core applies them first.
    // On a cache line of its own, as its type is, because all threads write to it.
    pub(crate) inbox: Inbox<Load>,
    /// Full magazines, from threads that free to threads that allocate.
    pub(crate) depots: [Depot<Magazine>; CLASSES],
    pub(crate) shards: Shards,
    pub(crate) members: Mutex<Members>,
}

impl Front {
    /// Creates the state of a heap without threads. Sizes are in bytes.
    pub(crate) fn new(thread_cache: u64, limit: u64) -> Self {
        Self {
            budget: Budget::new(thread_cache, limit),
            inbox: Inbox::new(),
            depots: std::array::from_fn(|_| Depot::new(DEPOT)),
            shards: Shards::new(limit),
            members: Mutex::default(),
        }
    }

    /// Takes all magazines out of the depots.
    pub(crate) fn take_magazines(&self) -> impl Iterator<Item = Box<Magazine>> {
        let depots = self.depots.iter();
        depots.flat_map(|depot| std::iter::from_fn(|| depot.take()))
    }

    /// Returns the bytes on their way between threads, or more.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        // Counts full magazines, without those that a thread is about to take.
        let depots = Class::all().zip(&self.depots);
        let full = |class| Magazine::capacity(class) as u64 * class.bytes();
        let small = depots.map(|(class, depot)| depot.len() as u64 * full(class));
        small.sum::<u64>() + self.posted()
    }

    /// Returns the bytes in all posts, or more.
    pub(crate) fn posted(&self) -> u64 {
        self.shards.posts().map(Post::bytes).sum()
    }

    /// Returns a bound of the blocks outside the core.
    pub(crate) fn cached_bound(&self, members: &Members, request: &Request) -> CachedBound {
        let larger = self.budget.most_ever();
        let class = request.class();
        // First: a block that leaves a depot or a post meanwhile is in a thread's bound before.
        let waiting = self.waiting_bytes();
        let bound = members.bound(larger, class);
        let waits = class.is_some_and(|class| self.depots[class.index()].len() > 0);
        CachedBound {
            bytes: bound.bytes + waiting,
            larger: bound.larger || self.shards.posts().any(|post| post.bytes() > 0),
            of_class: bound.of_class || waits,
        }
    }

    /// Returns whether shards have so much free that growth by `bytes` may be unnecessary.
    pub(crate) fn shards_have_much(&self, bytes: u64, backed: u64) -> bool {
        const PART: u64 = 4;
        self.shards.are_used()
            && self.posted() + self.sum_of_shards(CacheBound::shard) > bytes.max(backed / PART)
    }

    /// Returns the sum of `f` over all threads.
    pub(crate) fn sum_of_shards(&self, f: impl Fn(&CacheBound) -> u64) -> u64 {
        let members = lock(&self.members);
        members.list.iter().map(|member| f(&member.bound)).sum()
    }

    /// Returns the counts of users' blocks, the bytes that threads cache, and the number of threads that have a cache.
    pub(crate) fn tally(&self) -> (Tally, u64, usize) {
        let members = lock(&self.members);
        let held = members.hold_all();
        let mut tally = members.tally;
        let mut kept = 0;
        for local in &held {
            tally.add(&local.tally);
            kept += local.bytes();
        }
        (tally, kept, members.list.len())
    }
}

/// Each thread may keep at least this many bytes of larger blocks, and at most a 512th of all memory.
const LEAST: u64 = 128 << 10;
const SHARE: u64 = 512;

/// While threads share the core, each may cache at most this fraction (1/16) of the heap's addresses.
const SHARED_PART: u64 = 16;

/// How many granules of larger blocks a thread may cache. Read and written without a lock.
pub(crate) struct Budget {
    /// The option of this name, in bytes.
    thread_cache: u64,
    alone: AtomicU64,
    /// The highest value that `alone` ever had.
    most_alone: AtomicU64,
    shared: u64,
}

impl Budget {
    /// Creates the budget of a heap without memory, with addresses below `limit`. Both are in bytes.
    pub(crate) fn new(thread_cache: u64, limit: u64) -> Self {
        let budget = Self {
            thread_cache,
            alone: AtomicU64::new(0),
            most_alone: AtomicU64::new(0),
            shared: thread_cache.min(limit / SHARED_PART) / GRANULE,
        };
        budget.follow(0);
        budget
    }

    /// Returns the granules of larger blocks that a thread may cache.
    #[inline]
    pub(crate) fn alone(&self) -> u64 {
        self.alone.load(Relaxed)
    }

    /// Returns the same while several threads use the core, if it is more.
    #[inline]
    pub(crate) fn shared(&self) -> u64 {
        self.shared
    }

    /// Adapts the budget to the heap's memory, in bytes.
    pub(crate) fn follow(&self, backed: u64) {
        let most = (backed / SHARE).max(LEAST);
        let bytes = most.min(self.thread_cache);
        self.most_alone.fetch_max(bytes / GRANULE, Relaxed);
        self.alone.store(bytes / GRANULE, Relaxed);
    }

    /// Returns the most bytes of larger blocks that any thread was ever allowed to keep, with those on their way to
    /// shards.
    pub(super) fn most_ever(&self) -> u64 {
        (self.most_alone.load(Relaxed).max(self.shared) + self.shared) * GRANULE
    }
}

/// An upper bound of a cache's contents: one bit for each size class that may have blocks, and one for larger
/// blocks. Bits are set before blocks arrive, only on cold
/// paths, and cleared when the core has all of the blocks. So a reader never misses a block that was in a
/// cache when it began to read.
///
/// Beside it are the free bytes of the thread's shard, after each change, and the least there were.
// On cache lines of its own: 128 bytes, since x86 fetches lines in pairs.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct CacheBound(AtomicU64, AtomicU64, AtomicU64);

impl CacheBound {
    /// The bit of the larger blocks.
    pub(super) const LARGER: u64 = 1 << CLASSES;

    /// Returns the bit of a class.
    #[inline]
    pub(crate) const fn small(class: Class) -> u64 {
        1 << class.index()
    }

    /// Notes that blocks of these kinds may arrive. The caller holds the cache.
    #[cold]
    pub(crate) fn note(&self, bits: u64) {
        self.0.store(self.0.load(Relaxed) | bits, Relaxed);
    }

    /// Notes that there are no blocks of these kinds. The caller holds the cache.
    pub(crate) fn forget(&self, bits: u64) {
        self.0.store(self.0.load(Relaxed) & !bits, Relaxed);
    }

    /// Returns whether there may be blocks of one of these kinds.
    pub(crate) fn has(&self, bits: u64) -> bool {
        self.0.load(Relaxed) & bits != 0
    }

    /// Notes the free bytes of the shard. The caller holds the cache.
    #[inline]
    pub(crate) fn note_shard(&self, bytes: u64) {
        self.1.store(bytes, Relaxed);
        if bytes < self.2.load(Relaxed) {
            self.2.store(bytes, Relaxed);
        }
    }

    /// Returns the free bytes of the shard.
    pub(crate) fn shard(&self) -> u64 {
        self.1.load(Relaxed)
    }

    /// Returns the fewest bytes that were free in the shard since the last call. May miss a change that happens
    /// meanwhile.
    pub(crate) fn take_least_in_shard(&self) -> u64 {
        self.2.swap(self.shard(), Relaxed)
    }

    /// Returns whether there may be larger blocks, or free memory in a shard.
    pub(crate) fn has_larger(&self) -> bool {
        self.has(Self::LARGER) || self.shard() > 0
    }

    /// Returns the most bytes that the cache may hold, with at most `larger` bytes of larger blocks.
    pub(crate) fn bytes(&self, larger: u64) -> u64 {
        let bits = self.0.load(Relaxed);
        let small = Class::all().filter(|class| bits & Self::small(*class) != 0);
        // Two magazines of each class, and one that is being handed over.
        let small: u64 = small
            .map(|class| 2 * Magazine::capacity(class) as u64 * class.bytes())
            .sum();
        let larger = match bits & Self::LARGER {
            0 => 0,
            _ => larger,
        };
        small + larger + self.shard()
    }
}

/// Blocks that are being returned to the core.
pub(crate) enum Load {
    Small(Box<Magazine>),
    Ranges(Vec<Extent>),
}

/// All contents of a cache, which are out of it but counted.
pub(crate) struct Contents<'a> {
    #[expect(clippy::vec_box, reason = "magazines are large, and boxed already")]
    pub(crate) small: Vec<Box<Magazine>>,
    pub(crate) ranges: Vec<Extent>,
    pub(crate) shard: Option<&'a mut Own>,
    /// Cleared once the core has everything.
    pub(crate) bound: &'a CacheBound,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_counts_until_it_is_forgotten() {
        let bound = CacheBound::default();
        let (one, other) = (Class::from_index(0), Class::from_index(CLASSES - 1));
        assert_eq!(bound.bytes(1000), 0);
        bound.note(CacheBound::small(one));
        bound.note(CacheBound::small(other));
        assert_eq!(bound.bytes(1000), 2 * (64 * 16 + (32 << 10)));
        bound.note(CacheBound::LARGER);
        bound.forget(CacheBound::small(other));
        assert!(bound.has(CacheBound::small(one)) && !bound.has(CacheBound::small(other)));
        bound.note_shard(7);
        assert_eq!(bound.bytes(1000), 1000 + 2 * 64 * 16 + 7);
        bound.forget(u64::MAX);
        assert_eq!(bound.bytes(1000), 7);
    }
}
