//! The paths of a block from the core or a slab to a user and back: through the thread's cache, or directly.

use std::sync::atomic::Ordering::Relaxed;

use super::cache::sync::tell_refusal;
use super::cache::{Local, MAX_CACHED, Medium, Visitor, member};
use super::classes::{Class, GRANULE};
use super::inner::HeapInner;
use super::piece::{Extent, Kind, Piece};
use super::ranges::{Core, RangeId, Request};
use crate::Result;

/// After so many ranges from the core, a thread looks for classes that it does not use any more.
const LOOK_EVERY: u32 = 128;
/// How many slabs with free blocks a class keeps in a stripe, so that a block that is allocated and freed repeatedly does not
/// create and end slabs.
const KEPT: usize = 1;

impl HeapInner {
    /// Takes a block of `bytes`, more than 0, at a multiple of `align` from the thread's cache, which refills
    /// itself if necessary.
    #[inline]
    pub(super) fn allocate_cached(&self, bytes: u64, align: u64) -> Option<Extent> {
        let Some(class) = Class::of(bytes, align) else {
            return self.allocate_range(bytes, align);
        };
        member::with(self, |local| {
            let found = match local.small[class.index()].pop() {
                Some(offset) => Extent::small(offset, class),
                None => self.refill(local, class, bytes, align)?,
            };
            local.tally.allocate(bytes);
            Some(found)
        })
    }

    /// As [`allocate_cached`](Self::allocate_cached), for a range. Not inlined: a small block's path needs fewer registers.
    #[inline(never)]
    fn allocate_range(&self, bytes: u64, align: u64) -> Option<Extent> {
        member::with(self, |local| {
            let found = self.take_range(local, bytes, align)?;
            local.tally.allocate(bytes);
            Some(found)
        })
    }

    /// Gets a range for a small block.
    #[inline(never)]
    fn range_for(&self, local: &mut Local, bytes: u64, align: u64) -> Option<Extent> {
        self.take_range(local, bytes, align)
    }

    #[inline(always)]
    fn take_range(&self, local: &mut Local, bytes: u64, align: u64) -> Option<Extent> {
        let cached = bytes <= MAX_CACHED && align <= GRANULE;
        let size = Core::range_granules(bytes) as u32; // exact if the core has such a range
        match if cached { local.medium.pop(size) } else { None } {
            None => self.fetch(local, bytes, align),
            found => found,
        }
    }

    /// Gets a small block from the slabs, or a range in its place.
    #[cold]
    #[inline(never)]
    fn refill(&self, local: &mut Local, class: Class, bytes: u64, align: u64) -> Option<Extent> {
        let magazine = &mut local.small[class.index()];
        magazine.unpark();
        if let Some(offset) = magazine.pop() {
            return Some(Extent::small(offset, class));
        }
        if class.may_be_range(align)
            && local.refills[class.index()].is_rare()
            && let Some(found) = self.range_for(local, bytes, align)
        {
            return Some(found);
        }
        let magazine = &mut local.small[class.index()];
        let refill = local.refills[class.index()].next(class);
        let (own, visitor) = (&mut local.stripe, &mut local.visitor);
        magazine.fill(class, &local.bound, refill, |out| {
            match self.slabs.take(own, class, out) {
                0 => {
                    let mut core = self.visit(visitor);
                    let filled = core.fill(own, class, out);
                    self.grower.look(&core);
                    filled
                }
                taken => taken,
            }
        });
        Some(Extent::small(magazine.pop()?, class))
    }

    /// Gets a larger block from the thread's shard or the core.
    #[inline(always)]
    fn fetch(&self, local: &mut Local, bytes: u64, align: u64) -> Option<Extent> {
        let in_shard = local.shard.is_some();
        if in_shard && let Some(found) = self.take_from_shard(local, bytes, align) {
            return Some(found);
        }
        let crowded = self.core.is_crowded();
        if crowded {
            self.note_crowd(local);
        } else {
            local.crowded = 0;
        }
        if in_shard || crowded || local.medium.shares() {
            local.medium.note_shares(crowded || in_shard);
        } else {
            local.medium.make_way(bytes);
        }
        local.fetched = local.fetched.wrapping_add(1);
        if local.fetched.is_multiple_of(LOOK_EVERY) {
            self.return_idle(local);
        }
        self.sort_leaving(local);
        let mut core = self.visit(&mut local.visitor);
        self.take_leaving(&mut core, &mut local.medium);
        let found = core.allocate(bytes, align);
        self.grower.look(&core);
        found
    }

    /// Returns the cached blocks that take a page each, of classes that the thread does not use any more, to the core.
    #[cold]
    #[inline(never)]
    fn return_idle(&self, local: &mut Local) {
        local.give_idle(|visitor, offsets| {
            self.count_unknown(self.visit(visitor).give(offsets, 0));
        });
    }

    /// Allocates from the core, and from new memory if the core has no room.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_slowly(
        &self,
        bytes: u64,
        align: u64,
        place: &'static std::panic::Location<'static>,
    ) -> Result<Piece> {
        let piece = match &self.watch {
            Some(watch) => watch.allocate(bytes, align, place, |bytes, align| {
                self.take_new(bytes, align)
            })?,
            None => self.take_new(bytes, align)?,
        };
        self.count(|tally| tally.allocate(bytes));
        Ok(piece)
    }

    /// As [`allocate_slowly`](Self::allocate_slowly), but does not count the block.
    pub(super) fn take_new(&self, bytes: u64, align: u64) -> Result<Piece> {
        let taken = self.with_memory(&Request::new(bytes, align));
        self.tell();
        if taken.is_err() {
            self.failed.fetch_add(1, Relaxed);
        }
        Ok(taken?.with(bytes))
    }

    /// Frees a block that neither its user nor a GPU uses any more.
    ///
    /// # Safety
    /// The block keeps the heap alive: nothing of the heap is used after the call, unless the caller holds a
    /// handle. The piece is a block of this heap that has no other owner.
    #[inline]
    pub(super) unsafe fn free(&self, piece: &Piece) {
        if !piece.key.is_small() {
            // SAFETY: the caller's promise.
            return unsafe { self.free_range(piece) };
        }
        let put = |local: &mut Local| {
            let class = piece.key.class();
            let visitor = &mut local.visitor;
            let give = |part: &[u64]| self.hand_on(visitor, part);
            local.small[class.index()].push(class, piece.offset, &local.bound, give);
        };
        // SAFETY: the caller's promise.
        unsafe { self.free_by(piece, put) }
    }

    /// As [`free`](Self::free), for a range. Not inlined: a small block's path needs fewer registers.
    ///
    /// # Safety
    /// As [`free`](Self::free).
    #[inline(never)]
    unsafe fn free_range(&self, piece: &Piece) {
        // SAFETY: the caller's promise.
        unsafe { self.free_by(piece, |local| self.keep(local, piece.extent())) }
    }

    /// Frees a block: `put` puts it into the thread's cache.
    ///
    /// # Safety
    /// As [`free`](Self::free).
    #[inline(always)]
    unsafe fn free_by(&self, piece: &Piece, put: impl FnOnce(&mut Local)) {
        let freed = member::with(self, |local| {
            local.tally.free(piece.bytes);
            put(local);
            Some(())
        });
        if freed.is_none() {
            // SAFETY: the caller's promise.
            unsafe { self.free_without_member(piece) };
        }
    }

    #[inline]
    fn keep(&self, local: &mut Local, extent: Extent) {
        let shard = self.front.shards.of(extent.offset);
        // Cached here, the block would be missed where it is used again first.
        if shard != 0 && shard != local.shard_id() {
            return self.send_out(local, shard, extent);
        }
        let (budget, largest) = (local.medium).limits(self.front.alone(), self.front.shared());
        let fits = u64::from(extent.granules()) <= largest;
        if !(fits && local.medium.keep(extent)) {
            if shard != 0 {
                return self.free_in_shard(local, extent);
            }
            if let Some(mut core) = self.core.if_reserved(&mut local.visitor) {
                return self.give_range(&mut core, extent.node());
            }
            local.medium.pass_on(extent);
        }
        if local.medium.is_over(budget) || !fits {
            self.send_ranges(local);
        }
    }

    /// Returns small blocks to their slabs.
    #[cold]
    fn hand_on(&self, visitor: &mut Visitor, part: &[u64]) {
        let mut empty = Vec::new();
        self.count_unknown(self.slabs.give(part, KEPT, &mut empty));
        // Otherwise they end when memory is short, at the latest.
        if !empty.is_empty()
            && let Some(mut core) = self.core.try_visit(visitor)
        {
            core.end_slabs(&empty, KEPT);
        }
    }

    /// Returns blocks that leave a cache to the core, directly or through the inbox.
    fn send_ranges(&self, local: &mut Local) {
        self.sort_leaving(local);
        if local.medium.leaving().is_empty() {
            return;
        }
        match self.core.try_visit(&mut local.visitor) {
            Some(mut core) => self.take_leaving(&mut core, &mut local.medium),
            None => (self.front.inbox).push(local.medium.take_leaving()),
        }
    }

    /// Returns a block directly to the core.
    pub(super) fn take_back(&self, piece: Piece) {
        let mut core = self.core();
        match piece.key.kind() {
            Kind::Small(_) => self.give(&mut core, &[piece.offset]),
            Kind::Range(_) => self.give_or_send(&mut core, piece.extent()),
        }
    }

    /// Returns a cache's contents to the core, and its shard's segments with the blocks in use.
    pub(super) fn take_back_all(&self, core: &mut Core, local: &mut Local) {
        if let Some(own) = &mut local.shard {
            self.dissolve(core, own);
        }
        for offsets in local.take_small() {
            self.give(core, &offsets);
        }
        let ranges = local.medium.take_all();
        if self.front.shards.are_used() {
            ranges
                .into_iter()
                .for_each(|extent| self.give_or_send(core, extent));
        } else {
            self.give_ranges(core, &ranges);
        }
        // Once the core has everything.
        local.bound.forget(u64::MAX);
        local.bound.note_shard(0);
    }

    fn give(&self, core: &mut Core, offsets: &[u64]) {
        self.count_unknown(core.give(offsets, KEPT));
    }

    pub(super) fn count_unknown(&self, unknown: usize) {
        if unknown > 0 {
            self.reports.count_unknown_frees(unknown);
        }
    }

    #[inline]
    pub(super) fn give_range(&self, core: &mut Core, node: RangeId) {
        self.count_unknown(usize::from(!core.free(node)));
    }

    #[inline]
    pub(super) fn give_ranges(&self, core: &mut Core, ranges: &[Extent]) {
        self.count_unknown(ranges.len() - core.free_all(ranges));
    }

    /// Returns the blocks that leave a cache to the core. They were [sorted](Self::sort_leaving).
    #[inline]
    pub(super) fn take_leaving(&self, core: &mut Core, medium: &mut Medium) {
        if !medium.leaving().is_empty() {
            self.give_ranges(core, medium.leaving());
            medium.left();
        }
    }

    /// Reports the findings made under locks. The caller holds no lock of the heap.
    pub(super) fn tell(&self) {
        tell_refusal();
        self.reports.tell();
    }
}
