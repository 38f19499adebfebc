//! How a heap's threads cache blocks and hand them to each other: four small primitives. Loom (`ci/loom`) has
//! run small models of each in all orders of events with up to three preemptions, and with the processor's
//! fences: loom does not model `membarrier`. [`Front`] has a heap's depots, its inbox and its threads.
//!
//! | | written by | read by | cost of the common case |
//! |---|---|---|---|
//! | [`Biased`] | its owner and its holders | the same | two plain stores, two loads |
//! | [`Reserved`] | the thread inside, most often one visitor | the same | two plain stores, two loads |
//! | [`Depot`](handover::Depot) | any thread puts a box | any thread takes one | one compare-and-swap, one swap |
//! | [`Inbox`](handover::Inbox) | any thread pushes | any thread drains all at once | one compare-and-swap for each push |

mod biased;
mod bound;
mod handover;
mod local;
mod medium;
pub(crate) mod member;
mod reserved;
mod shards;
pub(crate) mod sync;

pub(crate) use self::{
    biased::Biased,
    bound::CacheBound,
    local::{Local, Tally},
    medium::{MAX_CACHED, Medium},
    member::{Home, Member},
    reserved::{Inside, Reserved, Visitor},
    shards::{Own, UNIT},
};

use std::sync::Mutex;

use self::bound::Budget;
use self::handover::{Depot, Inbox};
use self::member::Members;
use self::shards::{Post, Shards};
use crate::classes::{CLASSES, Class};
use crate::per_driver::lock;
use crate::piece::Extent;
use crate::ranges::{CachedBound, Request};

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
    pub(crate) depots: [Depot<Vec<u64>>; CLASSES],
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
    pub(crate) fn take_magazines(&self) -> impl Iterator<Item = Vec<u64>> {
        let depots = self.depots.iter();
        depots.flat_map(|depot| std::iter::from_fn(|| Some(*depot.take()?)))
    }

    /// Returns the bytes on their way between threads, or more.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        // Counts full magazines, without those that a thread is about to take.
        let depots = Class::all().zip(&self.depots);
        let full = |class: Class| class.magazine() as u64 * class.bytes();
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
        let waits = class.is_some_and(|class| self.depots[class.index()].len() > 0);
        let bound = members.bound(larger, class);
        CachedBound {
            bytes: bound.bytes + waiting,
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

/// Blocks that are being returned to the core.
pub(crate) enum Load {
    Small(Vec<u64>),
    Ranges(Vec<Extent>),
}
