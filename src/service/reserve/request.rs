//! Serves requests: from ready memory, and beyond that with new memory.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::{Chunk, Plan, ReserveState, SharedReserve};
use crate::driver::{AccessDesc, Location};
use crate::free_chunks::HasBytes;
use crate::guard::is_shortage;
use crate::quota::{Charge, Use};
use crate::reuse_policy::{Discard, Past, Verdict};
use crate::share::MAX_PARTS;
use crate::topology::free_now;
use crate::vmm::{PhysicalMemory, PhysicalOptions};
use crate::{Backing, Error, MemoryError, MemoryResult, Refusal, Result};

impl<P: Clone + Eq> SharedReserve<P> {
    /// Adds chunks of `padded` bytes to `taken`; after an error the chunks taken so far stay there.
    pub(super) fn take(
        &self,
        peer: Option<&P>,
        padded: u64,
        taken: &mut Vec<Chunk<P>>,
    ) -> Result<()> {
        let (warm, mut missing) = {
            let mut state = self.state();
            if state.stop {
                return Err(ended());
            }
            state.taken = Some(Instant::now());
            state
                .free_chunks
                .take(peer, padded, MAX_PARTS.saturating_sub(taken.len()))
        };
        taken.extend(warm);
        self.counters
            .taken_warm_bytes
            .fetch_add(padded - missing, Relaxed);
        self.changed.notify_all();
        if missing == 0 {
            return Ok(());
        }
        self.state().demands += 1;
        let result = loop {
            if missing == 0 {
                break Ok(());
            }
            if taken.len() >= MAX_PARTS {
                break Err(Error::LimitReached {
                    what: "parts of one buffer",
                    limit: MAX_PARTS as u64,
                });
            }
            match self.make_for(peer, missing) {
                Ok(chunk) => {
                    missing -= chunk.bytes();
                    self.counters
                        .taken_cold_bytes
                        .fetch_add(chunk.bytes(), Relaxed);
                    taken.push(chunk);
                }
                Err(error) => break Err(error),
            }
        };
        self.state().demands -= 1;
        self.changed.notify_all();
        result
    }

    /// Creates a chunk of one granule, unless something would have to be evicted for it.
    pub(super) fn extra(&self) -> Option<Chunk<P>> {
        let bytes = self.granule.bytes();
        {
            let mut state = self.state();
            if state.stop || state.pinned.saturating_add(bytes) > self.plan.cap {
                return None;
            }
            state.pinned += bytes;
        }
        match self.create(bytes) {
            Ok(memory) => {
                self.counters.taken_cold_bytes.fetch_add(bytes, Relaxed);
                Some(Chunk::fresh(memory))
            }
            Err(error) => {
                self.state().pinned -= bytes;
                tracing::info!(node = %self.plan.node, %error, "no room for a probe");
                None
            }
        }
    }

    /// Creates one chunk of at most `missing` bytes; evicts free chunks if that helps.
    fn make_for(&self, peer: Option<&P>, missing: u64) -> Result<Chunk<P>> {
        let mut bytes = missing.min(self.plan.chunk);
        loop {
            let evicted = {
                let mut state = self.state();
                if state.stop {
                    return Err(ended());
                }
                let need = state.pinned.saturating_add(bytes);
                let evicted = match need.checked_sub(self.plan.cap) {
                    None | Some(0) => Vec::new(),
                    Some(over) => state.free_chunks.evict(peer, over),
                };
                state.pinned -= total(&evicted);
                if state.pinned.saturating_add(bytes) > self.plan.cap {
                    drop(state);
                    self.evicted(evicted);
                    return Err(Error::LimitReached {
                        what: "bytes on the node",
                        limit: self.plan.cap,
                    });
                }
                state.pinned += bytes;
                evicted
            };
            self.evicted(evicted);
            let error = match self.create(bytes) {
                Ok(memory) => return Ok(Chunk::fresh(memory)),
                Err(error) => error,
            };
            let mut state = self.state();
            state.pinned -= bytes;
            if !is_shortage(&error) {
                return Err(error.into());
            }
            // Free chunks are useless while a request cannot be served.
            let evicted = state.free_chunks.evict(peer, bytes);
            state.pinned -= total(&evicted);
            drop(state);
            if !evicted.is_empty() {
                self.evicted(evicted);
            } else if bytes > self.plan.min_chunk {
                bytes = self.halved(bytes);
            } else {
                return Err(error.into());
            }
        }
    }

    /// Creates physical memory of `bytes`, if the node keeps its headroom.
    pub(super) fn create(&self, bytes: u64) -> MemoryResult<PhysicalMemory> {
        let made = self
            .room_for(bytes)
            .and_then(|()| options(&self.plan).create(&self.driver, bytes))
            .and_then(with_pages);
        match &made {
            Ok(_) => {
                self.counters.made_chunks.fetch_add(1, Relaxed);
                self.counters.made_bytes.fetch_add(bytes, Relaxed);
            }
            Err(_) => {
                self.counters.failed_chunks.fetch_add(1, Relaxed);
            }
        }
        made
    }

    fn room_for(&self, bytes: u64) -> MemoryResult<()> {
        let node = self.plan.node;
        match free_now(&self.driver, node) {
            Some(free) if free < bytes.saturating_add(self.plan.headroom) => {
                Err(MemoryError::NodeTooFull {
                    node,
                    requested: bytes,
                    free: free.saturating_sub(self.plan.headroom),
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns half, in whole granules, and at least the smallest chunk.
    pub(super) fn halved(&self, bytes: u64) -> u64 {
        (bytes / 2)
            .next_multiple_of(self.granule.bytes())
            .max(self.plan.min_chunk)
    }

    fn evicted(&self, chunks: Vec<Chunk<P>>) {
        self.counters
            .evicted_bytes
            .fetch_add(total(&chunks), Relaxed);
        // Released here, outside the lock.
        drop(chunks);
    }

    pub(super) fn evict_charged(&self, charge: &Charge, bytes: u64) -> u64 {
        let same = |chunk: &Chunk<P>| {
            let its = chunk.charge.as_ref();
            its.is_some_and(|its| its.is_same_peer(charge))
        };
        let mut evicted = Vec::new();
        {
            let mut state = self.state();
            let mut left = VecDeque::new();
            // Memory that waits to be zeroed goes first: that saves the work.
            for (chunk, owner) in std::mem::take(&mut state.dirty) {
                match same(&chunk) && total(&evicted) < bytes {
                    true => {
                        *state.dirty(owner.as_ref()) -= chunk.bytes();
                        evicted.push(chunk);
                    }
                    false => left.push_back((chunk, owner)),
                }
            }
            state.dirty = left;
            let more = bytes.saturating_sub(total(&evicted));
            let kept = state.free_chunks.evict_some(more, same);
            evicted.extend(kept);
            state.pinned -= total(&evicted);
        }
        let freed = total(&evicted);
        if freed > 0 {
            self.evicted(evicted);
            self.changed.notify_all();
        }
        freed
    }

    pub(super) fn give_back(&self, chunks: Vec<Chunk<P>>) {
        let mut discarded = Vec::new();
        {
            let mut state = self.state();
            for chunk in chunks {
                let bytes = chunk.bytes();
                let Err(unkept) = self.keep(&mut state, chunk) else {
                    continue;
                };
                let (chunk, why) = *unkept;
                match why {
                    Discard::Tainted => &self.counters.discarded_tainted_bytes,
                    Discard::Policy => &self.counters.discarded_policy_bytes,
                }
                .fetch_add(bytes, Relaxed);
                state.pinned -= bytes;
                discarded.push(chunk);
            }
        }
        drop(discarded);
        self.changed.notify_all();
    }

    /// Keeps a returned chunk, to be handed out again. The reserve never has more than the plan says: memory
    /// beyond that would stay pinned, and no peer's quota counts it.
    ///
    /// # Errors
    /// The chunk, if by its history or the plan it goes back to the driver.
    fn keep(
        &self,
        state: &mut ReserveState<P>,
        mut chunk: Chunk<P>,
    ) -> Result<(), Box<(Chunk<P>, Discard)>> {
        let (plan, bytes) = (&self.plan, chunk.bytes());
        let owner = match chunk.past.verdict(plan.reuse) {
            Verdict::Discard(why) => return Err(Box::new((chunk, why))),
            _ if state.stop => return Err(Box::new((chunk, Discard::Policy))),
            Verdict::ScrubFor(owner) => Some(owner),
            Verdict::AsItIs | Verdict::ScrubForAnyone => None,
        };
        let (there, most) = match owner {
            Some(_) => (state.kept_soon(), plan.keep),
            None => (state.warm_soon(), plan.target.max(plan.keep)),
        };
        if there + bytes > most {
            return Err(Box::new((chunk, Discard::Policy)));
        }
        if owner.is_none() && chunk.past == Past::Fresh {
            chunk.charge = None;
            state.free_chunks.put(chunk, None);
            return Ok(());
        }
        chunk.turn(Use::Dirty);
        *state.dirty(owner.as_ref()) += bytes;
        state.dirty.push_back((chunk, owner));
        Ok(())
    }
}

impl<P> Chunk<P> {
    /// Creates a chunk that no peer has seen.
    pub(super) const fn fresh(memory: PhysicalMemory) -> Self {
        Self {
            memory,
            charge: None,
            past: Past::Fresh,
        }
    }

    /// Changes the use that its bytes are charged for.
    pub(super) fn turn(&mut self, what: Use) {
        if let Some(charge) = &mut self.charge {
            charge.turn(what);
        }
    }
}

fn ended() -> Error {
    Error::Refused {
        peer: "the service".into(),
        what: "memory of its reserve".into(),
        reason: Refusal::Closing,
        detail: "the service is ending".into(),
    }
}

pub(super) fn total<P>(chunks: &[Chunk<P>]) -> u64 {
    chunks
        .iter()
        .fold(0, |sum, chunk| sum.saturating_add(chunk.bytes()))
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

pub(super) fn options(plan: &Plan) -> PhysicalOptions {
    PhysicalMemory::options(plan.node)
        .handle_types(plan.handle_types)
        .chosen(plan.backing.clone())
}
