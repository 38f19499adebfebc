//! Serves requests: from ready memory, and beyond that with new memory.

use std::sync::MutexGuard;
use std::time::Instant;

use super::threads::LONG;
use super::{Chunk, NodeReserve, Plan, ReserveState, total};
use crate::driver::{AccessDesc, Location};
use crate::exchange::PeerName;
use crate::guard::is_shortage;
use crate::quota::{Charge, Use};
use crate::reuse_policy::{Discard, Past};
use crate::share::MAX_PARTS;
use crate::vmm::PhysicalMemory;
use crate::{Backing, ENDING, Error, MemoryError, MemoryResult, Refusal, Result, refused};

impl NodeReserve {
    /// Takes chunks of at most `bytes` together that are kept for this peer. Their charges end: the caller's counts them.
    pub fn take_kept(&self, peer: &PeerName, bytes: u64) -> Vec<Chunk> {
        let mut state = self.state();
        let parts = (MAX_PARTS, self.plan.reserve.chunk);
        let (mut taken, missing) =
            (state.free_chunks).take(bytes, parts, |owner| owner == Some(peer));
        state.counts.taken_warm_bytes += bytes - missing;
        drop(state);
        end_charges(&mut taken);
        taken
    }

    /// Adds chunks to `taken` until they have `bytes` together, rounded up to the granularity: first from the
    /// reserve, then created now. Blocks while memory is created, and asks before each chunk whether it is still `wanted`.
    /// After an error `taken` contains the chunks taken so far. Their charges end: the caller's counts them.
    ///
    /// # Errors
    /// [`Error::LimitReached`] beyond the cap or in more than [`MAX_PARTS`] pieces;
    /// [`NodeTooFull`](MemoryError::NodeTooFull) beyond the node's memory; those of `wanted` and of creating memory.
    pub fn fill_up(
        &self,
        peer: Option<&PeerName>,
        bytes: u64,
        taken: &mut Vec<Chunk>,
        wanted: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let lacking = self.padded(bytes)?.saturating_sub(total(taken));
        let mut state = self.state();
        state.taken = Some(Instant::now());
        let left = MAX_PARTS.saturating_sub(taken.len());
        let may = |owner: Option<&PeerName>| owner.is_none() || owner == peer;
        let (warm, missing) =
            (state.free_chunks).take(lacking, (left, self.plan.reserve.chunk), may);
        taken.extend(warm);
        state.counts.taken_warm_bytes += lacking - missing;
        state.demands += 1;
        drop(state);
        self.changed.notify_all();
        end_charges(taken);
        let result = self.create_missing(peer, missing, taken, wanted);
        self.state().demands -= 1;
        self.changed.notify_all();
        result
    }

    /// Checks that the bytes missing beside those taken fit the node, the cap and [`MAX_PARTS`] if every free chunk gives way,
    /// so that a request that cannot be served pins nothing. Other requests may still take the room.
    fn check_room(&self, missing: u64, taken: &[Chunk]) -> Result<()> {
        let limits = &self.plan.limits;
        let parts = missing.div_ceil(self.plan.reserve.chunk);
        if parts.saturating_add(taken.len() as u64) > MAX_PARTS as u64 {
            return Err(too_many_parts());
        }
        let state = self.state();
        let idle = state.levels().all() + state.filling;
        let used = state.pinned.saturating_sub(idle);
        let soon = idle + state.returning;
        drop(state);
        // Read last: memory that has been released meanwhile counts twice, and none is missed.
        let free = self.free();
        if used.saturating_add(missing) > limits.max_bytes {
            return Err(self.at_cap());
        }
        let room = free.map(|free| free.saturating_add(soon).saturating_sub(limits.headroom));
        if let Some(free) = room.filter(|room| *room < missing) {
            let requested = missing.saturating_add(total(taken));
            let free = free.saturating_add(total(taken));
            return Err(self.too_full(requested, free).into());
        }
        Ok(())
    }

    fn create_missing(
        &self,
        peer: Option<&PeerName>,
        mut missing: u64,
        taken: &mut Vec<Chunk>,
        wanted: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        if missing > 0 {
            self.check_room(missing, taken)?;
        }
        while missing > 0 {
            if taken.len() >= MAX_PARTS {
                return Err(too_many_parts());
            }
            let chunk = self.create_for(peer, missing, wanted)?;
            missing -= chunk.bytes();
            self.state().counts.taken_cold_bytes += chunk.bytes();
            taken.push(chunk);
        }
        Ok(())
    }

    /// Creates one chunk of at most `missing` bytes. Evicts free chunks and waits for memory on its way if that helps.
    fn create_for(
        &self,
        peer: Option<&PeerName>,
        missing: u64,
        wanted: &dyn Fn() -> Result<()>,
    ) -> Result<Chunk> {
        let (max_bytes, reserve) = (self.plan.limits.max_bytes, &self.plan.reserve);
        let mut bytes = missing.min(reserve.chunk);
        loop {
            // A client may have gone and the service may end long before all chunks exist.
            wanted()?;
            let mut state = self.state();
            if state.stop {
                return Err(ended());
            }
            let over = state.pinned.saturating_add(bytes).saturating_sub(max_bytes);
            let evicted = state.evict(|free| free.evict(peer, over));
            if state.pinned.saturating_add(bytes) > max_bytes {
                if evicted.is_empty() && !state.is_busy() {
                    return Err(self.at_cap());
                }
                self.release_or_wait(state, evicted);
                continue;
            }
            state.pinned += bytes;
            let arrivals = state.arrivals;
            self.release(state, evicted);
            let (mut state, made) = self.create(bytes);
            let error = match made {
                Ok(chunk) => return Ok(chunk),
                Err(error) => error,
            };
            if !is_shortage(&error) {
                return Err(error.into());
            }
            // Free chunks are useless while a request cannot be served.
            let evicted = state.evict(|free| free.evict(peer, bytes));
            if evicted.is_empty() && bytes > reserve.min_chunk {
                drop(state);
                bytes = self.halved(bytes);
            } else if !evicted.is_empty() || state.arrivals == arrivals {
                if evicted.is_empty() && !state.is_busy() && state.returning == 0 {
                    return Err(error.into());
                }
                self.release_or_wait(state, evicted);
            }
        }
    }

    /// Releases evicted chunks; without any, waits for a change.
    fn release_or_wait(&self, state: MutexGuard<'_, ReserveState>, evicted: Vec<Chunk>) {
        if evicted.is_empty() {
            self.wait(state, LONG);
        } else {
            self.release(state, evicted);
        }
    }

    /// Creates a granule for memory of `parts` chunks, unless it would be too many or there is no room: nothing is evicted for it.
    pub fn add_granule(&self, parts: usize) -> Option<Chunk> {
        let bytes = self.granule();
        let mut state = self.state();
        let fits = state.pinned.saturating_add(bytes) <= self.plan.limits.max_bytes;
        if state.stop || parts >= MAX_PARTS || !fits {
            return None;
        }
        state.pinned += bytes;
        drop(state);
        let (state, made) = self.create(bytes);
        drop(state);
        made.inspect_err(|error| tracing::debug!(%error, "memory goes without room for probes"))
            .ok()
    }

    /// Creates a chunk, if the node keeps its headroom or may be overcommitted. The caller has counted its bytes as pinned;
    /// after an error they no longer are. Returns the state with that, for what else changes with it.
    pub(super) fn create(&self, bytes: u64) -> (MutexGuard<'_, ReserveState>, MemoryResult<Chunk>) {
        let free = self.free();
        let free = free.map(|free| free.saturating_sub(self.plan.limits.headroom));
        let made = match free.filter(|free| *free < bytes) {
            Some(free) => Err(self.too_full(bytes, free)),
            None => (self.plan.options().create(&self.driver, bytes)).and_then(with_pages),
        };
        let mut state = self.state();
        if made.is_ok() {
            state.counts.made_chunks += 1;
            state.counts.made_bytes += bytes;
        } else {
            state.counts.failed_chunks += 1;
            state.pinned -= bytes;
        }
        (state, made.map(|memory| Chunk::new(memory, Past::Fresh)))
    }

    /// Returns half, in whole granules, and at least the smallest chunk.
    pub(super) fn halved(&self, bytes: u64) -> u64 {
        let half = (bytes / 2).next_multiple_of(self.granule());
        half.max(self.plan.reserve.min_chunk)
    }

    fn too_full(&self, requested: u64, free: u64) -> MemoryError {
        MemoryError::NodeTooFull {
            node: self.node(),
            requested,
            free,
        }
    }

    pub(super) fn at_cap(&self) -> Error {
        limit_reached("bytes on the node", self.plan.limits.max_bytes)
    }

    /// Gives memory that is charged to the same peer, kept or waiting to be zeroed, back to the driver until
    /// `bytes` are free or none is left; returns the bytes.
    pub fn evict_charged(&self, charge: &Charge, bytes: u64) -> u64 {
        let same = |chunk: &Chunk| {
            let its = chunk.charge.as_ref();
            its.is_some_and(|its| its.is_same_peer(charge))
        };
        let mut state = self.state();
        let evicted = state.evict(|free| free.evict_some(bytes, same));
        let freed = total(&evicted);
        self.release(state, evicted);
        freed
    }

    /// Takes back chunks that no peer holds; each chunk's history decides its next use. Each takes its bytes' part of
    /// `charge` along, and the rest of it ends.
    pub fn give_back(&self, chunks: Vec<Chunk>, mut charge: Option<Charge>) {
        let mut discarded = Vec::new();
        let mut state = self.state();
        for mut chunk in chunks {
            let bytes = chunk.bytes();
            chunk.charge = charge.as_mut().map(|charge| charge.split(bytes));
            match state.next_owner(&self.plan, &chunk) {
                Err(why) => {
                    state.discard(bytes, why);
                    discarded.push(chunk);
                }
                Ok(None) if chunk.past == Past::Fresh => {
                    chunk.charge = None;
                    state.free_chunks.put(chunk, bytes, None, false);
                }
                Ok(owner) => {
                    chunk.charge.iter_mut().for_each(|it| it.turn(Use::Dirty));
                    state.free_chunks.put(chunk, bytes, owner, true);
                }
            }
        }
        self.release(state, discarded);
        self.changed.notify_all();
    }

    /// Notes that memory that was taken will not return: it went to the driver, and some code may still use it.
    pub fn lost(&self, bytes: u64) {
        self.state().discard(bytes, Discard::Tainted);
        self.changed.notify_all();
    }
}

impl ReserveState {
    /// Returns the only peer that may have a returned chunk again; `None` for any. The reserve never has more than the
    /// plan says: memory beyond that would stay pinned, and no peer's quota counts it.
    ///
    /// # Errors
    /// Why the chunk goes back to the driver, by its history or the plan.
    fn next_owner(&self, plan: &Plan, chunk: &Chunk) -> Result<Option<PeerName>, Discard> {
        let owner = chunk.past.next_owner(plan.reuse.policy)?;
        let levels = self.levels();
        let (there, most) = match owner {
            Some(_) => (levels.kept + levels.dirty_kept, plan.reuse.keep),
            None => (self.warm_soon(), plan.reserve.bytes.max(plan.reuse.keep)),
        };
        if self.stop || there + chunk.bytes() > most {
            return Err(Discard::Policy);
        }
        Ok(owner)
    }
}

fn end_charges(chunks: &mut [Chunk]) {
    chunks.iter_mut().for_each(|chunk| chunk.charge = None);
}

fn too_many_parts() -> Error {
    limit_reached("parts of one buffer", MAX_PARTS as u64)
}

fn limit_reached(what: &'static str, limit: u64) -> Error {
    Error::LimitReached { what, limit }
}

pub(super) fn ended() -> Error {
    refused("memory of its reserve", Refusal::Closing, ENDING)
}

/// Creates the pages of new registered memory: its first mapping does, and they outlive it.
fn with_pages(memory: PhysicalMemory) -> MemoryResult<PhysicalMemory> {
    if memory.backing() == Backing::Registered {
        // Waits until they exist.
        memory
            .map()?
            .set_access(&[AccessDesc::read_write(Location::Host)])?;
    }
    Ok(memory)
}
