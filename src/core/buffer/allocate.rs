//! How a buffer's memory is created: chunk after chunk, each mapped and granted before the next.

use std::cell::OnceCell;
use std::ops::ControlFlow;

use super::chunks::{Chunk, Made, Maker};
use super::{Buffer, BufferOptions};
use crate::backing::choose::choose_for_all;
use crate::backing::{Backing, Chosen};
use crate::driver::{AccessDesc, Driver, HandleTypes, Location};
use crate::growth::{Pace, Progress};
use crate::guard::check_free;
use crate::size::{Granularity, PaddedSize};
use crate::topology::free_now;
use crate::vmm::{GrowingRange, PhysicalMemory, PhysicalOptions};
use crate::{Error, Result, ledger};

/// Registered chunks between two looks at the node's free memory: a look takes a good part of the time of a chunk.
const CHECK_EVERY: usize = 16;

/// The properties that all parts at one location share.
struct Site {
    location: Location,
    options: PhysicalOptions,
    granularity: Granularity,
    is_shareable: bool,
    is_registered: bool,
    /// Asked for once memory was created there: only that tells a location that does not exist.
    access: OnceCell<Vec<AccessDesc>>,
}

/// A part of the buffer.
struct Part<'a> {
    site: &'a Site,
    /// The bytes requested and padded; the last part's includes the room that was asked for behind the buffer.
    size: PaddedSize,
    /// The size of its chunks, in whole granules; the last one may be smaller.
    chunk: u64,
}

impl Part<'_> {
    /// Iterates over the bytes of its chunks. The last chunk has the rest, not rounded.
    fn chunks(&self) -> impl Iterator<Item = u64> + use<> {
        let (all, chunk) = (self.size.requested(), self.chunk);
        let count = all.div_ceil(chunk);
        (0..count).map(move |index| chunk.min(all - index * chunk))
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
        mut self,
        driver: &Driver,
        progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Buffer> {
        let caller = self.site.clone().unwrap_or(ledger::Site::here());
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
        let mut pace = Pace::new(self.growth, padded, progress);
        let mut range = GrowingRange::default();
        let maker = Maker::new(driver, chosen.backing, padded, chunks_of(&parts));
        let made = maker.run(|made| {
            let bytes = made.memory.size().padded();
            self.add(driver, &parts, made, &mut range)?;
            pace.made(bytes)
        });
        if let Err(error) = made {
            // Given back first: the error reports the free memory without it.
            drop(range);
            return Err(self.with_all_requested(driver, &parts, error));
        }
        Ok(Buffer {
            len: self.parts.iter().map(|&(_, bytes)| bytes).sum(),
            range: range.finish()?,
            chosen,
        })
    }

    /// Decides what all parts are.
    fn choose(&self, driver: &Driver) -> Result<Chosen> {
        if self.backing == Backing::Driver {
            return Ok(Chosen::DRIVER);
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

    /// Refuses parts that together exceed their node's free memory: small ones are not checked one by one, and of large
    /// ones no chunk is to be created in vain.
    fn expect_free(&self, driver: &Driver) -> Result<()> {
        // A single chunk is checked when it is created.
        let is_checked_later = match self.parts[..] {
            [(_, bytes)] => self.chunk.is_none() && self.growth.is_one_chunk(bytes),
            _ => false,
        };
        if self.overcommit || is_checked_later {
            return Ok(());
        }
        for (location, bytes) in self.sums() {
            check_free(driver, location, bytes, || 0)?;
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

    fn sites(&self, driver: &Driver, caller: ledger::Site, chosen: &Chosen) -> Result<Vec<Site>> {
        let site = |location: Location| {
            let handle_types = self.handle_types_at(driver, location)?;
            let options = PhysicalMemory::options(location)
                .handle_types(handle_types)
                .overcommit(self.overcommit)
                .recorded_as(self.path, self.label.clone(), caller.clone())
                .chosen(chosen.clone());
            let granularity = options.granularity_of(driver)?;
            Ok(Site {
                location,
                options: options.known_granularity(granularity),
                granularity,
                is_shareable: handle_types != HandleTypes::NONE,
                is_registered: chosen.backing == Backing::Registered,
                access: OnceCell::new(),
            })
        };
        let sums = self.sums().into_iter();
        sums.map(|(location, _)| site(location)).collect()
    }

    fn handle_types_at(&self, driver: &Driver, location: Location) -> Result<HandleTypes> {
        let mut types = self.handle_types;
        if self.shareable {
            types |=
                crate::capability::shareable::best_handle_types(driver, location)?.handle_types;
        }
        Ok(types)
    }

    /// Returns the bytes of the parts on host nodes that can be shared. Those of GPUs are not divided.
    fn shareable_bytes(&self, sites: &[Site]) -> u64 {
        let is_shareable = |at: Location| {
            let site = sites.iter().find(|site| site.location == at);
            at.is_host() && site.is_some_and(|site| site.is_shareable)
        };
        let sums = self.parts.iter().filter(|(at, _)| is_shareable(*at));
        sums.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Returns the parts with their sizes.
    fn parts_at<'a>(&self, sites: &'a [Site]) -> Result<Vec<Part<'a>>> {
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
            parts.push(Part { site, size, chunk });
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
    fn with_all_requested(&self, driver: &Driver, parts: &[Part<'_>], error: Error) -> Error {
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

    /// Grants a chunk, and adds it to the range.
    fn add(
        &self,
        driver: &Driver,
        parts: &[Part<'_>],
        made: Made,
        range: &mut GrowingRange,
    ) -> Result<()> {
        let site = parts[made.part].site;
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
        range.push(memory, mapping);
        Ok(())
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

/// Iterates over the chunks of all parts, in the order of addresses.
fn chunks_of(parts: &[Part<'_>]) -> impl Iterator<Item = Chunk> {
    let of_part = |(part, of): (usize, &Part<'_>)| {
        let (options, has_own_entry) = (of.site.options.clone(), of.site.is_shareable);
        // Importers know each chunk by its own identity, of which an entry of the ledger has one.
        let is_registered = of.site.is_registered;
        let chunk = move |(index, bytes): (usize, u64)| Chunk {
            bytes,
            part,
            has_own_entry,
            is_checked: !is_registered || index % CHECK_EVERY == 0,
            options: options.clone(),
        };
        of.chunks().enumerate().map(chunk)
    };
    let chunks: Vec<_> = parts.iter().enumerate().map(of_part).collect();
    chunks.into_iter().flatten()
}
