//! Empties all thread caches when that can satisfy a request.
//!
//! Emptying stops every thread of the heap for a moment, and each has to refill its cache. A loop of requests
//! that fail anyway would slow all other threads down. So a request is first compared with bounds that stop
//! no thread, and refused if it cannot succeed.

use std::sync::atomic::Ordering::Relaxed;

use super::super::core::{Core, MAX_RANGE, Request};
use super::super::inner::HeapInner;
use crate::per_driver::lock;

impl HeapInner {
    /// Empties all caches and depots if that can help, and returns the result of `attempt`.
    /// The request is for `bytes` at a multiple of `align`.
    pub(super) fn after_caches_of_use<R>(
        &self,
        bytes: u64,
        align: u64,
        attempt: &impl Fn(&mut Core) -> Option<R>,
    ) -> Option<R> {
        let request = Request::new(bytes, align);
        // The bounds do not cover the quarantine, which is emptied together with the caches.
        if self.watch.is_none() {
            let members = lock(&self.front.members);
            // No block that was free when this began is missed: it is in the core, which is held, or in a
            // cache, whose bound includes it until the core has it, or in the inbox, which has just been
            // drained.
            let mut core = self.core();
            if let Some(found) = attempt(&mut core) {
                return Some(found);
            }
            let outside = self.front.outside(&members, &request);
            if core.rules_out(&request, outside) {
                return None;
            }
            if request.class().is_none() {
                let found = core.exhaustively(attempt);
                if found.is_some() || core.slabs_cannot_serve(&request, outside) {
                    return found;
                }
            }
        }
        self.after_all_caches(Some(request), attempt)
    }

    /// Returns whether `bytes` could be free if the core had all cached blocks and `addable` more bytes were
    /// backed.
    pub(super) fn caches_may_make_up(&self, bytes: u64, addable: u64) -> bool {
        let members = lock(&self.front.members);
        let quarantined = self.watch.as_ref().map_or(0, |watch| watch.quarantined());
        // Held while the caches are counted: blocks that leave them meanwhile would count in neither place.
        let core = self.core();
        let outside = self.front.outside(&members, &Request::new(MAX_RANGE, 1));
        let (free_in_slabs, ends) = core.slab_bytes();
        let most = core.free_bytes() + outside.bytes + quarantined + free_in_slabs + ends;
        bytes <= addable.saturating_add(most)
    }

    /// Returns all cached blocks, and those in depots, to the core.
    pub(crate) fn empty_all_caches(&self) {
        self.after_all_caches(None, &|_| None::<()>);
    }

    /// Empties all caches and returns the result of `attempt`, which serves the request, if any.
    pub(super) fn after_all_caches<R>(
        &self,
        request: Option<Request>,
        attempt: &impl Fn(&mut Core) -> Option<R>,
    ) -> Option<R> {
        self.counters.takings.fetch_add(1, Relaxed);
        let members = lock(&self.front.members);
        let mut held = members.hold_all();
        // All caches are held until the core has their contents and this attempt has run: other threads wait,
        // and cannot miss blocks that are in no place.
        let quarantine = self.watch.as_ref();
        let _quarantine = quarantine.map(|watch| watch.emptied(&|left| self.take_back_left(&left)));
        let mut core = self.core();
        for local in &mut held {
            self.take_back_all(&mut core, local.empty().0);
        }
        self.empty_depots(&mut core);
        self.open_posts(&mut core);
        core.release_empty_slabs();
        let found = core.exhaustively(attempt);
        if let (None, Some(request)) = (&found, request) {
            core.remember_refusal(request);
        }
        found
    }
}
