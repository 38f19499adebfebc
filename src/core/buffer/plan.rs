//! Which chunks a buffer is to have: the granularity, the access and the handle types of each location, and the list of chunks.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Buffer, BufferOptions};
use crate::backing::choose::choose_for_all;
use crate::backing::{Backing, Chosen, Why};
use crate::capability::shareable::handle_types_of;
use crate::driver::{AccessDesc, Driver, HandleTypes, Location};
use crate::guard::check_free;
use crate::ledger::{self, Entry};
use crate::size::{Granularity, PaddedSize};
use crate::vmm::{MappedPart, PhysicalMemory, PhysicalOptions, Reservation};
use crate::{Error, Result};

/// The most parts of a buffer.
const MOST: u64 = Buffer::MAX_PARTS as u64;

impl BufferOptions {
    /// Checks the options, and decides which chunks there are to be.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); nothing has been created.
    pub(super) fn plan(mut self, driver: &Driver, caller: ledger::Site) -> Result<Plan> {
        let caller = self.site.take().unwrap_or(caller);
        let mut sites = self.sites();
        // A single chunk is checked when it is created. Of others, small ones are not checked one by one, and of large
        // ones none is to be created in vain.
        if !self.overcommit && !self.is_one_chunk() {
            let last = self.parts.last().map(|&(location, _)| location);
            for site in &sites {
                let is_last = Some(site.location) == last;
                let room = if is_last { self.room } else { 0 };
                check_free(driver, site.location, site.bytes.saturating_add(room), || 0)?;
            }
        }
        // Before the first trial, which takes time and memory.
        let pieces = self.pieces()?;
        if self.shareable {
            for site in &mut sites {
                let all = handle_types_of(driver, site.location, self.backing)?;
                site.handle_types |= all.handle_types;
            }
        }
        let chosen = self.choose(driver, &sites)?;
        let shareable = sites.iter();
        let shareable = shareable.filter(|at| at.is_shareable() && at.location.is_host());
        let shareable = shareable.fold(0, |sum: u64, at| sum.saturating_add(at.bytes));
        for site in &mut sites {
            site.options = PhysicalMemory::options(site.location)
                .handle_types(site.handle_types)
                .recorded_as(self.path, self.label.clone(), caller.clone())
                .chosen(chosen.clone())
                .fork(chosen.fork_of_buffers());
            site.granularity = site.options.granularity_of(driver)?;
            let shareable = site.is_shareable().then_some(shareable);
            let chunk = self.growth.chunk_for(site.granularity, shareable);
            // Memory of GPUs is not divided.
            if site.location.is_host() {
                site.chunk = chunk;
            }
        }
        let chunks = self.chunks(&sites, pieces)?;
        let mut sizes = chunks.iter().map(|chunk| chunk.size.padded());
        let padded = sizes
            .try_fold(0_u64, u64::checked_add)
            .filter(|&sum| sum <= isize::MAX as u64)
            .ok_or_else(|| Error::invalid("parts", "their sum exceeds the address space"))?;
        Ok(Plan {
            options: self,
            padded,
            chosen,
            sites,
            chunks,
            reservation: None,
            next: (0, 0),
            entry: None,
            ahead: VecDeque::new(),
        })
    }

    /// Returns the locations, and what is requested of each.
    fn sites(&self) -> Vec<Site> {
        let mut sites: Vec<Site> = Vec::new();
        for &(location, bytes) in &self.parts {
            match sites.iter_mut().find(|site| site.location == location) {
                Some(site) => site.bytes = site.bytes.saturating_add(bytes),
                None => sites.push(Site {
                    location,
                    bytes,
                    handle_types: self.handle_types,
                    options: PhysicalMemory::options(location),
                    granularity: Granularity::TWO_MIB,
                    chunk: u64::MAX,
                    access: None,
                }),
            }
        }
        sites
    }

    /// Decides what all parts are.
    fn choose(&self, driver: &Driver, sites: &[Site]) -> Result<Chosen> {
        if self.backing == Backing::Driver {
            return Ok(Chosen::DRIVER);
        }
        if self.backing == Backing::Auto && self.one_copy && !self.is_one_chunk() {
            return Ok(Chosen::driver(Why::Chunks));
        }
        let access = sites.iter();
        let access = access.map(|site| self.grants_at(driver, site.location));
        let access = access.collect::<Result<Vec<_>>>()?;
        let sites = sites.iter().zip(&access);
        let sites = sites.map(|(at, access)| ((at.location, at.handle_types), &access[..]));
        choose_for_all(driver, self.backing, sites)
    }

    /// Returns whether the memory is not divided in any granularity.
    fn is_one_chunk(&self) -> bool {
        match self.parts[..] {
            [(_, bytes)] => {
                let all = bytes.saturating_add(self.room);
                self.chunk.is_none() && self.growth.is_one_chunk(all)
            }
            _ => false,
        }
    }

    /// Returns the number of pieces that were asked for, each of which is divided further as it grows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for chunks of a wrong size, and for more pieces than a buffer can have.
    fn pieces(&self) -> Result<u64> {
        self.growth.checked_chunk()?;
        if let Some(cut) = self.chunk
            && (cut == 0 || !Granularity::TWO_MIB.divides(cut))
        {
            let why = format!("{cut} bytes");
            return Err(Error::invalid_of("chunk", why, "a multiple of 2 MiB"));
        }
        let cut = self.chunk.unwrap_or(u64::MAX);
        let pieces = self.parts.iter();
        let pieces = pieces.map(|(_, bytes)| bytes.div_ceil(cut).max(1));
        let pieces = pieces.fold(0, u64::saturating_add);
        if pieces > MOST {
            let what = self.chunk.map_or("parts", |_| "chunk");
            let why = format!("it makes {pieces} parts");
            let valid = format!("at most {MOST} parts in one buffer");
            return Err(Error::invalid_of(what, why, valid));
        }
        Ok(pieces)
    }

    /// Divides the parts into pieces, and those into chunks.
    fn chunks(&self, sites: &[Site], pieces: u64) -> Result<Vec<Chunk>> {
        let cut = self.chunk.unwrap_or(u64::MAX);
        // More chunks than a buffer can have are more memory than a machine has, which the driver shall say.
        let more = sites.iter().map(|site| site.bytes / site.chunk);
        let is_divided = more.fold(pieces, u64::saturating_add) <= MOST;
        let mut chunks = Vec::with_capacity(self.parts.len());
        for (index, &(location, bytes)) in self.parts.iter().enumerate() {
            let site = site_of(sites, location);
            let most = if is_divided {
                sites[site].chunk
            } else {
                u64::MAX
            };
            let is_last = index + 1 == self.parts.len();
            // No bytes at all are refused, room or not.
            let room = if is_last && bytes > 0 { self.room } else { 0 };
            let all = bytes.saturating_add(room);
            let mut at = 0;
            loop {
                let next = (at / cut + 1).saturating_mul(cut);
                // The room belongs to the last piece.
                let end = if next < bytes { next } else { all };
                let size = PaddedSize::new((end - at).min(most), sites[site].granularity)?;
                let begins = at == 0 || (at < bytes && at % cut == 0);
                chunks.push(Chunk { site, size, begins });
                at += size.requested();
                if at == all && is_last {
                    break;
                }
                if size.padded() != size.requested() {
                    let why = "bytes in the middle are not a multiple of the granularity";
                    return Err(Error::invalid(
                        "share",
                        format!("{} {why}", size.requested()),
                    ));
                }
                if at == all {
                    break;
                }
            }
        }
        if chunks.is_empty() {
            return Err(Error::invalid("shares", "the list is empty"));
        }
        Ok(chunks)
    }

    pub(super) fn grants_at(&self, driver: &Driver, location: Location) -> Result<Vec<AccessDesc>> {
        let mut grants = self.access.grants(driver, location)?;
        // Beside parts on the host, a GPU's is not the CPU's.
        if !location.is_host() && self.parts.iter().any(|(location, _)| location.is_host()) {
            grants.retain(|grant| !grant.location.is_host());
        }
        Ok(grants)
    }
}

/// What all parts at one location share.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) location: Location,
    /// The bytes requested there.
    pub(super) bytes: u64,
    pub(super) handle_types: HandleTypes,
    pub(super) options: PhysicalOptions,
    pub(super) granularity: Granularity,
    /// The most bytes of a chunk, in whole granules.
    pub(super) chunk: u64,
    /// Asked for once memory was created there: only that tells a location that does not exist.
    pub(super) access: Option<Vec<AccessDesc>>,
}

impl Site {
    pub(super) fn is_shareable(&self) -> bool {
        self.handle_types != HandleTypes::NONE
    }
}

/// Returns the index of a location's site: every location has one.
fn site_of(sites: &[Site], location: Location) -> usize {
    let found = sites.iter().position(|site| site.location == location);
    found.unwrap_or_default()
}

/// A chunk that is to be created.
#[derive(Debug)]
pub(super) struct Chunk {
    /// The index of its site.
    pub(super) site: usize,
    /// The bytes requested and padded; the last one's include the room that was asked for behind the buffer.
    pub(super) size: PaddedSize,
    /// Whether it begins a part, whose chunks share an entry of the ledger.
    pub(super) begins: bool,
}

/// A chunk that is mapped, without access yet, and the index of its site.
pub(super) type Made = (usize, MappedPart);

/// The memory of a buffer that is to be created, and the chunks that were made ahead.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) options: BufferOptions,
    /// The bytes of all parts, in whole granules.
    pub(super) padded: u64,
    pub(super) chosen: Chosen,
    pub(super) sites: Vec<Site>,
    /// In the order of addresses; at least one.
    pub(super) chunks: Vec<Chunk>,
    pub(super) reservation: Option<Arc<Reservation>>,
    /// The index of the next chunk, and its place in the range.
    pub(super) next: (usize, u64),
    /// The ledger's entry of the chunks of one part.
    pub(super) entry: Option<Arc<Entry>>,
    /// Those made ahead, and behind them why the next one was not.
    pub(super) ahead: VecDeque<Result<Made>>,
}
