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

mod make;
mod order;
mod plan;
mod shape;
mod supply;
#[cfg(test)]
mod tests;

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{Ordering::Acquire, fence};

use egmem_core::backing::Chosen;
use serde::{Deserialize, Serialize};

pub(crate) use order::Order;
pub(crate) use plan::Plan;
pub(crate) use shape::Want;
pub(crate) use supply::{Locked, Supply};

use crate::driver::{Access, DevicePtr, Driver, Location};
use crate::reports::Reports;
use crate::vmm::{Mapped, MappedPart, PhysicalMemory, Reservation};
use crate::{Error, Result};
use plan::{Settled, Site};

/// Physical memory at its place in the heap.
#[derive(Debug)]
pub(crate) struct Chunk {
    part: MappedPart<Arc<PhysicalMemory>>,
    /// The index of the site it was created at.
    turn: usize,
}

impl Chunk {
    /// Returns the chunk's range, in bytes from the heap's start.
    pub(crate) fn range(&self) -> Range<u64> {
        self.part.mapping().range()
    }

    /// Returns the chunk's size in bytes: at least 2 MiB.
    pub(crate) fn bytes(&self) -> u64 {
        self.part.mapping().size().padded()
    }

    /// Returns the memory. While a clone of it is held elsewhere, the chunk is not given back.
    #[cfg_attr(not(feature = "share"), allow(dead_code, reason = "for sharing"))]
    pub(crate) const fn memory(&self) -> &Arc<PhysicalMemory> {
        self.part.memory()
    }

    /// Returns the mapping.
    #[cfg(test)]
    pub(crate) fn mapping(&self) -> &crate::vmm::Mapping {
        self.part.mapping()
    }

    /// Returns the memory's location.
    pub(crate) fn location(&self) -> Location {
        self.part.memory().location()
    }
}

/// Counts of a heap's driver calls. Refused calls count too. The calls for a registered chunk are named after the driver's
/// that they stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DriverCounts {
    /// `cuMemCreate`; for a registered chunk that can be shared `memfd_create`, else nothing is called.
    pub create: u64,
    /// `cuMemMap`; for a registered chunk `mmap`, and its pages are created.
    pub map: u64,
    /// `cuMemSetAccess`; for a registered chunk `cuMemHostRegister`.
    pub set_access: u64,
    /// `cuMemUnmap`; for a registered chunk `cuMemHostUnregister`, and `mmap` of addresses without pages.
    pub unmap: u64,
    /// `cuMemRelease`; for a registered chunk that can be shared `close`, else nothing is called.
    pub release: u64,
    /// How often the heap asked for less after a shortage.
    pub halvings: u64,
}

/// The memory of a heap; releases all of it when dropped.
///
/// Before the drop, and before memory is given back earlier, GPU work that uses it must have finished: a GPU
/// that accesses unmapped addresses loses its context.
#[derive(Debug)]
pub(crate) struct Backing {
    /// By ascending offsets.
    chunks: Vec<Chunk>,
    /// Chunks that are no memory of the heap and that the driver refused to unmap, to be retried. Their addresses are in use.
    dead: Vec<Chunk>,
    /// Memory that the driver refused to release, to be retried.
    unreleased: Vec<PhysicalMemory>,
    reservation: Arc<Reservation>,
    driver: Driver,
    settled: Settled,
    overcommit: bool,
    backed: u64,
    /// The site whose turn it is.
    turn: usize,
    /// The chunk size to try first: less than the plan's after a shortage.
    step: u64,
    /// Addresses of growth that was begun.
    claims: Vec<Range<u64>>,
    counts: DriverCounts,
    reports: Arc<Reports>,
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
            chunks: Vec::new(),
            dead: Vec::new(),
            unreleased: Vec::new(),
            reservation: Arc::new(reservation),
            driver: driver.clone(),
            overcommit: plan.overcommit,
            backed: 0,
            turn: 0,
            step: settled.shape.chunk,
            claims: Vec::new(),
            counts: DriverCounts::default(),
            reports: Arc::default(),
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
        self.chunks.iter()
    }

    /// Iterates over the chunks that end at `end` or before, by descending offsets.
    pub(crate) fn chunks_before(&self, end: u64) -> impl Iterator<Item = &Chunk> {
        self.chunks[..self.count_before(end)].iter().rev()
    }

    /// Returns the chunk at `offset`.
    pub(crate) fn chunk_at(&self, offset: u64) -> Option<&Chunk> {
        let chunk = self.chunks.get(self.count_before(offset));
        chunk.filter(|chunk| chunk.range().start <= offset)
    }

    /// Returns how many chunks end at `offset` or before.
    fn count_before(&self, offset: u64) -> usize {
        let ends = |chunk: &Chunk| chunk.range().end <= offset;
        self.chunks.partition_point(ends)
    }

    /// Returns what was found under the lock that callers hold.
    pub(crate) const fn reports(&self) -> &Arc<Reports> {
        &self.reports
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
        let at = self.count_before(start);
        let found = self.chunks.get(at).map(|chunk| chunk.range().start);
        if found != Some(start) {
            return (false, None);
        }
        let chunk = self.chunks.remove(at);
        let (bytes, turn) = (chunk.bytes(), chunk.turn);
        match self.retire(chunk) {
            (None, error) => {
                self.backed -= bytes;
                self.settled.sites[turn].taken -= bytes;
                (true, error)
            }
            (Some(chunk), error) => {
                self.chunks.insert(at, chunk);
                (false, error)
            }
        }
    }

    /// Unmaps and releases a chunk. Returns it if other code holds its memory or the driver refuses to unmap it, and the
    /// driver's error.
    fn retire(&mut self, chunk: Chunk) -> (Option<Chunk>, Option<Error>) {
        // A count of 1 stays 1: clones are made of a chunk in the backing, and this one is out of it; no other `Arc`
        // is left to be cloned, and there is no `Weak`.
        if Arc::strong_count(chunk.part.memory()) > 1 {
            return (Some(chunk), None);
        }
        // After all that the last other holder did with the memory before it let go: the count is read relaxed.
        fence(Acquire);
        self.counts.unmap += 1;
        let turn = chunk.turn;
        match chunk.part.unmap() {
            Ok(memory) => {
                let memory = Arc::into_inner(memory);
                (None, memory.and_then(|memory| self.release(memory)))
            }
            Err(refused) => {
                let (part, error) = *refused;
                (Some(Chunk { part, turn }), Some(error))
            }
        }
    }

    /// Releases memory, or keeps it if the driver refuses; returns the driver's error.
    fn release(&mut self, memory: PhysicalMemory) -> Option<Error> {
        self.counts.release += 1;
        let (memory, error) = *memory.try_release().err()?;
        self.unreleased.extend(memory);
        Some(error)
    }

    /// As [`release`](Self::release), but reports the error.
    fn release_or_report(&mut self, memory: PhysicalMemory) {
        let bytes = memory.size().padded();
        if let Some(error) = self.release(memory) {
            self.report_not_released(bytes, error);
        }
    }

    fn report_not_released(&self, bytes: u64, error: Error) {
        self.reports.add(move || {
            tracing::warn!(bytes, %error, "memory that is not mapped cannot be released yet");
        });
    }

    /// Gives back a chunk that did not become part of the heap. If the driver refuses, the chunk is kept for
    /// a retry.
    fn undo(&mut self, chunk: Chunk) {
        self.settled.sites[chunk.turn].taken -= chunk.bytes();
        self.discard(chunk);
    }

    fn discard(&mut self, chunk: Chunk) {
        let bytes = chunk.bytes();
        match self.retire(chunk) {
            (None, None) => {}
            (None, Some(error)) => self.report_not_released(bytes, error),
            (Some(chunk), error) => {
                let range = chunk.range();
                if let Some(error) = error {
                    self.reports.add(move || {
                        tracing::warn!(?range, %error, "a chunk that is no memory of the heap cannot be unmapped yet");
                    });
                }
                self.dead.push(chunk);
            }
        }
    }

    /// Retries to give back memory that the driver refused to take.
    fn sweep(&mut self) {
        for memory in std::mem::take(&mut self.unreleased) {
            self.release_or_report(memory);
        }
        for chunk in std::mem::take(&mut self.dead) {
            self.discard(chunk);
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
