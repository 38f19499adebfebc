//! Where there is no room: what threads keep, what GPUs are done with, new memory.

use std::ops::{ControlFlow, Range};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::backing::{Backing, Beside, Grown, Want};
use super::cache::{Inside, member};
use super::classes::SLAB;
use super::core::{Core, GRANULE};
use super::limits::{Pressure, Relief, SoftLimit};
use super::shared::Shared;
use crate::error::NoRoom;
use crate::per_driver::lock;
use crate::{Error, Result};

/// What a thread may keep of larger blocks: at least this, and no more than a 512th of all memory.
const LEAST_BUDGET: u64 = 128 << 10;
const BUDGET_SHARE: u64 = 512;

/// How long growth ahead of need leaves the lock to others after each step: far less than a step of the
/// default size takes.
const BETWEEN_STEPS: Duration = Duration::from_micros(100);

impl Shared {
    /// What `attempt` gets from the core, after making room for it where there is none. Only where a
    /// handle is held.
    pub(super) fn with_memory<R>(
        &self,
        bytes: u64,
        align: u64,
        attempt: impl Fn(&mut Core) -> Option<R>,
    ) -> Result<R> {
        self.check_possible(bytes, align)?;
        let error = match self.make_room(bytes, align, &attempt) {
            Err(error) if self.wait_for_gpu => error,
            result => return result,
        };
        // The last resort. Blocks that others have freed meanwhile may do as well.
        match self.wait_and_collect() {
            Ok(1..) => return self.make_room(bytes, align, &attempt),
            Ok(0) => {}
            Err(refusal) => {
                tracing::warn!(%refusal, "blocks that were freed after GPU work are not taken back");
            }
        }
        // Who waited before may have taken all of them back, or this wait some of them.
        self.after_caches_of_use(bytes, align, &attempt)
            .ok_or(error)
    }

    fn make_room<R>(
        &self,
        bytes: u64,
        align: u64,
        attempt: &impl Fn(&mut Core) -> Option<R>,
    ) -> Result<R> {
        if let Some(found) = attempt(&mut self.core()) {
            return Ok(found);
        }
        if let Some(found) = self.after_own_cache(attempt) {
            return Ok(found);
        }
        self.collect_or_log();
        let mut soft_limit = self.soft_limit.as_ref();
        let mut asked = 0;
        loop {
            if let Some(found) = attempt(&mut self.core()) {
                return Ok(found);
            }
            let mut guard = lock(&self.backing);
            let backing = guard.as_mut().ok_or_else(ended)?;
            // Another thread may have added memory while this one waited for its turn.
            if let Some(found) = attempt(&mut self.core()) {
                return Ok(found);
            }
            let soft = match self.grow_for(backing, bytes, align, soft_limit, attempt)? {
                ControlFlow::Break(found) => return Ok(found),
                ControlFlow::Continue(soft) => soft,
            };
            let pressure = Pressure {
                requested: bytes,
                backed: backing.backed(),
                soft_limit: soft.bytes,
                asked,
            };
            drop(guard);
            if let Some(found) = self.after_caches_of_use(bytes, align, attempt) {
                return Ok(found);
            }
            asked += 1;
            match (soft.relieve)(&pressure) {
                Relief::Retry => {
                    self.collect_or_log();
                    if let Some(found) = self.after_caches_of_use(bytes, align, attempt) {
                        return Ok(found);
                    }
                }
                Relief::Refuse => {
                    let why = NoRoom::SoftLimit { bytes: soft.bytes };
                    return Err(self.full(why, bytes, align));
                }
                Relief::Grow => soft_limit = None,
            }
        }
    }

    /// Adds memory until the attempt gets something; or the soft limit that this would go beyond.
    fn grow_for<'a, R>(
        &self,
        backing: &mut Backing,
        bytes: u64,
        align: u64,
        soft_limit: Option<&'a SoftLimit>,
        attempt: &impl Fn(&mut Core) -> Option<R>,
    ) -> Result<ControlFlow<R, &'a SoftLimit>> {
        // A small block needs a slab.
        let need = bytes.next_multiple_of(GRANULE).max(SLAB);
        loop {
            let want = Want::Block {
                bytes: need,
                alignment: align.max(GRANULE),
                beside: &|gap| self.beside(gap),
            };
            let grown = match soft_limit {
                None => backing.grow(want),
                Some(soft) => match backing.grow_within(want, soft.bytes) {
                    Ok(None) => return Ok(ControlFlow::Continue(soft)),
                    Ok(Some(grown)) => Ok(grown),
                    Err(error) => Err(error),
                },
            };
            match grown {
                Ok(grown) if grown.is_empty() => {}
                Ok(grown) => {
                    let mut core = self.with_new(backing, grown);
                    // Before anybody else can take it.
                    if let Some(found) = attempt(&mut core) {
                        return Ok(ControlFlow::Break(found));
                    }
                    continue;
                }
                Err(error) => {
                    return match self.after_caches_of_use(bytes, align, attempt) {
                        Some(found) => Ok(ControlFlow::Break(found)),
                        None => Err(self.explained(error, bytes, align)),
                    };
                }
            }
            // There is room, says the core; unless somebody was faster.
            if let Some(found) = attempt(&mut self.core()) {
                return Ok(ControlFlow::Break(found));
            }
        }
    }

    /// The core, with the new memory in it.
    pub(super) fn with_new(&self, backing: &Backing, grown: Vec<Grown>) -> Inside<'_, Core> {
        self.set_budget(backing.backed());
        let mut core = self.core();
        for stretch in grown {
            core.add(stretch.range, stretch.joins);
        }
        core
    }

    /// What lies free beside a stretch without memory.
    fn beside(&self, gap: &Range<u64>) -> Beside {
        let core = self.core();
        Beside {
            before: core.free_before(gap.start),
            after: core.free_after(gap.end),
        }
    }

    pub(super) fn set_budget(&self, backed: u64) {
        let most = (backed / BUDGET_SHARE).max(LEAST_BUDGET);
        let bytes = most.min(self.thread_cache);
        self.most_budget.fetch_max(bytes / GRANULE, Relaxed);
        self.budget.store(bytes / GRANULE, Relaxed);
    }

    /// Tries once more with what this thread keeps given back.
    fn after_own_cache<R>(&self, attempt: &impl Fn(&mut Core) -> Option<R>) -> Option<R> {
        member::with(self, |local| {
            if local.has_no_ranges() {
                local.forget_what_is_gone();
                return None;
            }
            let contents = local.empty();
            // While the cache is this thread's still: whoever wants all of them waits for it, and does
            // not look in vain for what is in neither place.
            let kept = &local.kept;
            self.with_core(&mut local.visitor, |core| {
                self.take_back_all(core, contents);
                kept.forget();
                attempt(core)
            })
        })
    }

    /// Takes back what GPUs are done with; how many blocks.
    pub(super) fn collect_passed(&self) -> Result<usize> {
        // The background thread has no handle: the heap must not end before the core has the blocks.
        let Some(mapped) = self.lifetime.enter() else {
            return Ok(0);
        };
        // One at a time: who comes second must find what the first one has taken, in the core.
        let turn = lock(&self.collecting);
        let mut passed = Vec::new();
        let result = match lock(&self.deferred).as_mut() {
            Some(deferred) => deferred.poll(&mut passed),
            None => Ok(0),
        };
        self.take_back_all_passed(&passed, &mapped);
        drop(turn);
        drop(mapped);
        self.tell();
        result.map(|_| passed.len())
    }

    /// The same where a refusal is not what the caller asked about.
    fn collect_or_log(&self) {
        if let Err(error) = self.collect_passed() {
            tracing::warn!(%error, "blocks that were freed after GPU work are not taken back yet");
        }
    }

    /// Adds memory until `bytes` are free; for growth ahead as far as the soft limit allows where there is
    /// one, and while there is somebody to allocate it.
    ///
    /// But for growth ahead, what cannot be had is refused before any of it is made.
    pub(super) fn add_memory(&self, bytes: u64, ahead: bool) -> Result<()> {
        let (mut unchecked, mut emptied) = (!ahead, false);
        loop {
            if self.core().free_bytes() < bytes {
                self.collect_or_log();
            }
            if ahead && self.closed.load(Relaxed) {
                return Ok(());
            }
            let mut guard = lock(&self.backing);
            let backing = guard.as_mut().ok_or_else(ended)?;
            let free = self.core().free_bytes();
            let Some(more) = bytes.checked_sub(free).filter(|&more| more > 0) else {
                return Ok(());
            };
            if unchecked {
                match backing.check_more(more) {
                    Ok(()) => unchecked = false,
                    // It does not count what threads keep.
                    Err(Error::HeapFull { .. })
                        if !emptied
                            && self.caches_may_make_up(more, backing.room_below(self.limit)) =>
                    {
                        self.empty_all_caches();
                        emptied = true;
                        continue;
                    }
                    Err(error) => return Err(self.explained(error, bytes, 1)),
                }
            }
            // In steps, so that whoever waits for memory has its turn after each.
            let mut step = more.min(backing.chunk());
            let soft = self.soft_limit.as_ref().filter(|_| ahead);
            if ahead {
                // What there still may be; and if that is nothing, too much.
                let most = soft.map_or(self.limit, |soft| soft.bytes.min(self.limit));
                step = step.min(backing.room_below(most)).max(1);
            }
            let want = Want::More { bytes: step };
            let grown = match soft {
                None => backing.grow(want),
                Some(soft) => backing.grow_within(want, soft.bytes).and_then(|grown| {
                    let why = NoRoom::SoftLimit { bytes: soft.bytes };
                    grown.ok_or_else(|| self.full(why, bytes, 1))
                }),
            };
            let grown = grown.map_err(|error| self.explained(error, bytes, 1))?;
            drop(self.with_new(backing, grown));
            drop(guard);
            if ahead {
                // Nobody waits for this; who waits for the lock takes longer to wake than this to come back.
                std::thread::sleep(BETWEEN_STEPS);
            }
        }
    }

    /// Gives idle chunks back until no more than `keep` bytes are free; how many bytes.
    pub(super) fn trim(&self, keep: u64) -> Result<u64> {
        self.collect_or_log();
        self.empty_all_caches();
        let mut guard = lock(&self.backing);
        let backing = guard.as_mut().ok_or_else(ended)?;
        let mut idle: Vec<Range<u64>> = backing.chunks().map(|chunk| chunk.range()).collect();
        // From the end: what is left lies together.
        idle.reverse();
        let mut bytes = 0;
        let mut error = None;
        for chunk in idle {
            {
                let mut core = self.core();
                let size = chunk.end - chunk.start;
                if core.free_bytes() < keep.saturating_add(size) || !core.remove(chunk.clone()) {
                    continue;
                }
            }
            let given = backing.give_back(chunk);
            bytes += given.bytes();
            let mut core = self.core();
            for kept in given.kept {
                core.add(kept, backing.joins());
            }
            error = error.or(given.error);
        }
        self.set_budget(backing.backed());
        match error {
            Some(error) if bytes == 0 => Err(error),
            _ => Ok(bytes),
        }
    }
}

fn ended() -> Error {
    Error::Stale {
        what: "a heap".into(),
        why: "its memory was given back".into(),
    }
}

mod caches;
#[cfg(test)]
mod tests;
