//! How a buffer's memory is created: chunk after chunk, each mapped and granted before the next.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::{Buffer, BufferOptions};
use crate::backing::choose::choose_for_all;
use crate::backing::{Backing, Chosen, Why};
use crate::capability::shareable::handle_types_of;
use crate::driver::{AccessDesc, Driver, HandleTypes, Location};
use crate::growth::{Pace, Progress};
use crate::guard::check_free;
use crate::ledger::{self, Entry};
use crate::size::{Granularity, PaddedSize};
use crate::topology::free_now;
use crate::vmm::{MappedPart, MappedRange, PhysicalMemory, PhysicalOptions, Reservation};
use crate::{Error, Result};

/// Bytes of registered chunks between two looks at the node's free memory: a look takes a good part of the time of a chunk.
const CHECK_EVERY: u64 = 1 << 30;

/// Chunks of registered memory that threads create the pages of, while the driver pins the first of them.
const AHEAD: usize = 4;

impl BufferOptions {
    /// Creates, maps and grants the memory. If a step fails, the steps before it are undone.
    ///
    /// # Errors
    /// Those of [`PhysicalOptions::create`](crate::vmm::PhysicalOptions::create), [`PhysicalMemory::map`] and
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access); [`Error::InvalidArgument`] for no share, or one before the
    /// last that is not a multiple of the granularity, for chunks that are not, for chunks of
    /// [`growth`](Self::growth) out of range, and for more than [`Buffer::MAX_PARTS`] parts; the reason why a buffer cannot
    /// be shareable as requested. A shortage names all that was requested of the location.
    #[track_caller]
    pub fn allocate(self, driver: &Driver) -> Result<Buffer> {
        self.allocate_with(driver, |_| ControlFlow::Continue(()))
    }

    /// As [`allocate`](Self::allocate), and calls `progress` after each chunk ([`growth`](Self::growth)), the last one too,
    /// in the calling thread and with no lock held. If it breaks, everything is given back.
    ///
    /// # Errors
    /// As `allocate`, and [`Error::Cancelled`] after a break.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use egmem::driver::NodeId;
    /// use egmem::{Buffer, Driver, Error, Growth, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let options = Buffer::on(NodeId(0)).bytes(64 << 20).growth(Growth::steady().chunk(16 << 20));
    /// let buffer = options.clone().allocate_with(&driver, |progress| {
    ///     println!("{} of {} bytes", progress.done, progress.total);
    ///     ControlFlow::Continue(())
    /// })?;
    /// let error = options.allocate_with(&driver, |_| ControlFlow::Break(())).unwrap_err();
    /// assert_eq!(error, Error::Cancelled { done: 16 << 20, total: 64 << 20 });
    /// # Ok::<(), egmem::Error>(())
    /// ```
    #[track_caller]
    pub fn allocate_with(
        self,
        driver: &Driver,
        progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Buffer> {
        let mut plan = self.plan(driver, ledger::Site::here())?;
        let rest = |time: Duration| {
            thread::sleep(time);
            ControlFlow::Continue(())
        };
        let mut pace = Pace::new(plan.options.growth, plan.padded, progress, rest);
        let mut range = MappedRange::new();
        loop {
            match plan.add(driver, &mut pace, |part| range.push(part)) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    // Given back first: the error reports the free memory without it.
                    drop(range);
                    return Err(plan.with_all_requested(driver, error));
                }
            }
        }
        Ok(Buffer {
            range,
            len: plan.len(),
            chosen: plan.chosen,
        })
    }

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
            let chunk = self.growth.chunk_for(site.granularity, shareable)?;
            // Memory of GPUs is not divided.
            if site.location.is_host() {
                site.chunk = chunk;
            }
        }
        let chunks = self.chunks(&sites)?;
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
            failed: None,
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

    /// Returns the bytes of the pieces that were asked for, and whether these are divided as they grow. Refuses too many
    /// pieces before there is a list of them.
    fn pieces(&self, sites: &[Site]) -> Result<(u64, bool)> {
        let cut = self.chunk.unwrap_or(u64::MAX);
        if self.chunk.is_some() && (cut == 0 || !Granularity::TWO_MIB.divides(cut)) {
            let why = format!("{cut} bytes");
            return Err(Error::invalid_of("chunk", why, "a multiple of 2 MiB"));
        }
        let (most, pieces) = (Buffer::MAX_PARTS as u64, self.parts.iter());
        let pieces = pieces.map(|(_, bytes)| bytes.div_ceil(cut).max(1));
        let pieces = pieces.fold(0, u64::saturating_add);
        if pieces > most {
            let what = self.chunk.map_or("parts", |_| "chunk");
            let why = format!("it makes {pieces} parts");
            let valid = format!("at most {most} parts in one buffer");
            return Err(Error::invalid_of(what, why, valid));
        }
        // More chunks than a buffer can have are more memory than a machine has, which the driver shall say.
        let chunks = self.parts.iter().map(|&(location, bytes)| {
            let chunk = sites[site_of(sites, location)].chunk;
            let whole = (bytes / cut).saturating_mul(cut.div_ceil(chunk));
            whole.saturating_add((bytes % cut).div_ceil(chunk))
        });
        Ok((cut, chunks.fold(0, u64::saturating_add) <= most))
    }

    /// Divides the parts.
    fn chunks(&self, sites: &[Site]) -> Result<Vec<Chunk>> {
        let (cut, is_divided) = self.pieces(sites)?;
        let mut chunks = Vec::with_capacity(self.parts.len());
        for (index, &(location, bytes)) in self.parts.iter().enumerate() {
            let site = site_of(sites, location);
            let granularity = sites[site].granularity;
            let most = if is_divided {
                sites[site].chunk
            } else {
                u64::MAX
            };
            let mut left = bytes;
            loop {
                let piece = left.min(cut);
                left -= piece;
                let is_last = left == 0 && index + 1 == self.parts.len();
                // No bytes at all are refused, room or not.
                let room = if is_last && piece > 0 { self.room } else { 0 };
                let mut rest = piece.saturating_add(room);
                let mut begins = true;
                while rest > 0 || begins {
                    let size = PaddedSize::new(rest.min(most), granularity)?;
                    let bytes = size.requested();
                    rest -= bytes;
                    if size.padded() != bytes && !(is_last && rest == 0) {
                        let why = "in the middle are not a multiple of the granularity";
                        return Err(Error::invalid("share", format!("{bytes} bytes {why}")));
                    }
                    chunks.push(Chunk { site, size, begins });
                    begins = false;
                }
                if left == 0 {
                    break;
                }
            }
        }
        if chunks.is_empty() {
            return Err(Error::invalid("shares", "the list is empty"));
        }
        Ok(chunks)
    }

    fn grants_at(&self, driver: &Driver, location: Location) -> Result<Vec<AccessDesc>> {
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
struct Site {
    location: Location,
    /// The bytes requested there.
    bytes: u64,
    handle_types: HandleTypes,
    options: PhysicalOptions,
    granularity: Granularity,
    /// The most bytes of a chunk, in whole granules.
    chunk: u64,
    /// Asked for once memory was created there: only that tells a location that does not exist.
    access: Option<Vec<AccessDesc>>,
}

impl Site {
    fn is_shareable(&self) -> bool {
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
struct Chunk {
    /// The index of its site.
    site: usize,
    /// The bytes requested and padded; the last one's include the room that was asked for behind the buffer.
    size: PaddedSize,
    /// Whether it begins a part, whose chunks share an entry of the ledger.
    begins: bool,
}

/// A chunk that is mapped, without access yet, and the index of its site.
type Made = (usize, MappedPart);

/// The memory of a buffer that is to be created, and the chunks that were made ahead.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) options: BufferOptions,
    /// The bytes of all parts, in whole granules.
    pub(super) padded: u64,
    pub(super) chosen: Chosen,
    sites: Vec<Site>,
    /// In the order of addresses; at least one.
    chunks: Vec<Chunk>,
    reservation: Option<Arc<Reservation>>,
    /// The index of the next chunk, and its place in the range.
    next: (usize, u64),
    /// The ledger's entry of the chunks of one part.
    entry: Option<Arc<Entry>>,
    ahead: VecDeque<Made>,
    /// Why the chunk behind those ahead was not made.
    failed: Option<Error>,
}

impl Plan {
    /// Returns the number of bytes requested.
    pub(super) fn len(&self) -> u64 {
        self.options.parts.iter().map(|&(_, bytes)| bytes).sum()
    }

    /// Returns the location of the first part.
    pub(super) fn location(&self) -> Location {
        self.sites[self.chunks[0].site].location
    }

    /// Reserves the addresses, unless they are. If they are for registered memory, threads for the first chunk's pages start
    /// meanwhile.
    pub(super) fn reserve(&mut self, driver: &Driver) -> Result<Arc<Reservation>> {
        if let Some(known) = &self.reservation {
            return Ok(Arc::clone(known));
        }
        let options = Reservation::options().backing(self.chosen.backing);
        let all = options.reserve(driver, self.padded)?;
        if self.sites.iter().all(|site| !site.is_shareable()) {
            all.prepare(self.chosen.fork_of_buffers())?;
        }
        if let Some(node) = self.chosen.node_of_pages(self.location()) {
            all.start_threads(node, self.chunks[0].size.padded());
        }
        Ok(Arc::clone(self.reservation.insert(Arc::new(all))))
    }

    /// Creates, maps and grants the next chunk, has `push` keep it, and rests. Returns `false` after the last.
    ///
    /// # Errors
    /// As [`allocate_with`](BufferOptions::allocate_with).
    pub(super) fn add(
        &mut self,
        driver: &Driver,
        pace: &mut Pace<
            impl FnMut(Progress) -> ControlFlow<()>,
            impl FnMut(Duration) -> ControlFlow<()>,
        >,
        push: impl FnOnce(MappedPart),
    ) -> Result<bool> {
        let Some((site, mut part)) = self.take(driver)? else {
            return Ok(false);
        };
        let site = &mut self.sites[site];
        let access = match &site.access {
            Some(access) => access,
            None => {
                let access = self.options.grants_at(driver, site.location)?;
                site.access.insert(access)
            }
        };
        part.mapping_mut().set_access(access)?;
        let bytes = part.memory().size().padded();
        push(part);
        pace.made(bytes)?;
        Ok(true)
    }

    /// Returns the next chunk, and makes those that are to be ahead of it; `None` after the last.
    ///
    /// # Errors
    /// Those of creating and mapping, after the chunks before.
    fn take(&mut self, driver: &Driver) -> Result<Option<Made>> {
        let taken = match (self.ahead.pop_front(), self.failed.take()) {
            (None, Some(error)) => return Err(error),
            (None, None) => self.make(driver)?,
            (made, failed) => {
                self.failed = failed;
                made
            }
        };
        let most = match self.chosen.backing {
            Backing::Registered => AHEAD,
            _ => 1,
        };
        while self.ahead.len() + 1 < most && self.failed.is_none() {
            match self.make(driver) {
                Ok(Some(made)) => self.ahead.push_back(made),
                Ok(None) => break,
                Err(error) => self.failed = Some(error),
            }
        }
        Ok(taken)
    }

    /// Creates and maps a chunk; `None` after the last.
    fn make(&mut self, driver: &Driver) -> Result<Option<Made>> {
        let (index, at) = self.next;
        let Some(chunk) = self.chunks.get(index) else {
            return Ok(None);
        };
        let (site, bytes) = (&self.sites[chunk.site], chunk.size.padded());
        // Registered memory is looked at once in a while, and before the first of several chunks all of it was.
        let is_due = self.chunks.len() == 1 || (at > 0 && at % CHECK_EVERY < bytes);
        let check =
            !self.options.overcommit && (self.chosen.backing != Backing::Registered || is_due);
        // Importers know each chunk by its own identity, of which an entry of the ledger has one.
        if chunk.begins || site.is_shareable() {
            self.entry = None;
        }
        let entry = self.entry.as_ref();
        let memory = site
            .options
            .create_chunk(driver, chunk.size, check, entry)?;
        self.entry.get_or_insert_with(|| memory.entry());
        let site = chunk.site;
        let mapping = self.reserve(driver)?.map(at, &memory)?;
        self.next = (index + 1, at + bytes);
        Ok(Some((site, MappedPart::new(mapping, memory))))
    }

    /// Gives back what was made ahead, and rewrites a shortage of one chunk to the shortage of all that is requested at its
    /// location.
    pub(super) fn with_all_requested(mut self, driver: &Driver, error: Error) -> Error {
        self.ahead.clear();
        if self.chunks.len() < 2 {
            return error;
        }
        let all = |at: Location| {
            let here = self.chunks.iter();
            let here = here.filter(|chunk| self.sites[chunk.site].location == at);
            here.map(|chunk| chunk.size.padded()).sum::<u64>()
        };
        match error {
            Error::OutOfMemory {
                location, source, ..
            } => Error::OutOfMemory {
                location,
                requested: all(location),
                source,
            },
            Error::NodeTooFull { node, free, .. } => Error::NodeTooFull {
                node,
                requested: all(node.into()),
                free: free_now(driver, node).unwrap_or(free),
            },
            other => other,
        }
    }
}
