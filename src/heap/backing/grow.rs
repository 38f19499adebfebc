//! Growth: creates, maps and grants chunks; all of them or none.

use std::ops::Range;
use std::sync::Arc;

use super::chunk::Chunk;
use super::fit::{Fill, Places, Want};
use super::plan::Site;
use super::{Backing, Grown};
use crate::driver::{Code, Location, NodeId};
use crate::error::NoRoom;
use crate::guard::{WORTH_ASKING, check_free_now};
use crate::ledger::AllocPath;
use crate::topology::{Overcommit, free_now};
use crate::vmm::{Mapping, PhysicalMemory};
use crate::{Error, Result};

impl Backing {
    /// Backs more of the heap, so that `want` fits. Returns the new ranges, which are free, zero and granted,
    /// by ascending offsets. Returns none if it fits already, by the caller's account of free bytes.
    ///
    /// A block goes to the lowest place where it fits, together with the free bytes beside it; if memory is
    /// too short for that, to the place that needs the least. Chunks are whole while memory is plentiful and
    /// no node's share is used up. If memory is short, the heap tries the next node, then half the size, down
    /// to what is needed.
    ///
    /// # Errors
    /// All or nothing: after a failure, everything created is given back. Memory on a full node is needed
    /// elsewhere, and a caller that frees some and retries creates it again.
    ///
    /// [`Error::HeapFull`], without the caller's numbers, if the remaining addresses have no such range, or
    /// no node's share is large enough for what must be one chunk; [`Error::NodeTooFull`],
    /// [`Error::NodesTooFull`], [`Error::OutOfMemory`]; [`Error::InvalidArgument`] for 0 bytes or an
    /// alignment that is no power of two; the driver's errors.
    pub(crate) fn grow(&mut self, want: Want<'_>) -> Result<Vec<Grown>> {
        self.sweep();
        let places = self.shape().places(&self.gaps(), want)?;
        self.make_places(&places, want)
    }

    /// Checks that the limit and the nodes have `bytes` more, in as many pieces as necessary. Creates
    /// nothing.
    ///
    /// # Errors
    /// As [`grow`](Self::grow).
    pub(crate) fn check_more(&self, bytes: u64) -> Result<()> {
        let places = self.shape().places(&self.gaps(), Want::More { bytes })?;
        self.check_nodes(places.first.iter().map(Fill::needed).sum())
    }

    /// As [`grow`](Self::grow), but backs at most `most` bytes in all; the last chunk is smaller if it would
    /// exceed that. Returns `None` if `want` would exceed it, whatever else prevents growth.
    ///
    /// # Errors
    /// As [`grow`](Self::grow).
    pub(crate) fn grow_within(&mut self, want: Want<'_>, most: u64) -> Result<Option<Vec<Grown>>> {
        self.sweep();
        let room = self.room_below(most);
        let places = match self.shape().places(&self.gaps(), want) {
            Err(Error::HeapFull { .. }) if want.bytes() > room => return Ok(None),
            places => places?,
        };
        let places = places.within(room);
        places
            .map(|places| self.make_places(&places, want))
            .transpose()
    }

    /// Returns how many bytes may be backed before more than `most` are.
    pub(crate) const fn room_below(&self, most: u64) -> u64 {
        most.saturating_sub(self.backed) / self.settled.unit * self.settled.unit
    }

    fn make_places(&mut self, places: &Places, want: Want<'_>) -> Result<Vec<Grown>> {
        let made = match (self.attempt(&places.first), places.leanest) {
            (Err(error), Some(leanest)) if is_shortage(&error) => self.attempt(&[leanest]),
            (result, _) => result,
        };
        made.map_err(|error| match error {
            Error::HeapFull { why, .. } => want.refused(why, self.limit()),
            other => other,
        })
    }

    /// Returns the ranges without memory, by ascending offsets.
    fn gaps(&self) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = 0;
        for chunk in self.chunks.values() {
            if at < chunk.start {
                gaps.push(at..chunk.start);
            }
            at = chunk.end();
        }
        if at < self.limit() {
            gaps.push(at..self.limit());
        }
        gaps
    }

    fn attempt(&mut self, fills: &[Fill]) -> Result<Vec<Grown>> {
        let mut made = Vec::new();
        let needed = fills.iter().map(Fill::needed).sum();
        let result = self.check_room(needed).and_then(|()| {
            for fill in fills {
                self.fill(fill, &mut made)?;
            }
            self.grant(&mut made)
        });
        match result {
            Ok(()) => Ok(self.keep(made)),
            Err(error) => {
                for chunk in made.into_iter().rev() {
                    self.undo(chunk);
                }
                Err(self.explain(error, needed))
            }
        }
    }

    /// Refuses a request that the nodes have no memory for before any is created: creating gigabytes takes
    /// seconds.
    fn check_room(&self, needed: u64) -> Result<()> {
        match needed < WORTH_ASKING {
            true => Ok(()),
            false => self.check_nodes(needed),
        }
    }

    fn check_nodes(&self, needed: u64) -> Result<()> {
        if self.overcommit {
            return Ok(());
        }
        if let [place] = self.settled.places()[..] {
            return check_free_now(&self.driver, place, needed, || 0).map(drop);
        }
        match self.room() {
            Some((nodes, free))
                if free < needed && Overcommit::from_env() == Overcommit::Refuse =>
            {
                Err(Error::NodesTooFull {
                    nodes,
                    requested: needed,
                    free,
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns the nodes, and the sum of what they have free of their shares; `None` if that is not known for
    /// all.
    fn room(&self) -> Option<(Vec<NodeId>, u64)> {
        let mut nodes = Vec::new();
        let mut free = 0_u64;
        for place in self.settled.places() {
            let Location::HostNuma(id) = place else {
                return None;
            };
            let sites = self.settled.sites.iter().enumerate();
            let share = sites
                .filter(|(_, site)| site.location == place)
                .fold(0_u64, |sum, (turn, _)| sum.saturating_add(self.left(turn)));
            free = free.saturating_add(free_now(&self.driver, NodeId(id))?.min(share));
            nodes.push(NodeId(id));
        }
        Some((nodes, free))
    }

    /// Rewrites a shortage error to contain what was needed, not the last size tried, and what is free now
    /// that this call has given everything back.
    fn explain(&self, error: Error, needed: u64) -> Error {
        match error {
            Error::OutOfMemory {
                location, source, ..
            } => Error::OutOfMemory {
                location,
                requested: needed,
                source,
            },
            Error::NodeTooFull { node, free, .. } => match self.room() {
                // Blocks over several chunks lie on several nodes.
                Some((nodes, free)) if nodes.len() > 1 && self.settled.joins => {
                    Error::NodesTooFull {
                        nodes,
                        requested: needed,
                        free,
                    }
                }
                _ => Error::NodeTooFull {
                    node,
                    requested: needed,
                    free: free_now(&self.driver, node).unwrap_or(free),
                },
            },
            other => other,
        }
    }

    /// Creates the chunks of a range, without access for any location yet.
    fn fill(&mut self, fill: &Fill, made: &mut Vec<Chunk>) -> Result<()> {
        let (unit, shape) = (self.settled.unit, self.shape());
        let least = if fill.single { fill.needed() } else { unit };
        // As large as the last success: if memory is short, each refusal costs time.
        let mut size = if fill.single {
            fill.end - fill.start
        } else {
            self.step
        };
        let mut halved = false;
        let mut at = fill.start;
        while at < fill.end {
            let bytes = shape.before_range_limit(at, size.min(fill.end - at));
            match self.make(at, bytes, least.min(bytes)) {
                Ok(chunk) => {
                    at = chunk.end();
                    made.push(chunk);
                }
                // Beyond the bytes needed, a shortage ends the growth without an error.
                Err(error) if is_shortage(&error) && at >= fill.need => break,
                Err(error) if is_shortage(&error) && bytes > least => {
                    size = (bytes / 2).next_multiple_of(unit).max(least);
                    self.counts.halvings += 1;
                    halved = true;
                }
                Err(error) => return Err(error),
            }
            let short = size < self.settled.chunk;
            if at >= fill.need && (fill.single || short) {
                break;
            }
        }
        if !fill.single {
            let next = if halved { size } else { size.saturating_mul(2) };
            self.step = next.min(self.settled.chunk);
        }
        Ok(())
    }

    /// Creates one chunk, on the node whose turn it is, or on the next if that has too little. The chunk is
    /// smaller if less is left of the node's share, but at least `least`.
    fn make(&mut self, start: u64, bytes: u64, least: u64) -> Result<Chunk> {
        let count = self.settled.sites.len();
        let mut refused: Option<Error> = None;
        for turn in (self.turn..self.turn + count).map(|turn| turn % count) {
            let bytes = bytes.min(self.left(turn));
            if bytes < least {
                continue;
            }
            match self.make_at(turn, start, bytes) {
                Ok(chunk) => {
                    self.turn = (turn + 1) % count;
                    return Ok(chunk);
                }
                Err(error) if is_shortage(&error) => {
                    self.trust[turn] = 0;
                    // Of several nodes, the error names the one that has most.
                    if refused
                        .as_ref()
                        .is_none_or(|told| free_in(told) < free_in(&error))
                    {
                        refused = Some(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let shares = self.settled.sites.iter().map(|site| site.share);
        let most = shares.max().unwrap_or(0);
        let used_up = || Want::More { bytes }.refused(NoRoom::Share { most }, self.limit());
        Err(refused.unwrap_or_else(used_up))
    }

    /// Returns the bytes that may still be created at a site.
    fn left(&self, turn: usize) -> u64 {
        self.settled.sites[turn]
            .share
            .saturating_sub(self.taken[turn])
    }

    fn make_at(&mut self, turn: usize, start: u64, bytes: u64) -> Result<Chunk> {
        let site = self.settled.sites[turn];
        let trust = self.trust(turn, &site, bytes)?;
        self.counts.create += 1;
        let memory = PhysicalMemory::options(site.location)
            .handle_types(site.handle_types)
            .overcommit(true) // `trust` checks, for all chunks together
            .recorded_as(
                AllocPath::HeapChunk,
                self.settled.label.clone(),
                self.settled.site,
            )
            .create(&self.driver, bytes)?;
        self.trust[turn] = trust;
        self.counts.map += 1;
        match self.reservation.map(start, &memory) {
            Ok(mapping) => {
                let order = self.orders;
                self.orders += 1;
                self.taken[turn] += bytes;
                Ok(Chunk {
                    mapping,
                    memory: Arc::new(memory),
                    start,
                    order,
                    turn,
                    dead: false,
                })
            }
            Err(error) => {
                self.release(memory);
                Err(error)
            }
        }
    }

    /// Checks a node's free memory: small chunks add up to more than the driver should be asked for
    /// unchecked.
    ///
    /// Returns how many more bytes may be created after these before the next check.
    fn trust(&self, turn: usize, site: &Site, bytes: u64) -> Result<u64> {
        if self.overcommit {
            return Ok(WORTH_ASKING);
        }
        let known = self.trust[turn];
        let trusted = if bytes < known {
            known
        } else {
            let free = check_free_now(&self.driver, site.location, bytes, || 0)?;
            // The less is free, the more often it is checked.
            free.map_or(WORTH_ASKING, |free| WORTH_ASKING.min(free / 2))
        };
        Ok(trusted.saturating_sub(bytes))
    }

    /// Grants all of the chunks, adjacent or not, to all locations of the plan.
    fn grant(&mut self, made: &mut [Chunk]) -> Result<()> {
        let access = &self.settled.access;
        if access.is_empty() {
            return Ok(());
        }
        let neighbours =
            |a: &Chunk, b: &Chunk| a.end() == b.start && a.memory.location() == b.memory.location();
        for run in made.chunk_by_mut(neighbours) {
            let mut run: Vec<&mut Mapping> =
                run.iter_mut().map(|chunk| &mut chunk.mapping).collect();
            if run.len() > 1 && !self.one_by_one {
                self.counts.set_access += 1;
                match Mapping::set_access_together(&mut run, access) {
                    Ok(()) => continue,
                    Err(error) => {
                        tracing::debug!(%error, "neighbouring chunks are granted one by one")
                    }
                }
            }
            let together = run.len() > 1;
            for mapping in run {
                self.counts.set_access += 1;
                mapping.set_access(access)?;
            }
            // Chunk by chunk works, together does not: remember that of this driver.
            self.one_by_one |= together;
        }
        Ok(())
    }

    /// Makes the chunks part of the heap.
    fn keep(&mut self, made: Vec<Chunk>) -> Vec<Grown> {
        let joins = self.settled.joins;
        let mut grown: Vec<Grown> = Vec::new();
        for chunk in made {
            match grown.last_mut() {
                Some(last) if joins && last.range.end == chunk.start => {
                    last.range.end = chunk.end()
                }
                _ => grown.push(Grown {
                    range: chunk.range(),
                    joins,
                }),
            }
            self.counts.chunks_made += 1;
            self.backed += chunk.bytes();
            self.chunks.insert(chunk.start, chunk);
        }
        grown
    }
}

/// Returns the free bytes that a refusal states.
const fn free_in(error: &Error) -> u64 {
    match error {
        Error::NodeTooFull { free, .. } => *free,
        _ => 0,
    }
}

/// Returns whether a smaller request, or one on another node, might succeed.
pub(super) fn is_shortage(error: &Error) -> bool {
    matches!(
        error,
        Error::NodeTooFull { .. } | Error::NodesTooFull { .. }
    ) || error.code() == Some(Code::OUT_OF_MEMORY)
}
