//! How a buffer's memory is created: chunk after chunk, each mapped and granted before the next.

use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use super::chunks::{Made, Maker};
use super::{Buffer, BufferOptions};
use crate::backing::choose::choose_for_all;
use crate::backing::{Backing, Chosen, Why};
use crate::capability::shareable::handle_types_of;
use crate::driver::{AccessDesc, Driver, HandleTypes, Location};
use crate::growth::{Pace, Progress};
use crate::guard::check_free;
use crate::size::{Granularity, PaddedSize};
use crate::topology::free_now;
use crate::vmm::{GrowingRange, PhysicalMemory, PhysicalOptions};
use crate::{Error, Result, ledger};

/// Bytes of registered chunks between two looks at the node's free memory: a look takes a good part of the time of a chunk.
const CHECK_EVERY: u64 = 1 << 30;

/// The properties that all parts at one location share.
#[derive(Debug)]
struct Site {
    location: Location,
    options: PhysicalOptions,
    granularity: Granularity,
    is_shareable: bool,
    is_registered: bool,
    /// Asked for once memory was created there: only that tells a location that does not exist.
    access: OnceLock<Vec<AccessDesc>>,
}

/// A part of the buffer.
#[derive(Debug)]
pub(super) struct Part {
    site: Arc<Site>,
    /// The bytes requested and padded; the last part's includes the room that was asked for behind the buffer.
    size: PaddedSize,
    /// The size of its chunks, in whole granules; the last one may be smaller.
    chunk: u64,
    /// Of its chunks behind the first, which share the first one's entry of the ledger.
    further: OnceLock<PhysicalOptions>,
}

impl Part {
    /// Iterates over its chunks. The last one has the rest, not rounded.
    fn chunks(self: Arc<Self>) -> impl Iterator<Item = Chunk> {
        let (all, chunk) = (self.size.requested(), self.chunk);
        let count = all.div_ceil(chunk);
        let every = (CHECK_EVERY / chunk).max(1);
        // Before the first of several chunks, all of them were looked at together.
        let is_looked_at = move |index| index % every == 0 && (index > 0 || count == 1);
        (0..count).map(move |index| Chunk {
            part: Arc::clone(&self),
            bytes: chunk.min(all - index * chunk),
            is_checked: !self.site.is_registered || is_looked_at(index),
        })
    }

    /// Creates the memory of a chunk.
    pub(super) fn create(&self, driver: &Driver, chunk: &Chunk) -> Result<PhysicalMemory> {
        let options = self.further.get().unwrap_or(&self.site.options).clone();
        let options = match chunk.is_checked {
            true => options,
            false => options.overcommit(true),
        };
        let memory = options.create(driver, chunk.bytes)?;
        // Importers know each chunk by its own identity, of which an entry of the ledger has one.
        if !self.site.is_shareable && self.chunk < self.size.padded() {
            let further = || self.site.options.clone().chunk_of(&memory);
            self.further.get_or_init(further);
        }
        Ok(memory)
    }
}

/// A chunk that is to be created.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) part: Arc<Part>,
    pub(super) bytes: u64,
    /// Whether the node's free memory is looked at first.
    is_checked: bool,
}

/// The memory of a buffer that is to be created.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) options: BufferOptions,
    pub(super) parts: Vec<Arc<Part>>,
    /// The bytes of all parts, in whole granules.
    pub(super) padded: u64,
    pub(super) chosen: Chosen,
}

impl Plan {
    /// Returns the chunks, in the order of addresses, to be made.
    pub(super) fn maker(&self) -> Maker<impl Iterator<Item = Chunk> + Send + use<>> {
        let chunks = self.parts.clone().into_iter().flat_map(Part::chunks);
        Maker::new(self.chosen.backing, chunks)
    }

    /// Returns a range for the chunks. If they are registered memory, threads for the first one's pages start meanwhile.
    pub(super) fn range(&self, driver: &Driver) -> Result<GrowingRange> {
        let is_private = self.parts.iter().all(|part| !part.site.is_shareable);
        let private = is_private.then(|| self.chosen.fork_of_buffers());
        let range = GrowingRange::new(self.padded, self.chosen.backing, private);
        if let Some(first) = self.parts.first()
            && let Some(node) = self.chosen.node_of_pages(first.site.location)
        {
            let bytes = first.chunk.min(first.size.padded());
            range.reserve(driver)?.start_threads(node, bytes);
        }
        Ok(range)
    }

    /// Returns the number of bytes requested.
    pub(super) fn len(&self) -> u64 {
        self.options.parts.iter().map(|&(_, bytes)| bytes).sum()
    }

    /// Returns the location of the first part.
    pub(super) fn location(&self) -> Location {
        self.options
            .parts
            .first()
            .map_or(Location::Host, |&(location, _)| location)
    }
}

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
        let plan = self.plan(driver, ledger::Site::here())?;
        let rest = |time: Duration| {
            thread::sleep(time);
            ControlFlow::Continue(())
        };
        let mut pace = Pace::new(plan.options.growth, plan.padded, progress, rest);
        let (range, mut maker) = (plan.range(driver)?, plan.maker());
        while let Some(made) = maker.next(driver, &range) {
            let added = made.and_then(|made| plan.options.add(driver, made, &range, &mut pace));
            if let Err(error) = added {
                // Given back first: the error reports the free memory without it.
                drop((maker, range));
                return Err(plan.options.with_all_requested(driver, &plan.parts, error));
            }
        }
        Ok(Buffer {
            len: plan.len(),
            range: range.finish()?,
            chosen: plan.chosen,
        })
    }

    /// Checks the options, and decides which chunks there are to be.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); nothing has been created.
    pub(super) fn plan(mut self, driver: &Driver, caller: ledger::Site) -> Result<Plan> {
        let caller = self.site.clone().unwrap_or(caller);
        self.expect_free(driver)?;
        self.cut_into_chunks()?;
        let chosen = self.choose(driver)?;
        let sites = self.sites(driver, caller, &chosen)?;
        let parts = self.parts_at(&sites)?;
        if parts.is_empty() {
            return Err(Error::invalid("shares", "the list is empty"));
        }
        let mut sizes = parts.iter().map(|part| part.size.padded());
        let padded = sizes
            .try_fold(0_u64, u64::checked_add)
            .filter(|&sum| sum <= isize::MAX as u64)
            .ok_or_else(|| Error::invalid("parts", "their sum exceeds the address space"))?;
        Ok(Plan {
            options: self,
            parts: parts.into_iter().map(Arc::new).collect(),
            padded,
            chosen,
        })
    }

    /// Decides what all parts are.
    fn choose(&self, driver: &Driver) -> Result<Chosen> {
        if self.backing == Backing::Driver {
            return Ok(Chosen::DRIVER);
        }
        if self.backing == Backing::Auto && self.one_copy && !self.is_one_chunk() {
            return Ok(Chosen::driver(Why::Chunks));
        }
        let mut sites = Vec::new();
        for (location, _) in self.sums() {
            let handle_types = self.handle_types_at(driver, location)?;
            sites.push((location, handle_types, self.grants_at(driver, location)?));
        }
        let sites = sites.iter();
        let sites = sites.map(|(location, types, access)| ((*location, *types), &access[..]));
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

    /// Refuses parts that together exceed their node's free memory: small ones are not checked one by one, and of large
    /// ones no chunk is to be created in vain.
    fn expect_free(&self, driver: &Driver) -> Result<()> {
        // A single chunk is checked when it is created.
        if self.overcommit || self.is_one_chunk() {
            return Ok(());
        }
        let last = self.parts.last().map(|&(location, _)| location);
        for (location, bytes) in self.sums() {
            let room = if Some(location) == last { self.room } else { 0 };
            check_free(driver, location, bytes.saturating_add(room), || 0)?;
        }
        Ok(())
    }

    /// Returns the bytes requested at each location.
    fn sums(&self) -> Vec<(Location, u64)> {
        let mut sums: Vec<(Location, u64)> = Vec::new();
        for &(location, bytes) in &self.parts {
            match sums.iter_mut().find(|(known, _)| *known == location) {
                Some((_, sum)) => *sum = sum.saturating_add(bytes),
                None => sums.push((location, bytes)),
            }
        }
        sums
    }

    fn sites(
        &self,
        driver: &Driver,
        caller: ledger::Site,
        chosen: &Chosen,
    ) -> Result<Vec<Arc<Site>>> {
        let site = |location: Location| {
            let handle_types = self.handle_types_at(driver, location)?;
            let options = PhysicalMemory::options(location)
                .handle_types(handle_types)
                .overcommit(self.overcommit)
                .recorded_as(self.path, self.label.clone(), caller.clone())
                .chosen(chosen.clone())
                .fork(chosen.fork_of_buffers());
            let granularity = options.granularity_of(driver)?;
            Ok(Arc::new(Site {
                location,
                options: options.known_granularity(granularity),
                granularity,
                is_shareable: handle_types != HandleTypes::NONE,
                is_registered: chosen.backing == Backing::Registered,
                access: OnceLock::new(),
            }))
        };
        let sums = self.sums().into_iter();
        sums.map(|(location, _)| site(location)).collect()
    }

    fn handle_types_at(&self, driver: &Driver, location: Location) -> Result<HandleTypes> {
        let mut types = self.handle_types;
        if self.shareable {
            types |= handle_types_of(driver, location, self.backing)?.handle_types;
        }
        Ok(types)
    }

    /// Returns the bytes of the parts on host nodes that can be shared. Those of GPUs are not divided.
    fn shareable_bytes(&self, sites: &[Arc<Site>]) -> u64 {
        let is_shareable = |at: Location| {
            let site = sites.iter().find(|site| site.location == at);
            at.is_host() && site.is_some_and(|site| site.is_shareable)
        };
        let sums = self.parts.iter().filter(|(at, _)| is_shareable(*at));
        sums.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Returns the parts with their sizes.
    fn parts_at(&self, sites: &[Arc<Site>]) -> Result<Vec<Part>> {
        let last = self.parts.len().saturating_sub(1);
        let shareable = self.shareable_bytes(sites);
        let mut parts = Vec::with_capacity(self.parts.len());
        for (index, &(location, bytes)) in self.parts.iter().enumerate() {
            let Some(site) = sites.iter().find(|site| site.location == location) else {
                continue; // every location has a site
            };
            // No bytes at all are refused, room or not.
            let room = if index == last && bytes > 0 {
                self.room
            } else {
                0
            };
            let size = PaddedSize::new(bytes.saturating_add(room), site.granularity)?;
            if index != last && size.padded() != bytes {
                let why =
                    format!("{bytes} bytes in the middle are not a multiple of the granularity");
                return Err(Error::invalid("share", why));
            }
            let shareable = site.is_shareable.then_some(shareable);
            let chunk = self.growth.chunk_for(site.granularity, shareable)?;
            parts.push(Part {
                site: Arc::clone(site),
                size,
                chunk,
                further: OnceLock::new(),
            });
        }
        let chunks = parts
            .iter()
            .map(|part| part.size.requested().div_ceil(part.chunk));
        let is_divided = chunks.fold(0, u64::saturating_add) <= Buffer::MAX_PARTS as u64;
        for part in &mut parts {
            // More chunks than a buffer can have are more memory than a machine has, which the driver shall say.
            if !is_divided || !part.site.location.is_host() {
                part.chunk = part.size.padded();
            }
        }
        Ok(parts)
    }

    /// Rewrites a shortage of one chunk to the shortage of all that is requested at its location.
    pub(super) fn with_all_requested(
        &self,
        driver: &Driver,
        parts: &[Arc<Part>],
        error: Error,
    ) -> Error {
        if parts.len() < 2 && parts.iter().all(|part| part.chunk >= part.size.padded()) {
            return error;
        }
        let all = |at: Location| {
            let here = parts.iter().filter(|part| part.site.location == at);
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

    /// Grants a chunk, adds it behind those before it, and rests.
    ///
    /// # Errors
    /// As [`allocate_with`](Self::allocate_with).
    pub(super) fn add(
        &self,
        driver: &Driver,
        made: Made,
        range: &GrowingRange,
        pace: &mut Pace<
            impl FnMut(Progress) -> ControlFlow<()>,
            impl FnMut(Duration) -> ControlFlow<()>,
        >,
    ) -> Result<()> {
        let part = Arc::clone(&made.part);
        let site = &part.site;
        let access = match site.access.get() {
            Some(access) => access,
            None => {
                let access = self.grants_at(driver, site.location)?;
                site.access.get_or_init(|| access)
            }
        };
        let Made {
            memory,
            mut mapping,
            ..
        } = made;
        mapping.set_access(access)?;
        let bytes = memory.size().padded();
        range.push(memory, mapping);
        pace.made(bytes)
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
