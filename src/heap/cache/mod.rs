//! How a heap's threads cache blocks and hand them to each other: three small primitives. Loom (`ci/loom`) has
//! run small models of each in all orders of events with up to three preemptions, and with the processor's
//! fences: loom does not model `membarrier`. [`Front`] has a heap's inbox and its threads.
//!
//! | | written by | read by | cost of the common case |
//! |---|---|---|---|
//! | [`Biased`] | its owner and its holders | the same | two plain stores, two loads |
//! | [`Reserved`] | the thread inside, most often one visitor | the same | two plain stores, two loads |
//! | [`Inbox`] | any thread pushes | any thread drains all at once | one compare-and-swap for each push |

mod biased;
mod inbox;
mod local;
mod magazine;
mod medium;
pub(crate) mod member;
mod reserved;
mod shards;
pub(crate) mod sync;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use self::inbox::Inbox;
use self::shards::{Post, Shards};
use crate::classes::GRANULE;
use crate::per_driver::lock;
use crate::piece::Extent;
use crate::ranges::{CachedBound, Request};

pub(crate) use self::{
    biased::Biased,
    local::{Local, Tally},
    magazine::CacheBound,
    medium::{MAX_CACHED, Medium},
    member::{Home, InVain, Member, Members},
    reserved::{Inside, Reserved, Visitor},
    shards::{Own, UNIT},
};

/// A thread that has the core to itself may keep at least this many bytes of larger blocks, and at most a 512th of all
/// memory.
const LEAST: u64 = 128 << 10;
const SHARE: u64 = 512;

/// While threads share the core, each may cache at most this fraction (1/16) of the heap's addresses: at least `LEAST`, since
/// a heap has 2 MiB of them.
const SHARED_PART: u64 = 16;

/// The threads of a heap and their common state outside the core.
///
/// The only lock is `members`. It comes after `backing`, and before a cache, the debug mode's table and the core.
/// For the inbox and the shards' posts no thread waits: any may use them under any of these.
pub(crate) struct Front {
    /// How many granules of larger blocks a thread may cache that has the core to itself. Read and written without a lock.
    alone: AtomicU64,
    /// The same while threads share the core: no less.
    shared: u64,
    /// Ranges whose return found the core busy: the next thread that enters the core returns them first.
    // On a cache line of its own, as its type is, because all threads write to it.
    pub(crate) inbox: Inbox<Vec<Extent>>,
    pub(crate) shards: Shards,
    pub(crate) members: Mutex<Members>,
}

impl Front {
    /// Creates the state of a heap without threads or memory, with addresses below `limit`. Sizes are in bytes.
    pub(crate) fn new(thread_cache: u64, limit: u64) -> Self {
        let front = Self {
            alone: AtomicU64::new(0),
            shared: thread_cache.min(limit / SHARED_PART) / GRANULE,
            inbox: Inbox::new(),
            shards: Shards::new(limit),
            members: Mutex::default(),
        };
        front.follow(0);
        front
    }

    /// Adapts what threads may cache to the heap's memory, in bytes.
    pub(crate) fn follow(&self, backed: u64) {
        let most = (backed / SHARE).max(LEAST) / GRANULE;
        self.alone.store(most.min(self.shared), Relaxed);
    }

    /// Returns how many granules of larger blocks a thread may cache that has the core to itself.
    #[inline]
    pub(crate) fn alone(&self) -> u64 {
        self.alone.load(Relaxed)
    }

    /// Returns the same while threads share the core.
    #[inline]
    pub(crate) fn shared(&self) -> u64 {
        self.shared
    }

    /// Returns the bytes in all posts, or more.
    pub(crate) fn posted(&self) -> u64 {
        self.shards.posts().map(Post::bytes).sum()
    }

    /// Returns a bound of the blocks outside the core, without taking a thread's cache.
    pub(crate) fn cached_bound(&self, members: &Members, request: &Request) -> CachedBound {
        // First: a block that leaves a post meanwhile is in a thread's bound before.
        let posted = self.posted();
        // With those on their way to shards.
        let larger = 2 * self.shared * GRANULE;
        let mut bound = CachedBound {
            bytes: posted,
            larger: posted > 0,
            of_class: false,
        };
        for member in &members.list {
            bound.bytes += member.bound.bytes(larger);
            bound.larger |= member.bound.has_larger();
            let class = request.class.map_or(0, CacheBound::small);
            bound.of_class |= member.bound.has(class);
        }
        bound
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
