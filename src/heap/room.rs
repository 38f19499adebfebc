//! What a heap does before it refuses a request: it empties the threads' caches, and replaces idle chunks, where that can help. And
//! the errors of a heap that has no room.
//!
//! Emptying stops every thread of the heap for a moment, and each has to refill its cache. A loop of requests that fail anyway
//! would slow all other threads down. So a request is first compared with bounds that stop no thread, and refused if it
//! cannot succeed. Where the bounds cannot tell, and emptying was in vain many times in a row, a refused request waits before it
//! returns (`InVain`). A program may run into these errors often, as a cache that evicts does: building one formats no text and
//! scans no table.
//!
//! Where chunks do not join, a free chunk serves no block that is larger, however many lie side by side, and at the limit, or on a
//! full node, nothing can be added. So before a request fails, chunks without a block go back to the machine and make
//! place for one chunk.

use std::ops::Range;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::backing::Locked;
use crate::cache::{InVain, Members};
use crate::classes::GRANULE;
use crate::error::NoRoom;
use crate::inner::HeapInner;
use crate::per_driver::lock;
use crate::piece::Extent;
use crate::ranges::{Core, MAX_RANGE, Request};
use crate::{Error, Growth, Result};

impl HeapInner {
    /// Refuses a request that no amount of memory could satisfy.
    pub(super) fn check_possible(&self, request: &Request) -> Result<()> {
        let &Request { bytes, align, .. } = request;
        // A block that can be shared lies in one chunk.
        let most = if self.facts.exportable {
            Growth::MAX_CHUNK
        } else {
            MAX_RANGE
        };
        if bytes > most {
            let why = format!("it is {bytes} bytes");
            return Err(Error::invalid_of(
                "size",
                why,
                format!("at most {most} bytes"),
            ));
        }
        let (start, limit) = (self.facts.start, self.facts.limit);
        if bytes > limit {
            return Err(self.full(NoRoom::Limit, request));
        }
        let first = start.checked_next_multiple_of(align);
        let end = first.and_then(|first| first.checked_add(bytes));
        if end.is_some_and(|end| end <= start + limit) {
            return Ok(());
        }
        let why = format!(
            "{bytes} bytes at a multiple of {align} lie nowhere in the heap's {limit} bytes of \
             addresses from {start:#x} on: take a smaller one, or a larger limit"
        );
        Err(Error::invalid("alignment", why))
    }

    /// Returns [`Error::HeapFull`] with the core's numbers.
    pub(super) fn full(&self, why: NoRoom, request: &Request) -> Error {
        let core = self.core();
        let (total, free) = (core.ranges.total(), core.ranges.free_bytes());
        let largest_free = core.ranges.nearly_largest_free();
        drop(core);
        let need = request.size();
        // A page can have any alignment.
        let aligned = request.class.is_none() && request.align > GRANULE;
        let available = free.saturating_add(self.facts.limit.saturating_sub(total));
        let why = match why {
            NoRoom::Limit if aligned && need <= largest_free => NoRoom::Alignment,
            NoRoom::Limit if need <= available => NoRoom::Fragments,
            why => why,
        };
        Error::HeapFull {
            requested: request.bytes,
            align: request.align,
            guards: 0,
            why,
            limit: self.facts.limit,
            used: total.saturating_sub(free),
            free,
            largest_free,
        }
    }

    /// Completes an error from growth with the request's size and the core's numbers.
    pub(super) fn explained(&self, mut error: Error, request: &Request) -> Error {
        match &mut error {
            Error::HeapFull { why, .. } => return self.full(*why, request),
            // The heap asked the node only for the bytes that are not free already.
            Error::NodeTooFull { requested, .. }
            | Error::NodesTooFull { requested, .. }
            | Error::OutOfMemory { requested, .. } => *requested = request.bytes.max(*requested),
            _ => {}
        }
        error
    }

    /// Empties all caches if that can help, and serves the request.
    pub(super) fn after_caches_of_use(&self, request: &Request) -> Option<Extent> {
        let members = lock(&self.front.members);
        // The bounds do not cover the quarantine, which is emptied together with the caches.
        if self.watch.is_none() {
            let (found, may_help) = self.without_caches(&members, request);
            if !may_help {
                return found;
            }
        }
        self.empty_all(members, Some(request))
    }

    /// Serves the request. Returns too whether caches may have what it lacks.
    fn without_caches(&self, members: &Members, request: &Request) -> (Option<Extent>, bool) {
        // No block that was free when this began is missed. It is in the core, which is held, or in the inbox, which
        // has just been drained, or in a cache, whose bound includes it: a thread sets the class's bit before it takes
        // blocks from a slab, and clears it only after a visit to the core.
        let mut core = self.core();
        let found = self.serve(&mut core, request);
        if found.is_some() {
            return (found, false);
        }
        // While no block moves between a slab and a cache.
        let slabs = self.slabs.hold();
        let outside = self.front.cached_bound(members, request);
        if core.rules_out(request, outside, &slabs) {
            return (None, false);
        }
        drop(slabs);
        if request.class.is_some() {
            return (None, true);
        }
        let found = self.serve_exhaustively(&mut core, request);
        if found.is_some() {
            return (found, false);
        }
        let slabs = self.slabs.hold();
        let outside = self.front.cached_bound(members, request);
        (None, !core.slabs_cannot_serve(request, outside, &slabs))
    }

    /// Returns whether `bytes` could be free if the core had all cached blocks and `addable` more bytes were
    /// backed.
    pub(super) fn caches_may_make_up(&self, bytes: u64, addable: u64) -> bool {
        let members = lock(&self.front.members);
        let quarantined = self.watch.as_ref().map_or(0, |watch| watch.quarantined());
        // Held while the caches are counted: blocks that leave them meanwhile would count in neither place.
        let core = self.core();
        let slabs = self.slabs.hold();
        let outside = self
            .front
            .cached_bound(&members, &Request::new(MAX_RANGE, 1));
        let (free_in_slabs, ends) = slabs.bytes();
        let most = core.ranges.free_bytes() + outside.bytes + quarantined + free_in_slabs + ends;
        bytes <= addable.saturating_add(most)
    }

    /// Returns all cached blocks to the core.
    pub(crate) fn empty_all_caches(&self) {
        self.empty_all(lock(&self.front.members), None);
    }

    /// Empties all caches, and serves the request, if any.
    fn empty_all(
        &self,
        mut members: MutexGuard<'_, Members>,
        request: Option<&Request>,
    ) -> Option<Extent> {
        let began = Instant::now();
        self.takings.fetch_add(1, Relaxed);
        let found = {
            let mut held = members.hold_all();
            // All caches are held until the core has their contents and the request was tried: other threads wait,
            // and cannot miss blocks that are in no place.
            let quarantine = self.watch.as_ref();
            let _quarantine =
                quarantine.map(|watch| watch.emptied(&|left| self.take_back_left(&left)));
            let mut core = self.core();
            for local in &mut held {
                self.take_back_all(&mut core, local);
            }
            self.open_posts(&mut core);
            core.release_empty_slabs();
            request.and_then(|request| {
                let found = self.serve_exhaustively(&mut core, request);
                if found.is_none() {
                    core.remember_refusal(request);
                }
                found
            })
        };
        if found.is_some() {
            members.in_vain = InVain::default();
        } else if request.is_some() {
            members.in_vain.note(began, Instant::now());
        }
        found
    }

    /// Gives back idle chunks after which growth for a block has room below `most` bytes of all memory: those in its place, or
    /// all if that is too little memory. Returns `false` if none would do; the caller has emptied the threads' caches if that
    /// helps.
    ///
    /// The lock is not released between the chunks: growth of other threads would take the place.
    ///
    /// # Errors
    /// The driver's error if a chunk does not go back; it stays memory of the heap.
    pub(super) fn make_place(
        &self,
        locked: &mut Locked<'_>,
        (bytes, align): (u64, u64),
        most: u64,
    ) -> Result<bool> {
        let backing = locked.backing()?;
        if backing.joins() {
            return Ok(false);
        }
        let idle: Vec<Range<u64>> = {
            let mut core = self.core();
            core.release_empty_slabs();
            let own = backing.own_chunks();
            own.filter(|chunk| is_idle(&core, chunk)).collect()
        };
        if idle.is_empty() {
            return Ok(false);
        }
        let Some(chunks) = backing.to_give_back((bytes, align, most), &idle) else {
            return Ok(false);
        };
        {
            let mut core = self.core();
            // Other threads may have allocated from them meanwhile.
            if !chunks.iter().all(|chunk| is_idle(&core, chunk)) {
                return Ok(false);
            }
            for chunk in &chunks {
                core.remove(chunk.clone());
            }
        }
        let (mut all_gone, mut failed) = (true, None);
        for chunk in chunks {
            let (is_gone, refused) = backing.give_back(chunk.start);
            if !is_gone {
                self.core().add(chunk, false);
                all_gone = false;
                failed = failed.or(refused);
            } else if let Some(error) = refused {
                self.reports.add(move || {
                    tracing::warn!(%error, "memory of a chunk that went back cannot be released yet");
                });
            }
        }
        self.front.follow(backing.backed());
        failed.map_or(Ok(all_gone), Err)
    }
}

/// Returns whether all of a chunk that joins no other is free.
fn is_idle(core: &Core, chunk: &Range<u64>) -> bool {
    core.ranges.free_after(chunk.start) == chunk.end - chunk.start
}
