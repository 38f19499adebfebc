//! How a buffer's memory is created. A plan has the chunks of all parts, and each location's granularity and access; then
//! each chunk is created, mapped and granted before the next.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use smallvec::SmallVec;

use super::{Buffer, BufferOptions};
use crate::backing::choose::choose_for_all;
use crate::backing::{Backing, Chosen, Why};
use crate::capability::shareable::handle_types_of;
use crate::driver::{AllocationProps, Driver, HandleTypes, Location};
use crate::growth::Progress;
use crate::guard::check_free;
use crate::ledger::{self, AccessList, Entry};
use crate::size::{Granularity, PaddedSize};
use crate::topology::free_now;
use crate::vmm::{MappedPart, MappedRange, PhysicalOptions, Reservation};
use crate::{Error, Result};

/// The most parts of a buffer.
const MOST: u64 = Buffer::MAX_PARTS as u64;

/// Bytes of registered chunks between two looks at the node's free memory: a look takes a good part of the time of a chunk.
const CHECK_EVERY: u64 = 1 << 30;

/// Chunks of registered memory that threads create the pages of, while the driver pins the first of them.
const AHEAD: usize = 4;

impl BufferOptions {
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
        mut self,
        driver: &Driver,
        mut progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Buffer> {
        let mut plan = Plan::default();
        plan.decide(&mut self, driver, ledger::Site::here())?;
        let mut buffer = Buffer {
            range: MappedRange::with_capacity(plan.chunks.len()),
            len: self.len(),
            chosen: self.memory.decision().clone(),
        };
        let push = |part| buffer.range.push(part);
        let all = plan.padded;
        let made = plan.grow(&mut self, driver, all, push, |made, rest| {
            progress(made)?;
            if let Some(rest) = rest {
                thread::sleep(rest);
            }
            ControlFlow::Continue(())
        });
        if let Err(error) = made {
            // Given back first: the error reports the free memory without it.
            drop(buffer);
            return Err(plan.with_all_requested(driver, error));
        }
        Ok(buffer)
    }

    /// Returns the bytes of all parts.
    pub(super) fn len(&self) -> u64 {
        self.parts.iter().map(|&(_, bytes)| bytes).sum()
    }

    /// Returns the locations, and what is requested of each.
    fn sites(&self) -> SmallVec<[Site; 1]> {
        let mut sites: SmallVec<[Site; 1]> = SmallVec::new();
        for &(location, bytes) in &self.parts {
            match sites.iter_mut().find(|site| site.location() == location) {
                Some(site) => site.bytes = site.bytes.saturating_add(bytes),
                None => sites.push(Site {
                    bytes,
                    props: AllocationProps {
                        location,
                        ..self.memory.props
                    },
                    granularity: Granularity::TWO_MIB,
                    chunk: u64::MAX,
                    access: AccessList::new(),
                }),
            }
        }
        sites
    }

    /// Returns the number of pieces that were asked for, each of which is divided further as it grows.
    ///
    /// # Errors
    /// [`Error::NodeTooFull`]; [`Error::InvalidArgument`] for chunks of a wrong size, and for more pieces than a buffer can
    /// have.
    fn check(&self, driver: &Driver, sites: &[Site]) -> Result<u64> {
        let last = self.parts.last().map(|&(location, _)| location);
        for site in sites.iter().filter(|_| !self.memory.overcommit) {
            let is_last = Some(site.location()) == last;
            let bytes = site
                .bytes
                .saturating_add(if is_last { self.room } else { 0 });
            let bytes = bytes.checked_next_multiple_of(Granularity::TWO_MIB.bytes());
            check_free(driver, site.location(), bytes.unwrap_or(u64::MAX), || 0)?;
        }
        self.growth.checked_chunk()?;
        if let Some(cut) = self.chunk
            && (cut == 0 || !Granularity::TWO_MIB.divides(cut))
        {
            let why = format!("{cut} bytes");
            return Err(Error::invalid_of("chunk", why, "a multiple of 2 MiB"));
        }
        let pieces = |bytes: u64| self.chunk.map_or(1, |cut| bytes.div_ceil(cut).max(1));
        let pieces = self.parts.iter().map(|&(_, bytes)| pieces(bytes));
        let pieces = pieces.fold(0, u64::saturating_add);
        if pieces > MOST {
            let what = self.chunk.map_or("parts", |_| "chunk");
            let why = format!("it makes {pieces} parts");
            let valid = format!("at most {MOST} parts in one buffer");
            return Err(Error::invalid_of(what, why, valid));
        }
        Ok(pieces)
    }

    /// Decides what all parts are.
    fn choose(&self, driver: &Driver, sites: &[Site]) -> Result<Chosen> {
        let backing = self.memory.backing;
        if backing == Backing::Driver {
            return Ok(Chosen::DRIVER);
        }
        let is_one_chunk = match self.parts[..] {
            [(_, bytes)] if self.chunk.is_none() => {
                self.growth.is_one_chunk(bytes.saturating_add(self.room))
            }
            _ => false,
        };
        if backing == Backing::Auto && self.one_copy && !is_one_chunk {
            return Ok(Chosen::driver(Why::Chunks));
        }
        let sites = sites.iter();
        let sites = sites.map(|at| ((at.location(), at.props.handle_types), &at.access[..]));
        choose_for_all(driver, backing, sites)
    }
}

/// What all parts at one location share.
#[derive(Debug)]
struct Site {
    /// The bytes requested there.
    bytes: u64,
    props: AllocationProps,
    granularity: Granularity,
    /// The most bytes of a chunk, in whole granules.
    chunk: u64,
    access: AccessList,
}

impl Site {
    const fn location(&self) -> Location {
        self.props.location
    }

    fn is_shareable(&self) -> bool {
        self.props.handle_types != HandleTypes::NONE
    }
}

/// A chunk that is to be created.
#[derive(Debug)]
pub(super) struct Chunk {
    /// The index of its site.
    site: usize,
    /// The bytes requested and padded; the last one's include the room that was asked for behind the buffer.
    size: PaddedSize,
    /// Whether it ends a piece, whose chunks share an entry of the ledger.
    ends: bool,
}

/// A chunk that is mapped and not granted yet.
#[derive(Debug)]
struct Made {
    /// The index of its site.
    site: usize,
    part: MappedPart,
    /// Whether its entry in the ledger is that of the chunks before it.
    is_further: bool,
}

/// The memory of a buffer that is to be created, and how far it has come.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// The bytes of all parts, in whole granules.
    pub(super) padded: u64,
    sites: SmallVec<[Site; 1]>,
    /// In the order of addresses; at least one.
    pub(super) chunks: SmallVec<[Chunk; 1]>,
    reservation: Option<Arc<Reservation>>,
    /// The index of the next chunk.
    next: usize,
    /// Bytes of chunks that are mapped.
    begun: u64,
    /// Bytes of chunks that are granted too.
    done: u64,
    /// The ledger's entry of the chunks of one part.
    entry: Option<Entry>,
    /// Chunks that are mapped and not granted yet, and behind them why the next one was not made.
    ahead: Vec<Result<Made>>,
}

impl Plan {
    /// Checks the options, completes them, and decides which chunks there are to be.
    ///
    /// # Errors
    /// As [`allocate`](BufferOptions::allocate); nothing has been created.
    pub(super) fn decide(
        &mut self,
        options: &mut BufferOptions,
        driver: &Driver,
        caller: ledger::Site,
    ) -> Result<()> {
        self.sites = options.sites();
        let sites = &mut self.sites[..];
        // Before the first trial, which takes time and memory.
        let mut pieces = options.check(driver, sites)?;
        let has_host = sites.iter().any(|site| site.location().is_host());
        let mut shareable: u64 = 0;
        for site in sites.iter_mut() {
            let (location, is_host) = (site.location(), site.location().is_host());
            if options.shareable {
                let found = handle_types_of(driver, location, options.memory.backing)?;
                site.props.handle_types |= found.handle_types;
            }
            site.access = options.access.grants(driver, location)?;
            // Beside parts on the host, a GPU's is not the CPU's.
            if has_host && !is_host {
                site.access.retain(|grant| !grant.location.is_host());
            }
            if is_host && site.is_shareable() {
                shareable = shareable.saturating_add(site.bytes);
            }
        }
        let chosen = options.choose(driver, sites)?;
        let (backing, fork) = (chosen.backing, chosen.fork_of_buffers());
        let memory = &mut options.memory;
        (memory.chosen, memory.fork) = (Some(chosen), fork);
        memory.site.get_or_insert(caller);
        for site in sites.iter_mut() {
            memory.props = site.props;
            site.granularity = memory.granularity_of(driver)?;
            // Memory of GPUs is not divided.
            if site.location().is_host() {
                let shareable = site.is_shareable().then_some(shareable);
                let growth = options.growth;
                site.chunk = growth.chunk_for(site.granularity, shareable, backing);
            }
            pieces = pieces.saturating_add(site.bytes / site.chunk);
        }
        // More chunks than a buffer can have are more memory than a machine has, which the driver shall say.
        if pieces > MOST {
            sites.iter_mut().for_each(|site| site.chunk = u64::MAX);
        }
        self.divide(options)
    }

    /// Divides the parts into pieces, and those into chunks.
    fn divide(&mut self, options: &BufferOptions) -> Result<()> {
        let (parts, cut) = (&options.parts[..], options.chunk);
        for (index, &(location, bytes)) in parts.iter().enumerate() {
            let is_there = |site: &Site| site.location() == location;
            // Every location has a site.
            let site = self.sites.iter().position(is_there).unwrap_or_default();
            let Site {
                granularity, chunk, ..
            } = self.sites[site];
            let is_last = index + 1 == parts.len();
            // No bytes at all are refused, room or not.
            let room = if is_last && bytes > 0 {
                options.room
            } else {
                0
            };
            let all = bytes.saturating_add(room);
            let (mut at, mut is_end) = (0, false);
            while !is_end {
                let next = cut.map_or(u64::MAX, |cut| (at / cut + 1).saturating_mul(cut));
                // The room belongs to the last piece.
                let end = if next < bytes { next } else { all };
                let size = PaddedSize::new((end - at).min(chunk), granularity)?;
                at += size.requested();
                is_end = at == all;
                if !(is_end && is_last) && size.padded() != size.requested() {
                    let why = "bytes in the middle are not a multiple of the granularity";
                    let why = format!("{} {why}", size.requested());
                    return Err(Error::invalid("share", why));
                }
                let ends = at == end;
                self.chunks.push(Chunk { site, size, ends });
                self.padded = self
                    .padded
                    .checked_add(size.padded())
                    .filter(|&sum| sum <= isize::MAX as u64)
                    .ok_or_else(|| {
                        Error::invalid("parts", "their sum exceeds the address space")
                    })?;
            }
        }
        if self.chunks.is_empty() {
            return Err(Error::invalid("shares", "the list is empty"));
        }
        Ok(())
    }

    /// Returns the location of the first part.
    pub(super) fn location(&self) -> Location {
        self.sites[0].location()
    }

    /// Reserves the addresses. If they are for registered memory, threads for the first chunk's pages start meanwhile.
    #[inline]
    fn reserve(&self, memory: &PhysicalOptions, driver: &Driver) -> Result<Arc<Reservation>> {
        let chosen = memory.decision();
        let options = Reservation::options().backing(chosen.backing);
        let all = options.reserve(driver, self.padded)?;
        if let Some(addresses) = all.addresses() {
            if !self.sites.iter().any(Site::is_shareable) {
                addresses.prepare(memory.fork)?;
            }
            if let Some(node) = chosen.node_of_pages(self.location()) {
                addresses.start_threads(driver, node, self.chunks[0].size.padded());
            }
        }
        Ok(Arc::new(all))
    }

    /// Reserves the addresses before the first chunk is created, for memory that is used before it is complete.
    pub(super) fn addresses(
        &mut self,
        options: &BufferOptions,
        driver: &Driver,
    ) -> Result<Arc<Reservation>> {
        let addresses = self.reserve(&options.memory, driver)?;
        Ok(Arc::clone(self.reservation.insert(addresses)))
    }

    /// Creates, maps and grants chunks until `until` bytes exist, and has `push` keep each. Then it calls `after`, with no
    /// lock held and with the time to rest, unless the chunk was the last of all.
    ///
    /// # Errors
    /// As [`allocate_with`](BufferOptions::allocate_with); [`Error::Cancelled`] if `after` breaks.
    pub(super) fn grow(
        &mut self,
        options: &mut BufferOptions,
        driver: &Driver,
        until: u64,
        mut push: impl FnMut(MappedPart),
        mut after: impl FnMut(Progress, Option<Duration>) -> ControlFlow<()>,
    ) -> Result<()> {
        while self.done < until {
            let (growth, memory) = (options.growth, &mut options.memory);
            let began = growth.begin();
            let made = match memory.decision().backing {
                Backing::Registered => self.make_ahead(memory, driver)?,
                _ => self.make(memory, driver)?,
            };
            let Some(mut made) = made else { break };
            let bytes = made.part.memory().size().padded();
            let access = &self.sites[made.site].access;
            made.part.mapping_mut().set_access(access)?;
            if made.is_further {
                made.part.memory().entry().add_chunk(bytes);
            }
            self.done += bytes;
            push(made.part);
            let (done, total) = (self.done, self.padded);
            let took = began.map_or(Duration::ZERO, |began| began.elapsed());
            let rest = (done < total).then(|| growth.rest_after(took));
            if after(Progress::new(done, total), rest).is_break() {
                return Err(Error::Cancelled { done, total });
            }
        }
        Ok(())
    }

    /// Creates and maps a chunk; `None` after the last.
    #[inline]
    fn make(&mut self, options: &mut PhysicalOptions, driver: &Driver) -> Result<Option<Made>> {
        let Some(chunk) = self.chunks.get(self.next) else {
            return Ok(None);
        };
        let (site, bytes) = (&self.sites[chunk.site], chunk.size.padded());
        // Before the first chunk, all of the memory was looked at.
        let is_registered = options.decision().backing == Backing::Registered;
        let is_due = !is_registered || self.begun % CHECK_EVERY < bytes;
        let check = !options.overcommit && self.begun > 0 && is_due;
        options.props = site.props;
        let memory = options.create_chunk(driver, chunk.size, check, self.entry.as_ref())?;
        let is_further = self.entry.is_some();
        // Importers know each chunk by its own identity, of which an entry of the ledger has one.
        if chunk.ends || site.is_shareable() {
            self.entry = None;
        } else if !is_further {
            self.entry = Some(memory.entry());
        }
        let is_last = self.begun + bytes == self.padded;
        let site = chunk.site;
        let addresses = match self.reservation.take() {
            Some(known) => known,
            None => self.reserve(options, driver)?,
        };
        if !is_last {
            self.reservation = Some(Arc::clone(&addresses));
        }
        let mapping = addresses.map_last(self.begun, &memory)?;
        self.next += 1;
        self.begun += bytes;
        Ok(Some(Made {
            site,
            part: MappedPart::new(mapping, memory),
            is_further,
        }))
    }

    /// As [`make`](Self::make), for registered memory: also begins the chunks behind that one.
    ///
    /// # Errors
    /// Those of creating and mapping, after the chunks before.
    fn make_ahead(
        &mut self,
        options: &mut PhysicalOptions,
        driver: &Driver,
    ) -> Result<Option<Made>> {
        while self.ahead.len() < AHEAD && !matches!(self.ahead.last(), Some(Err(_))) {
            let Some(made) = self.make(options, driver).transpose() else {
                break;
            };
            self.ahead.push(made);
        }
        if self.ahead.is_empty() {
            return Ok(None);
        }
        self.ahead.remove(0).map(Some)
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
            let here = here.filter(|chunk| self.sites[chunk.site].location() == at);
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
