//! How the heap makes room: threads' caches, blocks whose GPU work has finished, new memory.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use super::backing::{Backing, Chunk, Locked, Want};
use super::cache::{InVain, Inside, member};
use super::classes::{GRANULE, SLAB};
use super::inner::HeapInner;
use super::options::{Pressure, Relief};
use super::piece::Extent;
use super::ranges::{Ahead, Core, Request};
use crate::error::NoRoom;
use crate::{Error, Result};

/// How long background growth releases the lock after each step: much shorter than a step of the default
/// size.
const BETWEEN_STEPS: Duration = Duration::from_micros(100);

/// Background growth makes room in the core's table for so many more ranges.
const SPARE: usize = 4096;

impl HeapInner {
    /// Serves a request, after making room if necessary. The caller holds a handle, and no lock.
    pub(super) fn with_memory(&self, request: &Request) -> Result<Extent> {
        self.check_possible(request)?;
        let result = match self.make_room(request) {
            Err(error) if self.facts.wait_for_gpu => self.after_gpu_work(request, error),
            result => result,
        };
        if let (Some(until), Err(_)) = (InVain::take_until(), &result) {
            thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        result
    }

    /// Serves a request from what the core has.
    pub(super) fn serve(&self, core: &mut Core, request: &Request) -> Option<Extent> {
        let found = core.serve(request)?;
        self.grower.look(core);
        Some(found)
    }

    /// As [`serve`](Self::serve), with a search of all that is free.
    pub(super) fn serve_exhaustively(&self, core: &mut Core, request: &Request) -> Option<Extent> {
        core.exhaustively(|core| self.serve(core, request))
    }

    /// Waits for GPU work that blocks were freed after, as the last resort, and serves the request.
    fn after_gpu_work(&self, request: &Request, error: Error) -> Result<Extent> {
        // Blocks that other threads freed meanwhile may suffice, too.
        match self.wait_and_collect() {
            Ok(1..) => return self.make_room(request),
            Ok(0) => {}
            Err(refusal) => {
                tracing::warn!(%refusal, "blocks that were freed after GPU work cannot be collected");
            }
        }
        // A thread that waited before may have collected all of them, or this wait collected some.
        self.after_caches_of_use(request).ok_or(error)
    }

    fn make_room(&self, request: &Request) -> Result<Extent> {
        let found = self.serve(&mut self.core(), request);
        if let Some(found) = found.or_else(|| self.after_own_cache(request)) {
            return Ok(found);
        }
        self.collect_or_log();
        let mut soft_limit = self.facts.soft_limit.as_ref();
        let mut asked = 0;
        loop {
            let most = soft_limit.map_or(u64::MAX, |soft| soft.bytes);
            if let Some(found) = self.grow_unless_free(request, most)? {
                return Ok(found);
            }
            let Some(soft) = soft_limit else {
                continue; // unreachable: nothing exceeds no limit
            };
            let pressure = Pressure {
                requested: request.bytes,
                backed: self.core().ranges.total(),
                soft_limit: soft.bytes,
                asked,
            };
            if let Some(found) = self.after_caches_of_use(request) {
                return Ok(found);
            }
            asked = asked.saturating_add(1);
            match (soft.relieve.0)(&pressure) {
                Relief::Retry => {
                    self.collect_or_log();
                    if let Some(found) = self.after_caches_of_use(request) {
                        return Ok(found);
                    }
                }
                Relief::Refuse => {
                    return Err(self.full(NoRoom::SoftLimit { bytes: soft.bytes }, request));
                }
                Relief::Grow => soft_limit = None,
            }
        }
    }

    /// Adds memory unless the request is served without. Returns `None` if there would be more than `most` bytes of memory.
    fn grow_unless_free(&self, request: &Request, most: u64) -> Result<Option<Extent>> {
        let found = self.serve(&mut self.core(), request);
        if found.is_some() {
            return Ok(found);
        }
        let mut locked = self.supply.locked();
        // Another thread may have added memory while this one waited for its turn. And slabs without a block, which are
        // kept for the next ones of their classes, are no reason to grow.
        let mut core = self.core();
        core.release_empty_slabs();
        let found = self.serve(&mut core, request);
        if found.is_some() {
            return Ok(found);
        }
        drop(core);
        let backed = locked.backing()?.backed();
        if self.front.shards_have_much(request.bytes, backed) {
            let found = self.after_caches_of_use(request);
            if found.is_some() {
                return Ok(found);
            }
        }
        self.grow_for(&mut locked, request, most)
    }

    /// Adds memory until the request is served. Returns `None` if there would be more than `most` bytes of memory.
    fn grow_for(
        &self,
        locked: &mut Locked<'_>,
        request: &Request,
        most: u64,
    ) -> Result<Option<Extent>> {
        // A small block needs a slab.
        let need = request.bytes.next_multiple_of(GRANULE).max(SLAB);
        let mut place_made = false;
        loop {
            let want = Want::Block {
                bytes: need,
                alignment: request.align.max(GRANULE),
                with_free: &|gap| self.with_free(gap),
            };
            let refused = match locked.grow(want, most) {
                Ok(None) if locked.backing()?.joins() => return Ok(None),
                Ok(None) => None,
                Err(error) => Some(error),
                Ok(Some(grown)) => {
                    // Before another thread can take the new memory. If there is none, the core has room, unless another
                    // thread took it.
                    let mut core = self.with_new(locked.backing()?, grown);
                    match self.serve_exhaustively(&mut core, request) {
                        None => continue,
                        found => return Ok(found),
                    }
                }
            };
            let found = self.after_caches_of_use(request);
            if found.is_some() {
                return Ok(found);
            }
            if refused.as_ref().is_none_or(Backing::lacks_room) && !place_made {
                place_made = self.make_place(locked, (need, request.align), most)?;
                if place_made {
                    continue;
                }
            }
            return match refused {
                None => Ok(None),
                Some(error) => Err(self.explained(error, request)),
            };
        }
    }

    /// Returns the core with the new memory in it.
    pub(super) fn with_new(&self, backing: &Backing, grown: Vec<Range<u64>>) -> Inside<'_, Core> {
        self.front.follow(backing.backed());
        let mut core = self.core();
        for added in grown {
            core.add(added, backing.joins());
        }
        core
    }

    /// Returns a gap in the backing with the free memory beside it.
    fn with_free(&self, gap: &Range<u64>) -> Range<u64> {
        let ranges = &self.core().ranges;
        gap.start - ranges.free_before(gap.start)..gap.end + ranges.free_after(gap.end)
    }

    /// Serves the request after returning the contents of this thread's cache to the core.
    fn after_own_cache(&self, request: &Request) -> Option<Extent> {
        member::with(self, |local| {
            let shard = local.shard.as_ref();
            if local.medium.is_empty() && shard.is_none_or(|own| own.shard.total() == 0) {
                local.forget_what_is_gone();
                return None;
            }
            // While this thread still holds its cache: a thread that takes all caches then waits for it, and
            // cannot miss blocks that are in neither place.
            let mut core = self.core();
            self.take_back_all(&mut core, local);
            self.serve(&mut core, request)
        })
    }

    /// Collects like [`collect_passed`](Self::collect_passed), but logs an error, because the caller asked
    /// for memory.
    fn collect_or_log(&self) {
        if let Err(error) = self.collect_passed() {
            tracing::warn!(%error, "blocks that were freed after GPU work cannot be collected yet");
        }
    }

    /// Adds memory until `bytes` are free. Background growth stops at the soft limit, and when no thread is
    /// left to allocate.
    ///
    /// Except in background growth, requests that cannot be met are refused before any memory is created.
    ///
    /// `told` gets the bytes of each step and the bytes that are still missing, with no lock held. Its error ends the growth.
    pub(super) fn add_memory(
        &self,
        bytes: u64,
        ahead: bool,
        mut told: impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let request = Request::new(bytes, 1);
        let (mut unchecked, mut emptied) = (!ahead, false);
        loop {
            if self.core().ranges.free_bytes() < bytes {
                self.collect_or_log();
            }
            if ahead && self.closed.load(Relaxed) {
                return Ok(());
            }
            let mut locked = self.supply.locked();
            let free = {
                let mut core = self.core();
                // Nobody ended those whose last block came back while the core was busy.
                core.release_empty_slabs();
                core.ranges.free_bytes()
            };
            let Some(more) = bytes.checked_sub(free).filter(|&more| more > 0) else {
                return Ok(());
            };
            if unchecked && !self.can_add(&mut locked, &request, more, &mut emptied)? {
                continue;
            }
            unchecked = false;
            let soft = self.facts.soft_limit.as_ref().filter(|_| ahead);
            let most = soft.map_or(u64::MAX, |soft| soft.bytes);
            // In steps, so that threads that wait for memory have a turn after each; in advance, no more than
            // may still be added, or if that is nothing, 1 byte, which the backing refuses.
            let backing = locked.backing()?;
            let room = if ahead {
                backing.room_below(most.min(self.facts.limit)).max(1)
            } else {
                u64::MAX
            };
            let step = more.min(backing.chunk()).min(room);
            let began = Instant::now();
            let grown = match locked.grow(Want::More { bytes: step }, most) {
                Ok(Some(grown)) => grown,
                Ok(None) => return Err(self.full(NoRoom::SoftLimit { bytes: most }, &request)),
                Err(error) => return Err(self.explained(error, &request)),
            };
            // Growth of another thread has ended.
            if grown.is_empty() {
                continue;
            }
            let took = began.elapsed();
            let added = grown.iter().map(|range| range.end - range.start).sum();
            drop(self.with_new(locked.backing()?, grown));
            drop(locked);
            let left = more.saturating_sub(added);
            told(added, left)?;
            if left > 0 {
                thread::sleep(self.supply.growth.rest_after(took));
            }
            if ahead {
                self.populate_table();
                // No thread waits for this. Waking up from the lock takes a waiting thread longer than this
                // loop takes to lock it again.
                thread::sleep(BETWEEN_STEPS);
            }
        }
    }

    /// Gives the core's table memory for more ranges with no lock held: the kernel takes longer for a page than an allocation.
    fn populate_table(&self) {
        let ahead = self.core().ranges.nodes.ahead(SPARE);
        if let Some(ahead) = ahead.filter(Ahead::populate) {
            self.core().ranges.nodes.populated(&ahead);
        }
    }

    /// Returns whether `more` bytes can be added, so that as many as requested are free. If not, empties the threads' caches if that
    /// can help and they are not emptied yet, or waits for other growth, after which the caller looks again.
    fn can_add(
        &self,
        locked: &mut Locked<'_>,
        request: &Request,
        more: u64,
        emptied: &mut bool,
    ) -> Result<bool> {
        let backing = locked.backing()?;
        let addable = backing.room_below(self.facts.limit);
        match backing.check_more(more) {
            Ok(()) => return Ok(true),
            // That number does not include the contents of threads' caches.
            Err(Error::HeapFull { .. })
                if !*emptied && self.caches_may_make_up(request.bytes, addable) =>
            {
                self.empty_all_caches();
                *emptied = true;
            }
            // Other growth may fail, or leave some of its memory free.
            Err(error) => locked.wait_for_others(self.explained(error, request))?,
        }
        Ok(false)
    }

    /// Gives idle chunks back until at most `keep` bytes are free; returns the number of bytes given back.
    pub(super) fn trim(&self, keep: u64) -> Result<u64> {
        self.collect_or_log();
        self.empty_all_caches();
        let (mut bytes, mut error) = (0, None);
        let mut locked = self.supply.locked();
        // From the end, so that the remaining free memory is contiguous.
        let mut end = self.facts.limit;
        while let Some(chunk) = self.take_idle(locked.backing()?, end, keep) {
            let began = Instant::now();
            end = chunk.start;
            let backing = locked.backing()?;
            let (is_gone, refused) = backing.give_back(chunk.start);
            if is_gone {
                bytes += chunk.end - chunk.start
            } else {
                self.core().add(chunk, backing.joins())
            }
            self.front.follow(backing.backed());
            error = error.or(refused);
            locked.release(began.elapsed());
        }
        match error {
            Some(error) if bytes == 0 => Err(error),
            _ => Ok(bytes),
        }
    }

    /// Takes the last chunk before `end` that is free and leaves at least `keep` free bytes out of the core.
    fn take_idle(&self, backing: &Backing, end: u64, keep: u64) -> Option<Range<u64>> {
        let mut chunks = backing.chunks_before(end).map(Chunk::range);
        chunks.find(|chunk| {
            let mut core = self.core();
            let left = core
                .ranges
                .free_bytes()
                .checked_sub(chunk.end - chunk.start);
            left.is_some_and(|left| left >= keep) && core.remove(chunk.clone())
        })
    }
}

#[cfg(test)]
mod tests;
