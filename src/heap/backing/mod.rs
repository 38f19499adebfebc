//! The memory of a heap: one range of addresses, backed by chunks as it grows.
//!
//! ```text
//! offset 0                                                                       limit
//! ├── chunk ──┼── chunk ──┤   hole   ├── chunk ──┤              no memory yet        │
//!   node 0      node 1    (trimmed)    node 0
//! ```
//!
//! The addresses are reserved once, so blocks never move. Memory is added in chunks, from the plan's nodes in
//! turn, all granted to the same locations; a trimmed chunk leaves a hole that is filled again later. This
//! module knows nothing of blocks. Chunks join, so that a block may lie in several, unless they are shared or registered
//! with the driver one by one. Callers hold one lock around all calls, but no lock that the fast path
//! needs, because driver calls are slow.

mod chunk;
mod fit;
mod grow;
mod hole;
mod order;
mod plan;
mod supply;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{Ordering::Acquire, fence};

pub(crate) use chunk::Chunk;
pub use chunk::DriverCounts;
pub(crate) use fit::{Beside, Want};
#[cfg(test)]
pub(crate) use order::Order;
pub(crate) use plan::Plan;
pub(crate) use supply::{Locked, Supply};

use egmem_core::backing::Chosen;

use crate::driver::{Access, DevicePtr, Driver};
use crate::guard::WORTH_ASKING;
use crate::vmm::{PhysicalMemory, Reservation};
use crate::{Error, Result};
use plan::{Settled, Site};

/// The memory of a heap; releases all of it when dropped.
///
/// Before the drop, and before memory is given back earlier, GPU work that uses it must have finished: a GPU
/// that accesses unmapped addresses loses its context.
#[derive(Debug)]
pub(crate) struct Backing {
    /// Chunks by their starts. Dead ones only keep their addresses from use.
    chunks: BTreeMap<u64, Chunk>,
    /// Memory that the driver refused to release, to be retried.
    strays: Vec<PhysicalMemory>,
    reservation: Arc<Reservation>,
    driver: Driver,
    settled: Settled,
    overcommit: bool,
    backed: u64,
    /// The site whose turn it is.
    turn: usize,
    /// Bytes that may be created at each site before its free memory is checked again.
    trust: Vec<u64>,
    /// Bytes created at each site that are, or become, memory of the heap.
    taken: Vec<u64>,
    /// The chunk size to try first: less than the plan's after a shortage.
    step: u64,
    /// The number of chunks begun.
    orders: u64,
    /// Addresses of growth that was begun.
    claims: Vec<Range<u64>>,
    counts: DriverCounts,
}

impl Backing {
    /// Checks the plan and reserves the addresses. Creates no memory.
    ///
    /// A default limit is halved until the address space has room for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no nodes, a limit or shares below the granularity, chunks of 0 bytes;
    /// [`Error::NoSuchNode`], [`Error::NoSuchGpu`]; the reason why memory cannot be shareable as requested;
    /// [`Error::OutOfAddresses`]; the driver's errors.
    pub(crate) fn new(driver: &Driver, plan: &Plan) -> Result<Self> {
        let mut settled = plan.settle(driver)?;
        let reservation = loop {
            let options = Reservation::options()
                .alignment(settled.shape.unit)
                .backing(settled.chosen.backing);
            match options.reserve(driver, settled.shape.limit) {
                Ok(reservation) => break reservation,
                Err(error) if plan.limit.is_none() && is_out_of_addresses(&error) => {
                    let half = settled.shape.limit / 2 / settled.shape.unit * settled.shape.unit;
                    if half < settled.shape.chunk {
                        return Err(error);
                    }
                    settled.shape.limit = half;
                }
                Err(error) => return Err(error),
            }
        };
        settled.shape.base = reservation.start().0;
        Ok(Self {
            chunks: BTreeMap::new(),
            strays: Vec::new(),
            reservation: Arc::new(reservation),
            driver: driver.clone(),
            overcommit: plan.overcommit,
            backed: 0,
            turn: 0,
            trust: vec![WORTH_ASKING; settled.sites.len()],
            taken: vec![0; settled.sites.len()],
            step: settled.shape.chunk,
            orders: 0,
            claims: Vec::new(),
            counts: DriverCounts::default(),
            settled,
        })
    }

    /// Returns the address of offset 0: a multiple of 2 MiB.
    pub(crate) fn start(&self) -> DevicePtr {
        self.reservation.start()
    }

    /// Returns the bytes of addresses, which is also the most memory: a multiple of 2 MiB.
    pub(crate) const fn limit(&self) -> u64 {
        self.settled.shape.limit
    }

    /// Returns the bytes that have memory.
    pub(crate) const fn backed(&self) -> u64 {
        self.backed
    }

    /// Returns the size of a chunk when nothing limits it.
    pub(crate) const fn chunk(&self) -> u64 {
        self.settled.shape.chunk
    }

    /// Returns whether blocks may lie in several chunks.
    pub(crate) const fn joins(&self) -> bool {
        self.settled.shape.joins
    }

    /// Returns whether chunks can be exported: importers may write anywhere in them.
    pub(crate) fn is_exportable(&self) -> bool {
        self.settled.sites.iter().any(Site::is_exportable)
    }

    /// Returns what chunks are made of.
    pub(crate) const fn chosen(&self) -> &Chosen {
        &self.settled.chosen
    }

    /// Returns the CPU's access to every chunk.
    pub(crate) fn host_access(&self) -> Access {
        let mut access = self.settled.access.iter();
        let host = access.find(|desc| desc.location.is_host());
        host.map_or(Access::None, |desc| desc.access)
    }

    /// Iterates over the chunks, by ascending offsets.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.chunks.values().filter(|chunk| !chunk.dead)
    }

    /// Iterates over the chunks that end at `end` or before, by descending offsets.
    pub(crate) fn chunks_before(&self, end: u64) -> impl Iterator<Item = &Chunk> {
        let chunks = self.chunks.range(..end).rev().map(|(_, chunk)| chunk);
        chunks.filter(move |chunk| !chunk.dead && chunk.range().end <= end)
    }

    /// Returns the chunk at `offset`.
    pub(crate) fn chunk_at(&self, offset: u64) -> Option<&Chunk> {
        let (_, chunk) = self.chunks.range(..=offset).next_back()?;
        (offset < chunk.range().end && !chunk.dead).then_some(chunk)
    }

    /// Returns the counts of driver calls so far.
    pub(crate) const fn counts(&self) -> DriverCounts {
        self.counts
    }

    /// Gives back the chunk at `start`. Returns whether it was given back, and the driver's error. A chunk stays
    /// memory of the heap if other code holds its memory, or if the driver refuses to unmap it.
    ///
    /// The caller has taken it out of use before, no view of it exists, and GPU work on it has finished.
    pub(crate) fn give_back(&mut self, start: u64) -> (bool, Option<Error>) {
        self.sweep();
        let Some(chunk) = self.chunks.remove(&start) else {
            return (false, None);
        };
        let (bytes, turn) = (chunk.bytes(), chunk.turn);
        let (is_gone, error) = self.retire(chunk);
        if is_gone {
            self.backed -= bytes;
            self.taken[turn] -= bytes;
        }
        (is_gone, error)
    }

    /// Unmaps and releases a chunk, or keeps it if other code holds its memory or the driver refuses to unmap it.
    /// Returns whether it was given back, and the driver's error.
    fn retire(&mut self, chunk: Chunk) -> (bool, Option<Error>) {
        // A count of 1 stays 1: clones are made of a chunk in the backing, and this one is out of it; no other `Arc`
        // is left to be cloned, and there is no `Weak`.
        if Arc::strong_count(chunk.part.memory()) > 1 {
            self.chunks.insert(chunk.range().start, chunk);
            return (false, None);
        }
        // After all that the last other holder did with the memory before it let go: the count is read relaxed.
        fence(Acquire);
        self.counts.unmap += 1;
        let (order, turn, dead) = (chunk.order, chunk.turn, chunk.dead);
        match chunk.part.unmap() {
            Ok(memory) => {
                let memory = Arc::into_inner(memory);
                (true, memory.and_then(|memory| self.release(memory)))
            }
            Err(refused) => {
                let (part, error) = *refused;
                let chunk = Chunk {
                    part,
                    order,
                    turn,
                    dead,
                };
                self.chunks.insert(chunk.range().start, chunk);
                (false, Some(error))
            }
        }
    }

    /// Releases memory, or keeps it if the driver refuses; returns the driver's error.
    fn release(&mut self, memory: PhysicalMemory) -> Option<Error> {
        self.counts.release += 1;
        let (memory, error) = *memory.try_release().err()?;
        self.strays.extend(memory);
        Some(error)
    }

    /// As [`release`](Self::release), but logs the error.
    fn release_or_log(&mut self, memory: PhysicalMemory) {
        let bytes = memory.size().padded();
        if let Some(error) = self.release(memory) {
            log_not_released(bytes, &error);
        }
    }

    /// Gives back a chunk that did not become part of the heap. If the driver refuses, the chunk is kept for
    /// a retry.
    fn undo(&mut self, mut chunk: Chunk) {
        if !chunk.dead {
            chunk.dead = true;
            self.taken[chunk.turn] -= chunk.bytes();
        }
        let range = chunk.range();
        match self.retire(chunk) {
            (_, None) => {}
            (true, Some(error)) => log_not_released(range.end - range.start, &error),
            (false, Some(error)) => {
                tracing::warn!(?range, %error, "a chunk that is no memory of the heap cannot be unmapped yet");
            }
        }
    }

    /// Retries to give back memory that the driver refused to take.
    fn sweep(&mut self) {
        for memory in std::mem::take(&mut self.strays) {
            self.release_or_log(memory);
        }
        let dead: Vec<u64> = self
            .chunks
            .iter()
            .filter(|(_, chunk)| chunk.dead)
            .map(|(&at, _)| at)
            .collect();
        for at in dead {
            if let Some(chunk) = self.chunks.remove(&at) {
                self.undo(chunk);
            }
        }
    }
}

fn is_out_of_addresses(error: &Error) -> bool {
    match error {
        Error::OutOfAddresses { .. } => true,
        // The kernel's, for registered memory.
        Error::System { kind, .. } => *kind == ErrorKind::OutOfMemory,
        _ => false,
    }
}

fn log_not_released(bytes: u64, error: &Error) {
    tracing::warn!(bytes, %error, "memory that is not mapped cannot be released yet");
}
