//! A heap's state for its threads: their caches, and the places where blocks wait between threads.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::cache::inbox::Inbox;
use crate::cache::local::Tally;
use crate::cache::magazine::CacheBound;
use crate::cache::member::Members;
use crate::cache::shards::{Post, Shards};
use crate::classes::GRANULE;
use crate::per_driver::lock;
use crate::piece::Extent;
use crate::ranges::{CachedBound, Request, SlabId};

/// The threads of a heap and their common state outside the core.
///
/// The only lock is `members`. It comes after `backing`, and before a cache, the debug mode's table and the core.
/// For the inbox and the shards' posts no thread waits: any may use them under any of these.
pub(crate) struct Front {
    pub(crate) budget: Budget,
    /// Ranges and slabs whose return found the core busy: the next thread that enters the core returns them first.
    // On a cache line of its own, as its type is, because all threads write to it.
    pub(crate) inbox: Inbox<Load>,
    pub(crate) shards: Shards,
    pub(crate) members: Mutex<Members>,
}

impl Front {
    /// Creates the state of a heap without threads. Sizes are in bytes.
    pub(crate) fn new(thread_cache: u64, limit: u64) -> Self {
        Self {
            budget: Budget::new(thread_cache, limit),
            inbox: Inbox::new(),
            shards: Shards::new(limit),
            members: Mutex::default(),
        }
    }

    /// Returns the bytes in all posts, or more.
    pub(crate) fn posted(&self) -> u64 {
        self.shards.posts().map(Post::bytes).sum()
    }

    /// Returns a bound of the blocks outside the core.
    pub(crate) fn cached_bound(&self, members: &Members, request: &Request) -> CachedBound {
        let larger = self.budget.most_ever();
        // First: a block that leaves a post meanwhile is in a thread's bound before.
        let posted = self.posted();
        let bound = members.bound(larger, request.class);
        CachedBound {
            bytes: bound.bytes + posted,
            larger: bound.larger || posted > 0,
            of_class: bound.of_class,
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

/// Memory that threads leave for the core.
pub(crate) enum Load {
    /// Ranges to be freed.
    Ranges(Vec<Extent>),
    /// Slabs that had no block in use.
    Slabs(Vec<SlabId>),
}
