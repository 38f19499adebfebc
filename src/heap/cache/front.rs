//! A heap's state for its threads: their caches, and the places where blocks wait between threads.

use std::sync::Mutex;

use super::budget::Budget;
use super::depot::Depot;
use super::inbox::Inbox;
use super::kept::Kept;
use super::load::Load;
use super::local::Tally;
use super::magazine::Magazine;
use super::member::Members;
use super::shards::{Post, Shards};
use crate::classes::{CLASSES, Class};
use crate::core::{Outside, Request};
use crate::per_driver::lock;

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
        let full = |class| Magazine::rounds(class) as u64 * class.bytes();
        let small = depots.map(|(class, depot)| depot.len() as u64 * full(class));
        small.sum::<u64>() + self.posted()
    }

    /// Returns the bytes in all posts, or more.
    pub(crate) fn posted(&self) -> u64 {
        self.shards.posts().map(Post::bytes).sum()
    }

    /// Returns a bound of the blocks outside the core.
    pub(crate) fn outside(&self, members: &Members, request: &Request) -> Outside {
        let larger = self.budget.most_ever();
        let class = request.class();
        // First: a block that leaves a depot or a post meanwhile is in a thread's bound before.
        let waiting = self.waiting_bytes();
        let kept = members.kept(larger, class);
        let waits = class.is_some_and(|class| self.depots[class.index()].len() > 0);
        Outside {
            bytes: kept.bytes + waiting,
            larger: kept.larger || self.shards.posts().any(|post| post.bytes() > 0),
            of_class: kept.of_class || waits,
        }
    }

    /// Returns whether shards have so much free that growth by `bytes` may be unnecessary.
    pub(crate) fn shards_have_much(&self, bytes: u64, backed: u64) -> bool {
        const PART: u64 = 4;
        self.shards.are_used()
            && self.posted() + self.sum_of_shards(Kept::shard) > bytes.max(backed / PART)
    }

    /// Returns the sum of `f` over all threads.
    pub(crate) fn sum_of_shards(&self, f: impl Fn(&Kept) -> u64) -> u64 {
        let members = lock(&self.members);
        members.list.iter().map(|member| f(&member.kept)).sum()
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
