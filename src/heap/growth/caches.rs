//! Empties all thread caches when that can satisfy a request.
//!
//! Emptying stops every thread of the heap for a moment, and each has to fetch its blocks anew. A loop of
//! requests that fail all the same would slow all other threads down. So a request is first compared with bounds
//! that need no thread to stop, and refused where it cannot succeed.

use std::sync::atomic::Ordering::Relaxed;

use super::super::core::{Core, GRANULE, MAX_RANGE, Outside, Request};
use super::super::life::Members;
use super::super::shared::Shared;
use crate::per_driver::lock;

impl Shared {
    /// What `attempt` gets from the core with what all threads keep, and what waits between them, if that
    /// can help. It is for `bytes` at a multiple of `align`.
    pub(super) fn after_caches_of_use<R>(
        &self,
        bytes: u64,
        align: u64,
        attempt: &impl Fn(&mut Core) -> Option<R>,
    ) -> Option<R> {
        let request = Request::new(bytes, align);
        // A quarantine is emptied together with the caches, and no bound knows it.
        if self.watch.is_none() {
            let members = lock(&self.members);
            // Of what was free when this began nothing is missed: it is in the core, which is held, or in
            // a cache, which says so until the core has it, or in the inbox, which has just been drained.
            let mut core = self.core();
            if let Some(found) = attempt(&mut core) {
                return Some(found);
            }
            if core.rules_out(&request, self.outside(&members, &request)) {
                return None;
            }
        }
        self.after_all_caches(Some(request), attempt)
    }

    /// What may be kept outside of the core.
    fn outside(&self, members: &Members, request: &Request) -> Outside {
        let larger = self.most_budget.load(Relaxed) * GRANULE;
        let class = request.class();
        let kept = members.kept(larger, self.large_budget * GRANULE, class);
        let waits = class.is_some_and(|class| self.depots[class.index()].len() > 0);
        Outside {
            bytes: kept.bytes + self.waiting_bytes(),
            of_class: kept.of_class || waits,
        }
    }

    /// Whether `more` bytes could be free that are not, where `addable` bytes may still get memory, if the core had
    /// all that threads keep.
    pub(super) fn caches_may_make_up(&self, more: u64, addable: u64) -> bool {
        let members = lock(&self.members);
        let outside = self.outside(&members, &Request::new(MAX_RANGE, 1));
        let quarantined = self.watch.as_ref().map_or(0, |watch| watch.quarantined());
        let (free_in_slabs, ends) = self.core().slab_bytes();
        let most = outside.bytes + quarantined + free_in_slabs + ends;
        more <= addable.saturating_add(most)
    }

    /// Gives what all threads keep, and what waits between them, to the core.
    pub(super) fn empty_all_caches(&self) {
        self.after_all_caches(None, &|_| None::<()>);
    }

    /// What `attempt` gets after that. It is for the request, if any.
    pub(super) fn after_all_caches<R>(
        &self,
        request: Option<Request>,
        attempt: &impl Fn(&mut Core) -> Option<R>,
    ) -> Option<R> {
        self.takings.fetch_add(1, Relaxed);
        let members = lock(&self.members);
        let mut held = members.hold_all();
        let contents: Vec<_> = held.iter_mut().map(|local| local.empty()).collect();
        // All of these are held until the core has what was in them, and this had its turn: others wait,
        // and do not look in vain for what is in no place.
        let _quarantine = self.watch.as_ref().map(|watch| watch.emptied(self));
        let mut core = self.core();
        for contents in contents {
            self.take_back_all(&mut core, contents);
        }
        held.iter().for_each(|local| local.kept.forget());
        self.empty_depots(&mut core);
        core.release_empty_slabs();
        let found = core.thoroughly(attempt);
        if let (None, Some(request)) = (&found, request) {
            core.remember_refusal(request);
        }
        found
    }
}
