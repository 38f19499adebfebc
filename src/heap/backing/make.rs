//! The chunks of growth, on the nodes that have memory for them.

use std::ops::Range;
use std::sync::Arc;

use super::shape::Want;
use super::{Backing, Chunk};
use crate::driver::{Location, NodeId};
use crate::error::NoRoom;
use crate::guard::{self, check_free_now};
use crate::ledger::AllocPath;
use crate::topology::{Overcommit, cgroup_room, free_now};
use crate::vmm::{MappedPart, PhysicalMemory};
use crate::{Error, Result};

impl Backing {
    /// Refuses bytes that the nodes have no memory for, unless the heap may overcommit.
    pub(super) fn check_nodes(&self, needed: u64) -> Result<()> {
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

    /// Returns the nodes, and the sum of their free bytes within their shares and the control groups' limit; `None`
    /// if that is not known for all.
    fn room(&self) -> Option<(Vec<NodeId>, u64)> {
        let mut nodes = Vec::new();
        let mut free = 0_u64;
        for place in self.settled.places() {
            let Location::HostNuma(id) = place else {
                return None;
            };
            let sites = self.settled.sites.iter();
            let there = sites.filter(|site| site.location == place);
            let left = there.fold(0_u64, |sum, site| sum.saturating_add(site.left()));
            free = free.saturating_add(free_now(&self.driver, NodeId(id))?.min(left));
            nodes.push(NodeId(id));
        }
        let room = cgroup_room(&self.driver).unwrap_or(u64::MAX);
        Some((nodes, free.min(room)))
    }

    /// Rewrites a shortage error to contain the bytes needed, not the last size tried, and the bytes free now
    /// that this call has given everything back.
    pub(super) fn explain(&self, mut error: Error, needed: u64) -> Error {
        match &mut error {
            Error::OutOfMemory { requested, .. } => *requested = needed,
            Error::NodeTooFull {
                node,
                requested,
                free,
            } => {
                // Blocks over several chunks lie on several nodes.
                let several =
                    |(nodes, _): &(Vec<NodeId>, u64)| nodes.len() > 1 && self.settled.shape.joins;
                if let Some((nodes, free)) = self.room().filter(several) {
                    let requested = needed;
                    return Error::NodesTooFull {
                        nodes,
                        requested,
                        free,
                    };
                }
                *requested = needed;
                *free = free_now(&self.driver, *node).unwrap_or(*free);
            }
            _ => {}
        }
        error
    }

    /// Creates, maps and grants one chunk, on the node whose turn it is, or on the next if that has too little. The chunk is
    /// smaller if less is left of the node's share, but at least `least`.
    pub(super) fn make(&mut self, start: u64, bytes: u64, least: u64) -> Result<Chunk> {
        let count = self.settled.sites.len();
        let mut refused: Option<Error> = None;
        for turn in (self.turn..self.turn + count).map(|turn| turn % count) {
            let bytes = bytes.min(self.settled.sites[turn].left());
            if bytes < least {
                continue;
            }
            match self.make_at(turn, start, bytes) {
                Ok(chunk) => {
                    self.turn = (turn + 1) % count;
                    return Ok(chunk);
                }
                // Of several nodes, the error names the one that has most.
                Err(error) if is_shortage(&error) => {
                    let most = refused.as_ref().map_or(0, free_in);
                    if refused.is_none() || free_in(&error) > most {
                        refused = Some(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Err(refused.unwrap_or_else(|| {
            let shares = self.settled.sites.iter().map(|site| site.share);
            let most = shares.max().unwrap_or(0);
            Want::More { bytes }.refused(NoRoom::Share { most }, self.limit())
        }))
    }

    fn make_at(&mut self, turn: usize, start: u64, bytes: u64) -> Result<Chunk> {
        let site = self.settled.sites[turn];
        if !self.overcommit {
            // Small chunks add up to more than the driver should be asked for unchecked.
            check_free_now(&self.driver, site.location, bytes, || 0)?;
        }
        self.counts.create += 1;
        let memory = PhysicalMemory::options(site.location)
            .handle_types(site.handle_types)
            .chosen(self.settled.chosen.clone())
            .overcommit(true) // checked above
            .recorded_as(
                AllocPath::HeapChunk,
                self.settled.label.clone(),
                self.settled.site.clone(),
            )
            .create(&self.driver, bytes)?;
        self.counts.map += 1;
        let mapping = match self.reservation.map(start, &memory) {
            Ok(mapping) => mapping,
            Err(error) => {
                self.release_or_report(memory);
                return Err(error);
            }
        };
        self.settled.sites[turn].taken += bytes;
        let mut chunk = Chunk {
            part: MappedPart::new(mapping, Arc::new(memory)),
            turn,
        };
        let access = &self.settled.access;
        if access.is_empty() {
            return Ok(chunk);
        }
        // To all locations, and before the next chunk is created: the driver holds other processes up for as long as a call
        // lasts.
        self.counts.set_access += 1;
        match chunk.part.mapping_mut().set_access(access) {
            Ok(()) => Ok(chunk),
            Err(error) => {
                self.undo(chunk);
                Err(error)
            }
        }
    }

    /// Returns whether growth was refused for lack of addresses or memory, so that it may succeed after chunks went back.
    pub(crate) fn lacks_room(error: &Error) -> bool {
        matches!(error, Error::HeapFull { .. }) || is_shortage(error)
    }

    /// Iterates over the ranges of the chunks that no other code holds.
    pub(crate) fn own_chunks(&self) -> impl Iterator<Item = Range<u64>> {
        let own = self
            .chunks()
            .filter(|chunk| Arc::strong_count(chunk.memory()) == 1);
        own.map(Chunk::range)
    }

    /// In a heap whose chunks do not join, returns those of the `idle` chunks, by ascending offsets, that have to go back so
    /// that one chunk for `bytes` fits: those in the lowest place for it, or all if that is not enough memory. `None` if all would
    /// not do. Asks the nodes for their free memory, which takes some 10 µs.
    pub(crate) fn to_give_back(
        &self,
        (bytes, alignment, most): (u64, u64, u64),
        idle: &[Range<u64>],
    ) -> Option<Vec<Range<u64>>> {
        let shape = self.settled.shape;
        let bytes = bytes.checked_next_multiple_of(shape.unit)?;
        let place = shape.single(&self.gaps_without(idle), bytes, alignment)?;
        let in_place = |chunk: &&Range<u64>| chunk.start < place.need && chunk.end > place.start;
        let rooms = self.settled.sites.iter().map(|site| match site.location {
            Location::HostNuma(id) => Some(free_now(&self.driver, NodeId(id))?.min(site.left())),
            _ => None,
        });
        let rooms: Vec<Option<u64>> = rooms.collect();
        let is_enough = |back: &Vec<Range<u64>>| {
            let sum_at = |turn: Option<usize>| {
                let at = |chunk: &&Range<u64>| {
                    let chunk = self.chunk_at(chunk.start);
                    turn.is_none() || chunk.map(|chunk| chunk.turn) == turn
                };
                let chunks = back.iter().filter(at);
                chunks.map(|chunk| chunk.end - chunk.start).sum::<u64>()
            };
            let mut sites = rooms.iter().enumerate();
            let fits = sites.any(|(turn, room)| match room {
                Some(room) => bytes <= room.saturating_add(sum_at(Some(turn))),
                // Not known: some have to go back, because the driver may have refused it for lack of memory.
                None => true,
            });
            !back.is_empty() && fits && bytes <= self.room_below(most).saturating_add(sum_at(None))
        };
        let in_place = idle.iter().filter(in_place).cloned().collect();
        [in_place, idle.to_vec()].into_iter().find(is_enough)
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
    // Smaller chunks need more mappings.
    !matches!(error, Error::TooManyMappings { .. }) && guard::is_shortage(error)
}
