//! The reserve's two threads: one fills it, the other zeroes returned memory.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{NodeReserve, ReserveState};
use crate::driver::{Access, AccessDesc, Location};
use crate::guard::is_shortage;
use crate::memory::{Memory, ParallelCopy};
use crate::quota::Use;
use crate::reuse_policy::Scrubber;
use crate::size::Bytes;
use crate::vmm::PhysicalMemory;
use crate::{MemoryError, MemoryResult, Result, Stream};

/// The timeout of a wait that a wakeup ends: longer than any such wait takes.
pub(super) const LONG: Duration = Duration::from_secs(3600);

impl NodeReserve {
    /// Runs the first thread: keeps the reserve full.
    pub(super) fn fill(&self) {
        let begun = Instant::now();
        loop {
            let mut state = self.state();
            if state.stop {
                let chunks = std::mem::take(&mut state.free_chunks);
                state.pinned -= chunks.levels().all();
                drop(state);
                drop(chunks);
                return;
            }
            // Memory that is being zeroed will be ready without asking the driver.
            let lacking = self.plan.reserve.bytes.saturating_sub(state.warm_soon());
            // `next_chunk` leaves less only where a piece of another size has been returned.
            let is_full = lacking < self.plan.reserve.min_chunk;
            if is_full && state.filled.is_none() {
                drop(state);
                self.first_filled(Ok(()));
                continue;
            }
            // The driver does one thing at a time: filling would slow the client's import.
            let since = state.taken.map_or(Duration::MAX, |taken| taken.elapsed());
            let quiet = self.plan.limits.quiet.saturating_sub(since);
            let waits = is_full || state.demands > 0;
            if waits || !quiet.is_zero() {
                self.wait(state, if waits { LONG } else { quiet });
                continue;
            }
            let bytes = self.next_chunk(state.chunk, lacking);
            if state.pinned.saturating_add(bytes) > self.plan.limits.max_bytes {
                drop(state);
                self.first_filled(Err(self.at_cap()));
                self.pause();
                continue;
            }
            state.pinned += bytes;
            state.filling = bytes;
            drop(state);
            let (mut state, made) = self.create(bytes);
            state.filling = 0;
            state.arrived();
            let made = made.map(|chunk| state.free_chunks.put(chunk, bytes, None, false));
            drop(state);
            self.changed.notify_all();
            match made {
                Ok(()) => self.log_filling(begun),
                Err(error) => self.not_created(bytes, error),
            }
        }
    }

    /// Returns the size of the next of the chunks that make up what is lacking, so that none is left that would be too small.
    fn next_chunk(&self, chunk: u64, lacking: u64) -> u64 {
        let reserve = &self.plan.reserve;
        if lacking.saturating_sub(chunk) >= reserve.min_chunk {
            chunk
        } else if lacking <= reserve.chunk {
            lacking
        } else {
            lacking - reserve.min_chunk
        }
    }

    /// Makes the chunks smaller after a shortage, where they can be; otherwise waits before the next try.
    fn not_created(&self, bytes: u64, error: MemoryError) {
        let mut state = self.state();
        if is_shortage(&error) && state.chunk > self.plan.reserve.min_chunk {
            state.chunk = self.halved(bytes.min(state.chunk));
            return;
        }
        drop(state);
        let node = self.node();
        tracing::warn!(%node, %error, "the reserve cannot be filled for now");
        self.first_filled(Err(error.into()));
        self.pause();
        // There may be room for whole chunks again.
        self.state().chunk = self.plan.reserve.chunk;
    }

    /// Logs each tenth of the first filling.
    fn log_filling(&self, begun: Instant) {
        let mut state = self.state();
        let (ready, target) = (state.free_chunks.levels().warm, self.plan.reserve.bytes);
        let tenths = ready / target.div_ceil(10).max(1);
        if state.filled.is_some() || tenths <= state.logged {
            return;
        }
        state.logged = tenths;
        drop(state);
        let (node, took) = (self.node(), begun.elapsed());
        let rate = format!("{:.2} GB/s", ready as f64 / took.as_secs_f64() / 1e9);
        tracing::info!(%node, ready = %Bytes(ready), target = %Bytes(target), %rate, "filling the reserve");
    }

    /// Notes the result of the first filling.
    fn first_filled(&self, result: Result<()>) {
        let mut state = self.state();
        if state.filled.is_some() {
            return;
        }
        state.filled = Some(result.clone());
        drop(state);
        let Some(unready) = &self.plan.unready else {
            return;
        };
        let node = self.node();
        match result {
            Ok(()) => tracing::info!(%node, "the reserve is full"),
            Err(error) => tracing::warn!(%node, %error, "ready without a full reserve"),
        }
        unready.send_modify(|count| *count -= 1);
    }

    /// Runs the second thread: zeroes returned memory.
    pub(super) fn scrub(&self) {
        loop {
            let mut state = self.state();
            if state.stop {
                return;
            }
            let Some((mut chunk, owner)) = state.free_chunks.take_dirty() else {
                self.wait(state, LONG);
                continue;
            };
            let bytes = chunk.bytes();
            state.scrubbing = Some((bytes, owner.is_some()));
            drop(state);
            let result = scrub(
                &chunk.memory,
                self.plan.reuse.scrub,
                self.plan.reuse.threads,
            );
            if let Err(error) = &result {
                let node = self.node();
                tracing::warn!(%node, %error, "cannot zero memory: it goes back to the driver");
            }
            let mut state = self.state();
            state.scrubbing = None;
            state.arrived();
            match result {
                Ok(()) => state.counts.scrubbed_bytes += bytes,
                Err(_) => state.counts.scrub_failures += 1,
            }
            // At the end the free chunks have been given back already: no request would take this one.
            if result.is_err() || state.stop {
                state.pinned -= bytes;
                self.release(state, vec![chunk]);
            } else {
                // Importers' caches must not take it for the old memory.
                chunk.memory.renew_identity();
                match owner {
                    Some(_) => chunk.charge.iter_mut().for_each(|it| it.turn(Use::Kept)),
                    None => chunk.charge = None,
                }
                state.free_chunks.put(chunk, bytes, owner, false);
                drop(state);
            }
            self.changed.notify_all();
        }
    }

    /// Waits until the next try, or until the end.
    fn pause(&self) {
        let (state, retry) = (self.state(), self.plan.limits.retry);
        // After a poisoned lock the next try is only earlier.
        let _ = (self.changed).wait_timeout_while(state, retry, |state| !state.stop);
    }

    /// Waits for a change, for at most this long.
    pub(super) fn wait(&self, state: MutexGuard<'_, ReserveState>, at_most: Duration) {
        let waited = self.changed.wait_timeout(state, at_most);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Zeroes all of `memory`; leaves none of it mapped.
///
/// # Errors
/// Those of mapping and granting; with the GPU, the driver's errors. Some bytes may not be zero then.
fn scrub(memory: &PhysicalMemory, by: Scrubber, threads: usize) -> MemoryResult<()> {
    let mut mapping = memory.map()?;
    match by {
        Scrubber::Gpu => {
            let gpu = Location::Device(0);
            mapping.set_access(&[AccessDesc::new(gpu, Access::ReadWrite)])?;
            let stream = Stream::new(memory.driver(), 0)?;
            let filled = stream.fill(&mapping, 0, mapping.len(), 0);
            // Even after an error, no work may still run when the mapping is dropped.
            stream.synchronize().and(filled)
        }
        Scrubber::Cpu => {
            mapping.set_access(&[AccessDesc::new(Location::Host, Access::ReadWrite)])?;
            let fill = ParallelCopy::new().threads(threads);
            fill.fill(mapping.cpu()?, 0, memory.size().padded(), 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::NodeId;
    use crate::{Driver, Machine};

    #[test]
    fn every_byte_is_zero_afterwards_and_nothing_is_mapped() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        for (by, bytes) in [
            (Scrubber::Cpu, 2 << 20),
            (Scrubber::Cpu, 50 << 20),
            (Scrubber::Gpu, 6 << 20),
        ] {
            let memory = PhysicalMemory::options(NodeId(0))
                .create(&driver, bytes)
                .unwrap();
            let host = [AccessDesc::new(Location::Host, Access::ReadWrite)];
            let mut mapping = memory.map().unwrap();
            mapping.set_access(&host).unwrap();
            mapping.cpu().unwrap().fill(0, bytes, 0xa5).unwrap();
            let before = driver.sim().unwrap().held().to_string();
            scrub(&memory, by, 3).unwrap();
            assert_eq!(driver.sim().unwrap().held().to_string(), before);
            let mut found = vec![1_u8; bytes as usize];
            mapping.cpu().unwrap().read_at(0, &mut found).unwrap();
            assert!(found.iter().all(|&byte| byte == 0), "{by:?}");
        }
    }
}
