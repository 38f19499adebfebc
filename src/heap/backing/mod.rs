//! The memory of a heap: one range of addresses, backed by chunks as it grows.
//!
//! ```text
//! offset 0                                                                       limit
//! ├── chunk ──┼── chunk ──┤   hole   ├── chunk ──┤              no memory yet        │
//!   node 0      node 1    (trimmed)    node 0
//! ```
//!
//! The addresses are reserved once, so blocks never move. Memory comes in chunks, from the nodes of
//! the plan in turn, all granted to the same locations; what is trimmed leaves a hole that is filled
//! again later. Nothing here knows of blocks: callers hold one lock around all calls, and none that the
//! fast path needs, for the driver takes its time.

mod chunk;
mod fit;
mod grow;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

pub(in crate::heap) use chunk::{Chunk, Counts};
pub(in crate::heap) use fit::{Beside, Want};
#[cfg(test)]
use plan::DEFAULT_CHUNK;
pub(in crate::heap) use plan::Plan;

use super::core::MAX_RANGE;
use crate::driver::{Access, Code, DevicePtr, Driver, HandleTypes};
use crate::guard::WORTH_ASKING;
use crate::vmm::{PhysicalMemory, Reservation};
use crate::{Error, Result};
use chunk::Retired;
use fit::Shape;
use plan::Settled;

/// The memory of a heap; gives all of it back when dropped.
///
/// Before that, and before memory is given back in between, GPU work that uses it must have finished: a
/// GPU that touches unmapped addresses loses its context.
#[derive(Debug)]
pub(in crate::heap) struct Backing {
    /// By where they start. Those that are dead only keep their addresses from use.
    chunks: BTreeMap<u64, Chunk>,
    /// Memory that the driver would not release, to be tried again.
    strays: Vec<PhysicalMemory>,
    reservation: Arc<Reservation>,
    driver: Driver,
    settled: Settled,
    overcommit: bool,
    backed: u64,
    /// The site whose turn it is.
    turn: usize,
    /// Bytes that may be asked of each site before its free memory is looked at again.
    trust: Vec<u64>,
    /// Bytes that were made at each site and are, or become, memory of the heap.
    taken: Vec<u64>,
    /// The size that chunks are tried in first: less than the plan's where memory was short.
    step: u64,
    /// How many chunks were begun.
    orders: u64,
    /// Whether this driver does not grant neighbours in one call.
    one_by_one: bool,
    counts: Counts,
}

/// A stretch that has memory now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::heap) struct Grown {
    /// Bytes from the heap's start.
    pub range: Range<u64>,
    /// Whether a block may reach over its ends into memory beside it.
    pub joins: bool,
}

/// What became of a stretch that was to be given back.
#[derive(Debug, Default)]
#[must_use = "what was not given back is still memory of the heap"]
pub(in crate::heap) struct GivenBack {
    /// Without memory now, chunk by chunk.
    pub gone: Vec<Range<u64>>,
    /// Still memory of the heap: parts of chunks that reach out of the stretch, chunks whose memory
    /// somebody else holds, and those that the driver would not unmap. Nothing joins over chunks.
    pub kept: Vec<Range<u64>>,
    /// The first refusal of the driver.
    pub error: Option<Error>,
}

impl GivenBack {
    /// The bytes given back.
    pub(in crate::heap) fn bytes(&self) -> u64 {
        self.gone.iter().map(|range| range.end - range.start).sum()
    }
}

impl Backing {
    /// Checks the plan and reserves the addresses. Takes no memory.
    ///
    /// A limit by default is halved until the address space has room for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no nodes, a limit or shares below the granularity, chunks of 0 bytes,
    /// an alignment that is no power of two from 2 MiB on; [`Error::NoSuchNode`], [`Error::NoSuchGpu`]; why
    /// memory that is to be shareable cannot be; [`Error::OutOfAddresses`]; the driver's.
    pub(in crate::heap) fn new(driver: &Driver, plan: &Plan) -> Result<Self> {
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
            one_by_one: false,
            counts: Counts::default(),
            settled,
        })
    }

    /// The address of offset 0: a multiple of the plan's alignment.
    pub(in crate::heap) fn start(&self) -> DevicePtr {
        self.reservation.start()
    }

    /// Bytes of addresses, and of memory at most: a multiple of 2 MiB.
    pub(in crate::heap) const fn limit(&self) -> u64 {
        self.settled.limit
    }

    /// Bytes that have memory.
    pub(in crate::heap) const fn backed(&self) -> u64 {
        self.backed
    }

    /// The size of chunks where nothing stands against it.
    pub(in crate::heap) const fn chunk(&self) -> u64 {
        self.settled.chunk
    }

    /// Whether blocks may lie in several chunks.
    pub(in crate::heap) const fn joins(&self) -> bool {
        self.settled.joins
    }

    /// Whether any chunk can be exported.
    pub(in crate::heap) fn is_exportable(&self) -> bool {
        let mut sites = self.settled.sites.iter();
        sites.any(|site| site.handle_types != HandleTypes::NONE)
    }

    /// What the CPU may do, in every chunk.
    pub(in crate::heap) fn host_access(&self) -> Access {
        self.settled.host_access()
    }

    /// The chunks, by rising offsets.
    pub(in crate::heap) fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.chunks.values().filter(|chunk| !chunk.dead)
    }

    /// The chunk that `offset` lies in.
    pub(in crate::heap) fn chunk_at(&self, offset: u64) -> Option<&Chunk> {
        let (_, chunk) = self.chunks.range(..=offset).next_back()?;
        (offset < chunk.end() && !chunk.dead).then_some(chunk)
    }

    /// What was asked of the driver so far.
    pub(in crate::heap) const fn counts(&self) -> Counts {
        self.counts
    }

    /// Gives back the chunks that lie in `range` as a whole.
    ///
    /// The caller has taken the range out of use before, nobody views it, and GPU work on it has
    /// finished; what is kept it may use again.
    pub(in crate::heap) fn give_back(&mut self, range: Range<u64>) -> GivenBack {
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
            border: MAX_RANGE,
        }
    }

    /// Gives back a chunk that did not become part of the heap. Where the driver refuses, it is kept
    /// to be tried again.
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
                tracing::warn!(%error, "a chunk stays mapped for now");
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

    /// Tries once more to give back what the driver would not take.
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
