//! Shards: parts of the memory that one thread divides without the core.
//!
//! While threads share the core, each visit waits for the others, and finds its tables in another CPU's cache. So
//! a thread that often meets others there gets segments for itself. Blocks that other threads
//! free return to it by its post (`cache/shards.rs`). Wherever the cache of a thread is emptied, so is its shard:
//! the segments return to the core with the blocks in use, and the core is as if it had given none.

use super::cache::{CacheBound, Local, Own, UNIT, Visitor, member};
use super::classes::GRANULE;
use super::inner::HeapInner;
use super::piece::Extent;
use super::ranges::Core;

/// The largest blocks that come from a shard, in bytes. From a large one come blocks up to twice that, which are at
/// most this part of it: its next segments are several times as large as they.
const MAX_IN_SHARD: u64 = 1 << 20;
const PART_OF_SHARD: u64 = 32;
/// The first segment; later ones are up to an eighth of all that the shard has, at most `MOST`. Halves of the
/// first, down to a unit, where the core has no larger free range.
const FIRST: u64 = 4 << 20;
const MOST: u64 = 64 << 20;
/// Threads that may keep less have no shards; the first segment is a multiple of this.
const LEAST_FIRST: u64 = 2 << 20;
/// Segments are taken only while the core has so many times as much free, and as many first segments.
const PLENTY: u64 = 4;
/// A thread that meets others in the core so often in a row gets a shard. More than the visits after which a
/// thread that has the core to itself from then on counts as alone.
const OFTEN: u32 = 128;

/// Iterates over the sizes of segments to try for a shard that has `total` bytes and needs a block of `bytes`.
fn segments(first: u64, total: u64, bytes: u64) -> impl Iterator<Item = u64> {
    let next = (total / 8 / UNIT * UNIT).clamp(first, MOST);
    // The free memory of a heap that was full for a time lies in pieces between the blocks in use.
    let halves = std::iter::successors(Some(first), |size| Some(size / 2 / UNIT * UNIT));
    let halves = halves.take_while(move |&size| size >= bytes.next_multiple_of(UNIT));
    (next > first).then_some(next).into_iter().chain(halves)
}

impl HeapInner {
    /// Returns the bytes of the first segment; 0 if threads may keep too little for one.
    fn first_segment(&self) -> u64 {
        FIRST.min(self.front.shared() * GRANULE) / LEAST_FIRST * LEAST_FIRST
    }

    /// Notes that threads share the core now. Gives a thread that shares it often a shard.
    #[cold]
    #[inline(never)]
    pub(super) fn note_crowd(&self, local: &mut Local) {
        local.crowded = local.crowded.saturating_add(1);
        if local.crowded >= OFTEN && local.shard.is_none() {
            local.crowded = 0; // if all numbers are taken, the next try is later
            self.open_shard(local);
        }
    }

    fn open_shard(&self, local: &mut Local) {
        if self.first_segment() == 0 {
            return;
        }
        let claimed = self.visit(&mut local.visitor).new_shard();
        if let Some((id, shard)) = claimed {
            let post = self.front.shards.open(id);
            local.shard = Some(Box::new(Own {
                id,
                shard,
                post,
                look_at: 0,
                hold_off: 0,
            }));
        }
    }

    /// Allocates from the thread's shard, if the request is one for shards.
    #[inline(never)]
    pub(super) fn take_from_shard(
        &self,
        local: &mut Local,
        bytes: u64,
        align: u64,
    ) -> Option<Extent> {
        let total = local.shard.as_ref()?.shard.total();
        let most = (total / PART_OF_SHARD).clamp(MAX_IN_SHARD, 2 * MAX_IN_SHARD);
        if bytes > most || align > GRANULE {
            return None;
        }
        if !local.shard.as_ref()?.post.is_empty() {
            self.open_post(local);
        }
        let own = local.shard.as_mut()?;
        let found = match own.shard.allocate_in_shard(bytes) {
            None => self.feed_shard(&mut local.visitor, own, &local.bound, bytes),
            found => found,
        };
        local.bound.note_shard(own.shard.free_bytes());
        if found.is_some() {
            local.medium.missed_at_low_cost();
        }
        found
    }

    /// Gets the thread's shard nodes or a segment, if the core has plenty, and allocates from it.
    #[cold]
    fn feed_shard(
        &self,
        visitor: &mut Visitor,
        own: &mut Own,
        bound: &CacheBound,
        bytes: u64,
    ) -> Option<Extent> {
        const HOLD_OFF: u32 = 16;
        if own.hold_off > 0 {
            own.hold_off -= 1;
            return None;
        }
        let first = self.first_segment();
        let mut core = self.visit(visitor);
        if own.shard.needs_nodes() {
            core.lend_nodes(&mut own.shard);
            if let Some(found) = own.shard.allocate_in_shard(bytes) {
                return Some(found);
            }
        }
        let fed = segments(first, own.shard.total(), bytes).find_map(|segment| {
            let plenty = core.ranges.free_bytes() / PLENTY >= segment.max(first);
            plenty.then(|| core.feed(&mut own.shard, segment, UNIT))?
        });
        let Some(fed) = fed else {
            own.hold_off = HOLD_OFF;
            return None;
        };
        self.front.shards.set(fed, own.id);
        // Before the core is left: a thread that finds these bytes in neither place may refuse a request.
        bound.note_shard(own.shard.free_bytes());
        own.look_at = own.shard.free_bytes() + first;
        self.grower.look(&core);
        own.shard.allocate_in_shard(bytes)
    }

    /// Puts the blocks that other threads freed into the thread's shard.
    #[cold]
    pub(super) fn open_post(&self, local: &mut Local) {
        if let Some(post) = local.shard.as_ref().map(|own| own.post.clone()) {
            post.open(|extent| {
                if !self.to_shard(local, extent) {
                    // At once: as many may have come too late for a dissolved shard as threads sent, and the
                    // bound of a cache's contents counts no more than its budget.
                    self.give_range(&mut self.visit(&mut local.visitor), extent.node());
                }
            });
        }
    }

    /// Sends a block to another thread's shard.
    #[inline(never)]
    pub(super) fn send_out(&self, local: &mut Local, shard: u8, extent: Extent) {
        let (most, shards) = (self.front.shared(), &self.front.shards);
        local.medium.send_out(shard, extent, most, shards);
    }

    /// Frees a block to the thread's shard, which has it.
    #[inline(never)]
    pub(super) fn free_in_shard(&self, local: &mut Local, extent: Extent) {
        let Some(own) = &mut local.shard else {
            return;
        };
        self.count_unknown(usize::from(!own.shard.free(extent.node())));
        let free = own.shard.free_bytes();
        local.bound.note_shard(free);
        if free > own.look_at {
            self.return_empty_segments(local);
        }
    }

    /// Frees a block to the thread's shard or sends it to another's; returns `false` if it is the core's.
    fn to_shard(&self, local: &mut Local, extent: Extent) -> bool {
        match self.front.shards.of(extent.offset) {
            0 => return false,
            shard if shard == local.shard_id() => self.free_in_shard(local, extent),
            shard => self.send_out(local, shard, extent),
        }
        true
    }

    /// Sorts out blocks that leave the cache but do not belong to the core.
    #[inline]
    pub(super) fn sort_leaving(&self, local: &mut Local) {
        if self.front.shards.are_used() && !local.medium.leaving().is_empty() {
            self.sort_all(local);
        }
    }

    #[cold]
    fn sort_all(&self, local: &mut Local) {
        let mut leaving = local.medium.take_leaving();
        for extent in leaving.drain(..) {
            if !self.to_shard(local, extent) {
                local.medium.pass_on(extent);
            }
        }
        local.medium.keep_room(leaving);
    }

    /// Returns segments without a block to the core, but for about one or a 16th of the shard.
    #[cold]
    fn return_empty_segments(&self, local: &mut Local) {
        let Some(own) = local.shard.as_mut() else {
            return;
        };
        let first = self.first_segment();
        let kept = first.max(own.shard.total() / 8);
        let segments = own.shard.segments();
        let mut core = self.visit(&mut local.visitor);
        for (start, is_empty) in segments.into_iter().rev() {
            if is_empty && own.shard.free_bytes() > kept {
                self.take_segment(&mut core, own, start);
            }
        }
        local.bound.note_shard(own.shard.free_bytes());
        drop(core);
        // Not again before as much was freed as makes the search worth while.
        own.look_at = own.shard.free_bytes() + first.max(own.shard.total() / 16);
    }

    fn take_segment(&self, core: &mut Core, own: &mut Own, start: u64) {
        if let Some(range) = core.take_segment(&mut own.shard, start) {
            self.front.shards.set(range, 0);
        }
    }

    /// Returns all segments of a shard to the core, with the blocks in use. The caller holds the cache.
    pub(super) fn dissolve(&self, core: &mut Core, own: &mut Own) {
        // From the end, where the list of spans forgets one at once.
        for (start, _) in own.shard.segments().into_iter().rev() {
            self.take_segment(core, own, start);
        }
        own.post.open(|extent| self.give_or_send(core, extent));
    }

    /// Calls `f` if a block in use lies in the calling thread's shard.
    ///
    /// # Errors
    /// The other shard that has it, or had it; 0: the core.
    pub(super) fn in_own_shard<R>(
        &self,
        offset: u64,
        f: impl FnOnce(&mut Own) -> R,
    ) -> std::result::Result<R, u8> {
        let called = self.front.shards.are_used().then(|| {
            member::with(self, |local| {
                let own = local.shard.as_mut()?;
                let result = (self.front.shards.of(offset) == own.id).then(|| f(own))?;
                local.bound.note_shard(own.shard.free_bytes());
                Some(result)
            })
        });
        called.flatten().ok_or_else(|| self.front.shards.of(offset))
    }

    /// Opens all posts for blocks that are the core's by now; the rest stays there.
    pub(super) fn open_posts(&self, core: &mut Core) {
        for post in self.front.shards.posts() {
            post.open(|extent| self.give_or_send(core, extent));
        }
    }

    /// Returns a block to the core, or to the post of the shard that has it.
    pub(super) fn give_or_send(&self, core: &mut Core, extent: Extent) {
        match self.front.shards.of(extent.offset) {
            0 => self.give_range(core, extent.node()),
            id => self.front.shards.send_one(id, extent),
        }
    }
}

#[cfg(test)]
mod tests;
