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
        let mut places = self.places();
        // A single chunk is checked when it is created. Of others, small ones are not checked one by one, and of large
        // ones none is to be created in vain.
        if !self.overcommit && !self.is_one_chunk() {
            let last = self.parts.last().map(|&(location, _)| location);
            for &Place {
                location, bytes, ..
            } in &places
            {
                let room = if Some(location) == last { self.room } else { 0 };
                check_free(driver, location, bytes.saturating_add(room), || 0)?;
            }
        }
        self.cut_into_chunks()?;
        if self.shareable {
            for place in &mut places {
                let all = handle_types_of(driver, place.location, self.backing)?;
                place.handle_types |= all.handle_types;
            }
        }
        let chosen = self.choose(driver, &places)?;
        let site = |place: Place| {
            let options = PhysicalMemory::options(place.location)
                .handle_types(place.handle_types)
                .recorded_as(self.path, self.label.clone(), caller.clone())
                .chosen(chosen.clone())
                .fork(chosen.fork_of_buffers());
            let granularity = options.granularity_of(driver)?;
            Ok(Site {
                place,
                options,
                granularity,
                access: None,
            })
        };
        let sites = places.into_iter().map(site).collect::<Result<Vec<_>>>()?;
        let parts = self.parts_at(&sites)?;
        let mut sizes = parts.iter().map(|part| part.size.padded());
        let padded = sizes
            .try_fold(0_u64, u64::checked_add)
            .filter(|&sum| sum <= isize::MAX as u64)
            .ok_or_else(|| Error::invalid("parts", "their sum exceeds the address space"))?;
        Ok(Plan {
            options: self,
            padded,
            chosen,
            sites,
            parts,
            reservation: None,
            next: (0, 0, 0),
            entry: None,
            ahead: VecDeque::new(),
            failed: None,
        })
    }

    /// Returns the locations, and what is requested of each.
    fn places(&self) -> Vec<Place> {
        let mut places: Vec<Place> = Vec::new();
        for &(location, bytes) in &self.parts {
            match places.iter_mut().find(|place| place.location == location) {
                Some(place) => place.bytes = place.bytes.saturating_add(bytes),
                None => places.push(Place {
                    location,
                    bytes,
                    handle_types: self.handle_types,
                }),
            }
        }
        places
    }

    /// Cuts each part into chunks, if that was asked for. Refuses more than [`Buffer::MAX_PARTS`] before it takes
    /// memory for a list of them.
    fn cut_into_chunks(&mut self) -> Result<()> {
        let too_many = |what, count: u64| {
            let why = format!("it makes {count} parts");
            let valid = format!("at most {} parts in one buffer", Buffer::MAX_PARTS);
            Err(Error::invalid_of(what, why, valid))
        };
        let most = Buffer::MAX_PARTS as u64;
        let Some(chunk) = self.chunk else {
            let count = self.parts.len() as u64;
            return if count <= most {
                Ok(())
            } else {
                too_many("parts", count)
            };
        };
        if chunk == 0 || !Granularity::TWO_MIB.divides(chunk) {
            let why = format!("{chunk} bytes");
            return Err(Error::invalid_of("chunk", why, "a multiple of 2 MiB"));
        }
        let counts = self.parts.iter();
        let counts = counts.map(|(_, bytes)| bytes.div_ceil(chunk).max(1));
        let count = counts.fold(0, u64::saturating_add);
        if count > most {
            return too_many("chunk", count);
        }
        let mut chunks = Vec::with_capacity(count as usize);
        for &(location, bytes) in &self.parts {
            let whole = bytes.saturating_sub(1) / chunk;
            chunks.extend((0..whole).map(|_| (location, chunk)));
            chunks.push((location, bytes - whole * chunk));
        }
        self.parts = chunks;
        Ok(())
    }

    /// Decides what all parts are.
    fn choose(&self, driver: &Driver, places: &[Place]) -> Result<Chosen> {
        if self.backing == Backing::Driver {
            return Ok(Chosen::DRIVER);
        }
        if self.backing == Backing::Auto && self.one_copy && !self.is_one_chunk() {
            return Ok(Chosen::driver(Why::Chunks));
        }
        let access = places.iter();
        let access = access.map(|place| self.grants_at(driver, place.location));
        let access = access.collect::<Result<Vec<_>>>()?;
        let sites = places.iter().zip(&access);
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

    /// Returns the parts with their sizes.
    fn parts_at(&self, sites: &[Site]) -> Result<Vec<Part>> {
        let Some(last) = self.parts.len().checked_sub(1) else {
            return Err(Error::invalid("shares", "the list is empty"));
        };
        // Those on host nodes that can be shared. Those of GPUs are not divided.
        let shareable = sites.iter().filter(|site| site.place.is_shareable());
        let shareable = shareable.filter(|site| site.place.location.is_host());
        let shareable = shareable.fold(0, |sum: u64, site| sum.saturating_add(site.place.bytes));
        let mut parts = Vec::with_capacity(self.parts.len());
        let mut chunks = 0_u64;
        for (index, &(location, bytes)) in self.parts.iter().enumerate() {
            let site = sites
                .iter()
                .position(|site| site.place.location == location);
            let site = site.unwrap_or_default(); // every location has a site
            let granularity = sites[site].granularity;
            // No bytes at all are refused, room or not.
            let is_last = index == last;
            let room = if is_last && bytes > 0 { self.room } else { 0 };
            let size = PaddedSize::new(bytes.saturating_add(room), granularity)?;
            if !is_last && size.padded() != bytes {
                let why =
                    format!("{bytes} bytes in the middle are not a multiple of the granularity");
                return Err(Error::invalid("share", why));
            }
            let shareable = sites[site].place.is_shareable().then_some(shareable);
            let chunk = self.growth.chunk_for(granularity, shareable)?;
            chunks = chunks.saturating_add(size.requested().div_ceil(chunk));
            parts.push(Part { site, size, chunk });
        }
        let is_divided = chunks <= Buffer::MAX_PARTS as u64;
        for part in &mut parts {
            // More chunks than a buffer can have are more memory than a machine has, which the driver shall say.
            if !is_divided || !sites[part.site].place.location.is_host() {
                part.chunk = part.size.padded();
            }
        }
        Ok(parts)
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

/// What is requested of one location.
#[derive(Debug)]
struct Place {
    location: Location,
    bytes: u64,
    handle_types: HandleTypes,
}

impl Place {
    fn is_shareable(&self) -> bool {
        self.handle_types != HandleTypes::NONE
    }
}

/// The properties that all parts at one location share.
#[derive(Debug)]
struct Site {
    place: Place,
    options: PhysicalOptions,
    granularity: Granularity,
    /// Asked for once memory was created there: only that tells a location that does not exist.
    access: Option<Vec<AccessDesc>>,
}

/// A part of the buffer.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// The index of its site.
    site: usize,
    /// The bytes requested and padded; the last part's includes the room that was asked for behind the buffer.
    size: PaddedSize,
    /// The size of its chunks, in whole granules; the last one may be smaller.
    chunk: u64,
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
    parts: Vec<Part>,
    reservation: Option<Arc<Reservation>>,
    /// The next chunk: its part, its index there, and its place in the range.
    next: (usize, u64, u64),
    /// The ledger's entry of the part's first chunk, which the others share.
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
        self.sites[self.parts[0].site].place.location
    }

    /// Reserves the addresses, unless they are. If they are for registered memory, threads for the first chunk's pages start
    /// meanwhile.
    pub(super) fn reserve(&mut self, driver: &Driver) -> Result<Arc<Reservation>> {
        if let Some(known) = &self.reservation {
            return Ok(Arc::clone(known));
        }
        let options = Reservation::options().backing(self.chosen.backing);
        let all = options.reserve(driver, self.padded)?;
        if self.sites.iter().all(|site| !site.place.is_shareable()) {
            all.prepare(self.chosen.fork_of_buffers())?;
        }
        if let Some(node) = self.chosen.node_of_pages(self.location()) {
            let first = self.parts[0];
            all.start_threads(node, first.chunk.min(first.size.padded()));
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
                let access = self.options.grants_at(driver, site.place.location)?;
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
        let (part, chunk, at) = self.next;
        let Some(&Part {
            site: index,
            size,
            chunk: bytes,
        }) = self.parts.get(part)
        else {
            return Ok(None);
        };
        let count = size.requested().div_ceil(bytes);
        let site = &self.sites[index];
        let every = (CHECK_EVERY / bytes).max(1);
        // Before the first of several registered chunks, all of them were looked at together.
        let is_looked_at = self.chosen.backing != Backing::Registered
            || (chunk % every == 0 && (chunk > 0 || count == 1));
        let check = !self.options.overcommit && is_looked_at;
        // The last one has the rest, not rounded.
        let size = PaddedSize::new(
            bytes.min(size.requested() - chunk * bytes),
            site.granularity,
        )?;
        let entry = self.entry.as_ref();
        let memory = site.options.create_chunk(driver, size, check, entry)?;
        // Importers know each chunk by its own identity, of which an entry of the ledger has one.
        if count > 1 && chunk == 0 && !site.place.is_shareable() {
            self.entry = Some(memory.entry());
        }
        let mapping = self.reserve(driver)?.map(at, &memory)?;
        self.next = (part, chunk + 1, at + size.padded());
        if chunk + 1 == count {
            (self.next, self.entry) = ((part + 1, 0, at + size.padded()), None);
        }
        Ok(Some((index, MappedPart::new(mapping, memory))))
    }

    /// Gives back what was made ahead, and rewrites a shortage of one chunk to the shortage of all that is requested at its
    /// location.
    pub(super) fn with_all_requested(mut self, driver: &Driver, error: Error) -> Error {
        self.ahead.clear();
        if self.parts.len() < 2
            && self
                .parts
                .iter()
                .all(|part| part.chunk >= part.size.padded())
        {
            return error;
        }
        let all = |at: Location| {
            let here = |part: &&Part| self.sites[part.site].place.location == at;
            let here = self.parts.iter().filter(here);
            here.map(|part| part.size.padded()).sum::<u64>()
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
