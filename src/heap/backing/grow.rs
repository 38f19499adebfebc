//! Growth: where there is room, and the chunks of one request.

use std::ops::Range;
use std::sync::Arc;

use super::Backing;
use super::chunk::Chunk;
use super::fit::{Fill, Want};
use super::plan::Site;
use crate::driver::{Location, NodeId};
use crate::error::NoRoom;
use crate::guard::{self, WORTH_ASKING, check_free_now};
use crate::ledger::AllocPath;
use crate::topology::{Overcommit, cgroup_room, free_now};
use crate::vmm::{MappedPart, PhysicalMemory};
use crate::{Error, Result};

impl Backing {
    /// Grows at once, without a limit: [`order`](Self::order), all steps, and [`deliver`](Self::deliver).
    #[cfg(test)]
    pub(crate) fn grow(&mut self, want: Want<'_>) -> Result<Vec<Range<u64>>> {
        let grown = self.grow_within(want, u64::MAX)?;
        Ok(grown.unwrap_or_default())
    }

    #[cfg(test)]
    pub(crate) fn grow_within(
        &mut self,
        want: Want<'_>,
        most: u64,
    ) -> Result<Option<Vec<Range<u64>>>> {
        let Some(mut order) = self.order(want, most)? else {
            return Ok(None);
        };
        while self.step(&mut order)? {}
        Ok(Some(self.deliver(order)))
    }

    /// Checks that the limit and the nodes have `bytes` more, in as many pieces as necessary. Creates
    /// nothing.
    ///
    /// # Errors
    /// As [`order`](Self::order).
    pub(crate) fn check_more(&self, bytes: u64) -> Result<()> {
        let places = self
            .settled
            .shape
            .places(&self.gaps(), Want::More { bytes })?;
        self.check_nodes(places.first.iter().map(Fill::needed).sum())
    }

    /// Returns how many bytes may be backed before more than `most` are, with those of growth that was begun.
    pub(crate) fn room_below(&self, most: u64) -> u64 {
        let claimed: u64 = self
            .claims
            .iter()
            .map(|claim| claim.end - claim.start)
            .sum();
        most.saturating_sub(self.backed + claimed) / self.settled.shape.unit
            * self.settled.shape.unit
    }

    /// Returns the ranges without memory that no growth has begun to fill, by ascending offsets.
    pub(super) fn gaps(&self) -> Vec<Range<u64>> {
        let chunks = self.chunks.values().map(Chunk::range);
        let mut taken: Vec<Range<u64>> = chunks.chain(self.claims.iter().cloned()).collect();
        if !self.claims.is_empty() {
            taken.sort_unstable_by_key(|range| range.start);
        }
        let mut gaps = Vec::new();
        let mut at = 0;
        for range in taken {
            if at < range.start {
                gaps.push(at..range.start);
            }
            at = at.max(range.end);
        }
        if at < self.limit() {
            gaps.push(at..self.limit());
        }
        gaps
    }

    /// Refuses a request that the nodes have no memory for before any is created: creating gigabytes takes
    /// seconds.
    pub(super) fn check_room(&self, needed: u64) -> Result<()> {
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

    /// Returns the nodes, and the sum of their free bytes within their shares and the control groups' limit; `None`
    /// if that is not known for all.
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
            } => match self.room() {
                // Blocks over several chunks lie on several nodes.
                Some((nodes, free)) if nodes.len() > 1 && self.settled.shape.joins => {
                    let requested = needed;
                    return Error::NodesTooFull {
                        nodes,
                        requested,
                        free,
                    };
                }
                _ => {
                    *requested = needed;
                    *free = free_now(&self.driver, *node).unwrap_or(*free);
                }
            },
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

    /// Returns whether growth was refused for lack of addresses or memory, so that it may succeed after chunks went back.
    pub(crate) fn lacks_room(error: &Error) -> bool {
        matches!(error, Error::HeapFull { .. }) || is_shortage(error)
    }

    /// Returns the bytes that may still be created at a site.
    pub(super) fn left(&self, turn: usize) -> u64 {
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
            .chosen(self.settled.chosen.clone())
            .overcommit(true) // `trust` checks, for all chunks together
            .recorded_as(
                AllocPath::HeapChunk,
                self.settled.label.clone(),
                self.settled.site.clone(),
            )
            .create(&self.driver, bytes)?;
        self.trust[turn] = trust;
        self.counts.map += 1;
        match self.reservation.map(start, &memory) {
            Ok(mapping) => {
                let order = self.orders;
                self.orders += 1;
                self.taken[turn] += bytes;
                self.grant(Chunk {
                    part: MappedPart::new(mapping, Arc::new(memory)),
                    order,
                    turn,
                    dead: false,
                })
            }
            Err(error) => {
                self.release_or_log(memory);
                Err(error)
            }
        }
    }

    /// Grants a chunk to all locations of the plan: at once, because the driver holds other processes up for as long
    /// as a call lasts.
    fn grant(&mut self, mut chunk: Chunk) -> Result<Chunk> {
        if self.settled.access.is_empty() {
            return Ok(chunk);
        }
        self.counts.set_access += 1;
        match chunk.part.mapping_mut().set_access(&self.settled.access) {
            Ok(()) => Ok(chunk),
            Err(error) => {
                self.undo(chunk);
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

    /// Makes the chunks part of the heap.
    pub(super) fn keep(&mut self, made: Vec<Chunk>) -> Vec<Range<u64>> {
        let mut grown: Vec<Range<u64>> = Vec::new();
        for chunk in made {
            let range = chunk.range();
            match grown.last_mut() {
                Some(last) if self.settled.shape.joins && last.end == range.start => {
                    last.end = range.end
                }
                _ => grown.push(range.clone()),
            }
            self.backed += chunk.bytes();
            self.chunks.insert(range.start, chunk);
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
    // Smaller chunks need more mappings.
    !matches!(error, Error::TooManyMappings { .. }) && guard::is_shortage(error)
}
