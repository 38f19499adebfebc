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
//! module knows nothing of blocks. Callers hold one lock around all calls, but no lock that the fast path
//! needs, because driver calls are slow.

mod chunk;
mod fit;
mod grow;
mod order;
mod plan;
mod supply;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

pub(crate) use chunk::{Chunk, Counts};
pub(crate) use fit::{Beside, Want};
#[cfg(test)]
pub(crate) use order::Order;
pub(crate) use plan::Plan;
pub(crate) use supply::{Locked, Supply};

use super::core::MAX_RANGE;
use crate::driver::{Access, Code, DevicePtr, Driver, HandleTypes};
use crate::guard::WORTH_ASKING;
use crate::vmm::{PhysicalMemory, Reservation};
use crate::{Error, Result};
use chunk::Retired;
use fit::Shape;
use plan::Settled;

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
    counts: Counts,
}

/// A range that has memory now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grown {
    /// Bytes from the heap's start.
    pub range: Range<u64>,
    /// Whether a block may reach over its ends into adjacent memory.
    pub joins: bool,
}

/// The outcome of giving a range back.
#[derive(Debug, Default)]
#[must_use = "what was not given back is still memory of the heap"]
pub(crate) struct GivenBack {
    /// Ranges without memory now, chunk by chunk.
    pub gone: Vec<Range<u64>>,
    /// Ranges that are still memory of the heap: parts of chunks that extend beyond the range, chunks whose
    /// memory other code holds, and chunks that the driver refused to unmap. Ranges of different chunks are
    /// not merged.
    pub kept: Vec<Range<u64>>,
    /// The driver's first error.
    pub error: Option<Error>,
}

impl GivenBack {
    /// Returns the bytes given back.
    pub(crate) fn bytes(&self) -> u64 {
        self.gone.iter().map(|range| range.end - range.start).sum()
    }
}

impl Backing {
    /// Checks the plan and reserves the addresses. Creates no memory.
    ///
    /// A default limit is halved until the address space has room for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no nodes, a limit or shares below the granularity, chunks of 0 bytes,
    /// an alignment that is not a power of two of at least 2 MiB; [`Error::NoSuchNode`],
    /// [`Error::NoSuchGpu`]; the reason why memory cannot be shareable as requested;
    /// [`Error::OutOfAddresses`]; the driver's errors.
    pub(crate) fn new(driver: &Driver, plan: &Plan) -> Result<Self> {
        let mut settled = plan.settle(driver)?;
        let reservation = loop {
            let options = Reservation::options().alignment(settled.alignment);
            match options.reserve(driver, settled.limit) {
                Ok(reservation) => break reservation,
                Err(error) if plan.limit.is_none() && error.code() == Some(Code::OUT_OF_MEMORY) => {
                    let half = settled.limit / 2 / settled.unit * settled.unit;
                    if half < settled.chunk {
                        return Err(error);
                    }
                    settled.limit = half;
                }
                Err(error) => return Err(error),
            }
        };
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
            step: settled.chunk,
            orders: 0,
            claims: Vec::new(),
            counts: Counts::default(),
            settled,
        })
    }

    /// Returns the address of offset 0: a multiple of the plan's alignment.
    pub(crate) fn start(&self) -> DevicePtr {
        self.reservation.start()
    }

    /// Returns the bytes of addresses, which is also the most memory: a multiple of 2 MiB.
    pub(crate) const fn limit(&self) -> u64 {
        self.settled.limit
    }

    /// Returns the bytes that have memory.
    pub(crate) const fn backed(&self) -> u64 {
        self.backed
    }

    /// Returns the size of a chunk when nothing limits it.
    pub(crate) const fn chunk(&self) -> u64 {
        self.settled.chunk
    }

    /// Returns whether blocks may lie in several chunks.
    pub(crate) const fn joins(&self) -> bool {
        self.settled.joins
    }

    /// Returns whether any chunk can be exported.
    pub(crate) fn is_exportable(&self) -> bool {
        let mut sites = self.settled.sites.iter();
        sites.any(|site| site.handle_types != HandleTypes::NONE)
    }

    /// Returns what the CPU may do, in every chunk.
    pub(crate) fn host_access(&self) -> Access {
        self.settled.host_access()
    }

    /// Iterates over the chunks, by ascending offsets.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.chunks.values().filter(|chunk| !chunk.dead)
    }

    /// Iterates over the chunks that end at `end` or before, by descending offsets.
    pub(crate) fn chunks_before(&self, end: u64) -> impl Iterator<Item = &Chunk> {
        let chunks = self.chunks.range(..end).rev().map(|(_, chunk)| chunk);
        chunks.filter(move |chunk| !chunk.dead && chunk.end() <= end)
    }

    /// Returns the chunk at `offset`.
    pub(crate) fn chunk_at(&self, offset: u64) -> Option<&Chunk> {
        let (_, chunk) = self.chunks.range(..=offset).next_back()?;
        (offset < chunk.end() && !chunk.dead).then_some(chunk)
    }

    /// Returns the counts of driver calls so far.
    pub(crate) const fn counts(&self) -> Counts {
        self.counts
    }

    /// Gives back the chunks that lie wholly in `range`.
    ///
    /// The caller has taken the range out of use before, no view of it exists, and GPU work on it has
    /// finished. The caller may use what is kept again.
    pub(crate) fn give_back(&mut self, range: Range<u64>) -> GivenBack {
        self.sweep();
        let mut result = GivenBack::default();
        let first = self
            .chunk_at(range.start)
            .map_or(range.start, |chunk| chunk.start);
        let found: Vec<u64> = match first < range.end {
            true => self
                .chunks
                .range(first..range.end)
                .map(|(&at, _)| at)
                .collect(),
            false => Vec::new(),
        };
        for at in found {
            let Some(chunk) = self.chunks.remove(&at) else {
                continue;
            };
            let (all, turn) = (chunk.range(), chunk.turn);
            if chunk.dead || all.start < range.start || all.end > range.end || chunk.is_held() {
                if !chunk.dead {
                    let part = all.start.max(range.start)..all.end.min(range.end);
                    result.kept.push(part);
                }
                self.chunks.insert(at, chunk);
                continue;
            }
            match chunk.retire(&mut self.counts) {
                Retired::Held(chunk) => {
                    self.chunks.insert(at, *chunk);
                    result.kept.push(all);
                    continue;
                }
                Retired::Refused(chunk, error) => {
                    self.chunks.insert(at, *chunk);
                    result.kept.push(all);
                    result.error.get_or_insert(error);
                    continue;
                }
                Retired::Unmapped(memory, error) => {
                    self.strays.extend(memory);
                    result.error.get_or_insert(error);
                }
                Retired::Gone => {}
            }
            self.counts.chunks_given_back += 1;
            self.backed -= all.end - all.start;
            self.taken[turn] -= all.end - all.start;
            result.gone.push(all);
        }
        result
    }

    fn shape(&self) -> Shape {
        Shape {
            base: self.start().0,
            unit: self.settled.unit,
            chunk: self.settled.chunk,
            limit: self.settled.limit,
            joins: self.settled.joins,
            max_range: MAX_RANGE,
        }
    }

    /// Gives back a chunk that did not become part of the heap. If the driver refuses, the chunk is kept for
    /// a retry.
    fn undo(&mut self, mut chunk: Chunk) {
        if !chunk.dead {
            chunk.dead = true;
            self.taken[chunk.turn] -= chunk.bytes();
        }
        match chunk.retire(&mut self.counts) {
            Retired::Gone => {}
            Retired::Held(chunk) => {
                self.chunks.insert(chunk.start, *chunk);
            }
            Retired::Refused(chunk, error) => {
                tracing::warn!(%error, "a chunk cannot be unmapped yet");
                self.chunks.insert(chunk.start, *chunk);
            }
            Retired::Unmapped(memory, error) => {
                tracing::warn!(%error, "a chunk's memory stays for now");
                self.strays.extend(memory);
            }
        }
    }

    fn release(&mut self, memory: PhysicalMemory) {
        self.counts.release += 1;
        if let Err(refused) = memory.try_release() {
            let (memory, error) = *refused;
            tracing::warn!(%error, "a chunk's memory stays for now");
            self.strays.extend(memory);
        }
    }

    /// Retries to give back what the driver refused to take.
    fn sweep(&mut self) {
        for memory in std::mem::take(&mut self.strays) {
            self.release(memory);
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
