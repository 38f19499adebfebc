//! The paths of a block from the core to a user and back: through the thread's cache, or directly.

use std::alloc::Layout;
use std::panic::Location as Caller;
use std::sync::atomic::Ordering::Relaxed;

use super::cache::sync::tell_refusal;
use super::cache::{CacheBound, Load, Local, MAX_CACHED, Medium, member};
use super::classes::{Class, GRANULE};
use super::heap::no_bytes;
use super::inner::HeapInner;
use super::piece::{Extent, Kind, Piece};
use super::ranges::{Core, RangeId};
use super::{Block, Heap};
use crate::Result;

/// After so many ranges from the core, a thread looks for classes that it does not use any more.
const LOOK_EVERY: u32 = 128;

impl Heap {
    /// Allocates a block of `layout`'s size, from 1 byte to 1 TiB − 2 MiB, at an address that is a multiple
    /// of its alignment. The bytes are not initialised.
    ///
    /// With the feature `allocator-api2` or `nightly` a heap also implements `Allocator`, whose function of
    /// this name returns a bare pointer. `heap.allocate(layout)` calls this method; the trait's is
    /// `Allocator::allocate(&heap, layout)`.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for 0 bytes, for more than the maximum, for an alignment that no
    /// such block can have at the heap's addresses, and in a forked child; [`HeapFull`](crate::Error::HeapFull) if the heap
    /// has no room and may not grow, with the reason; if it has to grow, [`NodeTooFull`](crate::Error::NodeTooFull),
    /// [`NodesTooFull`](crate::Error::NodesTooFull), [`OutOfMemory`](crate::Error::OutOfMemory) or the driver's errors.
    /// Requests of 64 MiB or more are checked against the host
    /// nodes' free memory before any memory is created, unless the heap may
    /// [overcommit](super::HeapOptions::overcommit); smaller requests release the new memory if they fail.
    #[inline(always)]
    #[track_caller]
    pub fn allocate(&self, layout: Layout) -> Result<Block> {
        let (bytes, align) = (layout.size() as u64, layout.align() as u64);
        let inner = &**self.inner();
        let found = match Class::of(bytes, align) {
            _ if bytes == 0 => None,
            Some(class) => member::with(inner, |local| {
                let found = match local.small[class.index()].pop() {
                    Some(offset) => Extent::small(offset, class),
                    None => inner.refill(local, class, bytes, align)?,
                };
                local.tally.allocate(bytes);
                Some(found)
            }),
            None => member::with(inner, |local| {
                let found = inner.take_range(local, bytes, align)?;
                local.tally.allocate(bytes);
                Some(found)
            }),
        };
        match found {
            // SAFETY: the piece was just allocated and counted, for this block alone.
            Some(found) => Ok(unsafe { Block::new(inner, Piece::new(found, bytes)) }),
            None => self.allocate_slowly(bytes, align, Caller::caller()),
        }
    }

    #[cold]
    #[inline(never)]
    fn allocate_slowly(
        &self,
        bytes: u64,
        align: u64,
        place: &'static Caller<'static>,
    ) -> Result<Block> {
        if bytes == 0 {
            return Err(no_bytes());
        }
        // A forked child always comes here: it finds no cache of its parent's heap.
        self.inner().expect_this_process()?;
        let piece = self.inner().allocate_slowly(bytes, align, place)?;
        // SAFETY: as in `allocate`.
        Ok(unsafe { Block::new(self.inner(), piece) })
    }
}

impl HeapInner {
    #[inline(always)]
    fn take_range(&self, local: &mut Local, bytes: u64, align: u64) -> Option<Extent> {
        let cached = bytes <= MAX_CACHED && align <= GRANULE;
        let size = Core::range_granules(bytes) as u32; // exact if the core has such a range
        let found = if cached { local.medium.pop(size) } else { None };
        match found {
            Some(found) => Some(found),
            None => self.fetch(local, bytes, align),
        }
    }

    /// Gets a small block from other threads or from the core, or a range in its place.
    #[cold]
    #[inline(never)]
    fn refill(&self, local: &mut Local, class: Class, bytes: u64, align: u64) -> Option<Extent> {
        let shelf = &mut local.small[class.index()];
        shelf.unpark();
        if let Some(found) = shelf.pop() {
            return Some(Extent::small(found, class));
        }
        let refill = &mut local.refills[class.index()];
        if class.may_be_range(align)
            && refill.is_rare()
            && let Some(found) = self.take_range(local, bytes, align)
        {
            return Some(found);
        }
        // Before the blocks leave their present place.
        local.bound.note(CacheBound::small(class));
        let shelf = &mut local.small[class.index()];
        match self.front.depots[class.index()].take() {
            Some(full) => shelf.fill(class, full.len(), |out| {
                out.copy_from_slice(&full);
                full.len()
            }),
            None => {
                let refill = local.refills[class.index()].next(class);
                self.with_core(&mut local.visitor, |core| {
                    shelf.fill(class, refill, |out| {
                        let filled = core.fill(class, out);
                        // The lowest offsets are handed out first.
                        out[..filled].reverse();
                        filled
                    });
                });
            }
        }
        Some(Extent::small(shelf.pop()?, class))
    }

    /// Gets a larger block from the thread's shard or the core, from which it gets more of its size if the
    /// thread needs many.
    #[inline(never)]
    fn fetch(&self, local: &mut Local, bytes: u64, align: u64) -> Option<Extent> {
        let in_shard = local.shard.is_some();
        if in_shard && let Some(found) = self.take_from_shard(local, bytes, align) {
            return Some(found);
        }
        let crowded = self.core.is_crowded();
        let more = if in_shard || crowded || local.medium.shares() {
            self.prepare_shared(local, bytes, align, crowded)
        } else {
            local.crowded = 0;
            local.medium.make_way(bytes);
            0
        };
        local.fetched = local.fetched.wrapping_add(1);
        if local.fetched.is_multiple_of(LOOK_EVERY) {
            self.return_idle(local);
        }
        self.sort_leaving(local);
        let Local {
            medium, visitor, ..
        } = local;
        self.with_core(visitor, |core| {
            self.take_leaving(core, medium);
            let extent = core.allocate(bytes, align)?;
            for _ in 0..more {
                let Some(extent) = core.allocate(bytes, 1) else {
                    break;
                };
                medium.push(extent);
            }
            Some(extent)
        })
    }

    /// Returns the cached blocks that take a page each, of classes that the thread does not use any more, to the core.
    #[cold]
    #[inline(never)]
    fn return_idle(&self, local: &mut Local) {
        for class in Class::all().filter(|class| class.takes_page()) {
            let Some(idle) = local.take_idle(class) else {
                continue;
            };
            let depot = &self.front.depots[class.index()];
            let waiting = std::iter::from_fn(|| depot.take()).flat_map(|full| *full);
            self.with_core(&mut local.visitor, |core| {
                let strays = waiting.chain(idle).filter(|&at| !core.give_last(at));
                self.reports.count_unknown_frees(strays.count());
            });
            local.bound.forget(CacheBound::small(class));
        }
    }

    /// Allocates from the core, and from new memory if the core has no room.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_slowly(
        &self,
        bytes: u64,
        align: u64,
        place: &'static Caller<'static>,
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
        let class = Class::of(bytes, align);
        let attempt = |core: &mut Core| {
            let extent = match class {
                Some(class) => {
                    let mut offset = [0];
                    match core.fill(class, &mut offset) {
                        0 if class.may_be_range(align) => core.allocate(bytes, align)?,
                        0 => return None,
                        _ => Extent::small(offset[0], class),
                    }
                }
                None => core.allocate(bytes, align)?,
            };
            self.grower.look(core);
            Some(Piece::new(extent, bytes))
        };
        let taken = self.with_memory(bytes, align, attempt);
        self.tell();
        if taken.is_err() {
            self.counters.failed.fetch_add(1, Relaxed);
        }
        taken
    }

    /// Frees a block that neither its user nor a GPU uses any more.
    ///
    /// # Safety
    /// The block keeps the heap alive: nothing of the heap is used after the call, unless the caller holds a
    /// handle. The piece is a block of this heap that has no other owner.
    #[inline]
    pub(super) unsafe fn free(&self, piece: &Piece) {
        let done = member::with(self, |local| {
            local.tally.free(piece.bytes);
            match piece.key.kind() {
                Kind::Small(class) => {
                    if !local.small[class.index()].push(piece.offset) {
                        self.push_slowly(local, class, piece.offset);
                    }
                }
                Kind::Range(_) => self.keep(local, piece.extent()),
            }
            Some(())
        });
        if done.is_none() {
            // SAFETY: the caller's promise.
            unsafe { self.free_without_member(*piece) };
        }
    }

    #[inline]
    fn keep(&self, local: &mut Local, extent: Extent) {
        // Cached here, the block would be missed where it is used again first.
        if self.front.shards.are_used() && self.send_out(local, extent) {
            return;
        }
        let alone = self.front.budget.alone();
        let (budget, largest) = local.medium.limits(alone, self.front.budget.shared());
        let fits = u64::from(extent.granules()) <= largest;
        if fits && local.medium.keeps() {
            local.medium.put(extent);
        } else if self.front.shards.are_used() && self.to_shard(local, extent) {
            return;
        } else {
            let freed = self.core.if_reserved(&mut local.visitor, |core| {
                self.give_range(core, extent.node())
            });
            if freed.is_some() {
                return;
            }
            local.medium.pass_on(extent);
        }
        if local.medium.is_over(budget) || !fits {
            self.send_ranges(local);
        }
    }

    /// Caches a small block for which there is no room, and leaves a magazine of older ones for other threads.
    #[cold]
    #[inline(never)]
    fn push_slowly(&self, local: &mut Local, class: Class, offset: u64) {
        local.bound.note(CacheBound::small(class));
        let shelf = &mut local.small[class.index()];
        if let Some(oldest) = shelf.make_room(class)
            && let Err(oldest) = self.front.depots[class.index()].put(Box::new(oldest))
        {
            let mut oldest = Some(Load::Small(*oldest));
            let give = |core: &mut Core| {
                let oldest = oldest.take();
                oldest
                    .into_iter()
                    .for_each(|oldest| self.take_in(core, oldest));
            };
            self.core.try_with(&mut local.visitor, give);
            if let Some(oldest) = oldest {
                self.front.inbox.push(oldest);
            }
        }
        shelf.push(offset);
    }

    /// Returns blocks that leave a cache to the core, directly or through the inbox.
    fn send_ranges(&self, local: &mut Local) {
        self.sort_leaving(local);
        if local.medium.leaving().is_empty() {
            return;
        }
        let medium = &mut local.medium;
        let give = |core: &mut Core| self.take_leaving(core, medium);
        if self.core.try_with(&mut local.visitor, give).is_none() {
            self.front
                .inbox
                .push(Load::Ranges(local.medium.take_leaving()));
        }
    }

    /// Returns a block directly to the core.
    pub(super) fn take_back(&self, piece: Piece) {
        let mut core = self.core();
        match piece.key.kind() {
            Kind::Small(_) => self.give(&mut core, piece.offset),
            Kind::Range(_) => self.give_or_send(&mut core, piece.extent()),
        }
    }

    /// Returns a cache's contents to the core, and its shard's segments with the blocks in use.
    pub(super) fn take_back_all(&self, core: &mut Core, local: &mut Local) {
        if let Some(own) = &mut local.shard {
            self.dissolve(core, own);
        }
        local.take_small().for_each(|at| self.give(core, at));
        let ranges = local.medium.take_all();
        if self.front.shards.are_used() {
            let ranges = ranges.into_iter();
            ranges.for_each(|extent| self.give_or_send(core, extent));
        } else {
            self.give_ranges(core, &ranges);
        }
        // Once the core has everything.
        local.bound.forget(u64::MAX);
        local.bound.note_shard(0);
    }

    /// Returns the depots' blocks to the core.
    pub(super) fn empty_depots(&self, core: &mut Core) {
        for full in self.front.take_magazines() {
            self.take_in(core, Load::Small(full));
        }
    }

    /// Returns a load to the core.
    pub(super) fn take_in(&self, core: &mut Core, load: Load) {
        match load {
            Load::Small(full) => full.iter().for_each(|&at| self.give(core, at)),
            Load::Ranges(ranges) => self.give_ranges(core, &ranges),
        }
    }

    fn give(&self, core: &mut Core, offset: u64) {
        if !core.give(offset) {
            self.reports.count_unknown_frees(1);
        }
    }

    #[inline]
    pub(super) fn give_range(&self, core: &mut Core, node: RangeId) {
        if !core.free(node) {
            self.reports.count_unknown_frees(1);
        }
    }

    #[inline]
    fn give_ranges(&self, core: &mut Core, ranges: &[Extent]) {
        let strays = ranges.len() - core.free_all(ranges);
        if strays > 0 {
            self.reports.count_unknown_frees(strays);
        }
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
