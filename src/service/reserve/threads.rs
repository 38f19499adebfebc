//! The reserve's two threads: one fills it, the other zeroes returned memory.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::request::total;
use super::{Chunk, ReserveState, SharedReserve};
use crate::free_chunks::HasBytes;
use crate::guard::is_shortage;
use crate::quota::Use;
use crate::scrub::scrub;
use crate::size::Bytes;
use crate::{Error, MemoryError, Result};

/// The timeout of a wait that a wakeup ends: longer than any such wait takes.
const LONG: Duration = Duration::from_secs(3600);

impl<P: Clone + Eq> SharedReserve<P> {
    /// Runs the first thread: keeps the reserve full.
    pub(super) fn fill(&self) {
        let begun = Instant::now();
        let mut state = self.state();
        loop {
            if state.stop {
                let chunks = state.free_chunks.drain();
                state.pinned -= total(&chunks);
                drop(state);
                drop(chunks);
                return;
            }
            // Memory that is being zeroed will be ready without asking the driver.
            let lacking = self.plan.target.saturating_sub(state.warm_soon());
            // Chunks created ahead are whole: a remainder below the smallest size is left out.
            let bytes = state.chunk.min(lacking);
            if lacking < self.plan.min_chunk {
                state = match state.filled {
                    // The lock was released: everything may have changed.
                    None => self.first_filled(state, Ok(())),
                    Some(_) => self.wait(state, LONG),
                };
                continue;
            }
            if state.demands > 0 {
                state = self.wait(state, LONG);
                continue;
            }
            // The driver does one thing at a time: filling would slow the client's import.
            let quiet = state
                .taken
                .and_then(|taken| self.plan.quiet.checked_sub(taken.elapsed()));
            if let Some(quiet) = quiet.filter(|quiet| !quiet.is_zero()) {
                state = self.wait(state, quiet);
                continue;
            }
            if state.pinned.saturating_add(bytes) > self.plan.cap {
                let error = Error::LimitReached {
                    what: "bytes on the node",
                    limit: self.plan.cap,
                };
                state = self.first_filled(state, Err(error));
                state = self.pause(state);
                continue;
            }
            state.pinned += bytes;
            state.filling = bytes;
            drop(state);
            let made = self.create(bytes);
            state = self.state();
            state.filling = 0;
            match made {
                Ok(memory) => {
                    state.free_chunks.put(Chunk::fresh(memory), None);
                    state = self.log_filling(state, begun);
                }
                Err(error) => state = self.not_created(state, bytes, error),
            }
        }
    }

    /// Makes the chunks smaller after a shortage; otherwise waits before the next try.
    fn not_created<'a>(
        &'a self,
        mut state: MutexGuard<'a, ReserveState<P>>,
        bytes: u64,
        error: MemoryError,
    ) -> MutexGuard<'a, ReserveState<P>> {
        state.pinned -= bytes;
        if is_shortage(&error) && bytes > self.plan.min_chunk {
            state.chunk = self.halved(bytes);
            return state;
        }
        let node = self.plan.node;
        tracing::warn!(%node, %error, "the reserve cannot be filled for now");
        let state = self.first_filled(state, Err(error.into()));
        let mut state = self.pause(state);
        // There may be room for whole chunks again.
        state.chunk = self.plan.chunk;
        state
    }

    /// Logs each tenth of the first filling.
    fn log_filling<'a>(
        &'a self,
        mut state: MutexGuard<'a, ReserveState<P>>,
        begun: Instant,
    ) -> MutexGuard<'a, ReserveState<P>> {
        let (ready, target) = (state.free_chunks.warm(), self.plan.target);
        let tenths = ready / target.div_ceil(10).max(1);
        if state.filled.is_some() || tenths <= state.logged {
            return state;
        }
        state.logged = tenths;
        drop(state);
        let (node, took) = (self.plan.node, begun.elapsed());
        let rate = format!("{:.2} GB/s", ready as f64 / took.as_secs_f64() / 1e9);
        tracing::info!(%node, ready = %Bytes(ready), target = %Bytes(target), %rate, "filling the reserve");
        self.state()
    }

    fn first_filled<'a>(
        &'a self,
        mut state: MutexGuard<'a, ReserveState<P>>,
        result: Result<()>,
    ) -> MutexGuard<'a, ReserveState<P>> {
        if state.filled.is_some() {
            return state;
        }
        state.filled = Some(result.clone());
        drop(state);
        self.on_filled.filled(&result);
        self.state()
    }

    /// Runs the second thread: zeroes returned memory.
    pub(super) fn scrub(&self) {
        let mut state = self.state();
        loop {
            if state.stop {
                let dirty = std::mem::take(&mut state.dirty);
                state.pinned -= std::mem::take(&mut state.dirty_for_anyone);
                state.pinned -= std::mem::take(&mut state.dirty_for_owners);
                drop(state);
                drop(dirty);
                return;
            }
            let Some((mut chunk, owner)) = state.dirty.pop_front() else {
                state = self.wait(state, LONG);
                continue;
            };
            drop(state);
            let bytes = chunk.bytes();
            let result = scrub(&chunk.memory, self.plan.scrubber, self.plan.scrub_threads);
            state = self.state();
            *state.dirty(owner.as_ref()) -= bytes;
            if state.stop {
                // The free chunks have been given back already: no request would take this one.
                state.pinned -= bytes;
                drop(state);
                drop(chunk);
                state = self.state();
                continue;
            }
            match result {
                Ok(()) => {
                    // Importers' caches must not take it for the old memory.
                    chunk.memory.renew_identity();
                    self.counters.scrubbed_bytes.fetch_add(bytes, Relaxed);
                    match owner {
                        Some(_) => chunk.turn(Use::Kept),
                        None => chunk.charge = None,
                    }
                    state.free_chunks.put(chunk, owner);
                }
                Err(error) => {
                    let node = self.plan.node;
                    tracing::warn!(%node, %error, "cannot zero memory: it goes back to the driver");
                    self.counters.scrub_failures.fetch_add(1, Relaxed);
                    state.pinned -= bytes;
                    drop(state);
                    drop(chunk);
                    state = self.state();
                }
            }
            self.changed.notify_all();
        }
    }
}

impl<P> SharedReserve<P> {
    /// Waits this long, or until the end.
    fn pause<'a>(
        &self,
        mut state: MutexGuard<'a, ReserveState<P>>,
    ) -> MutexGuard<'a, ReserveState<P>> {
        let until = Instant::now() + self.plan.retry;
        while !state.stop {
            match until.checked_duration_since(Instant::now()) {
                Some(left) if !left.is_zero() => state = self.wait(state, left),
                _ => break,
            }
        }
        state
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, ReserveState<P>>,
        at_most: Duration,
    ) -> MutexGuard<'a, ReserveState<P>> {
        self.changed
            .wait_timeout(state, at_most)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }
}
