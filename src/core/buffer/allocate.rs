//! How a buffer's memory is created: chunk after chunk, each mapped and granted before the next.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::plan::{Made, Plan, Site};
use super::{Buffer, BufferOptions};
use crate::backing::Backing;
use crate::driver::{Driver, Location};
use crate::growth::{Pace, Progress};
use crate::topology::free_now;
use crate::vmm::{MappedPart, MappedRange, Reservation};
use crate::{Error, Result, ledger};

/// Bytes of registered chunks between two looks at the node's free memory: a look takes a good part of the time of a chunk.
const CHECK_EVERY: u64 = 1 << 30;

/// Chunks of registered memory that threads create the pages of, while the driver pins the first of them.
const AHEAD: usize = 4;

impl BufferOptions {
    /// Creates, maps and grants the memory. If a step fails, the steps before it are undone.
    ///
    /// # Errors
    /// Those of [`PhysicalOptions::create`](crate::vmm::PhysicalOptions::create), [`PhysicalMemory::map`](crate::vmm::PhysicalMemory::map) and
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
        let mut range = MappedRange::with_capacity(plan.chunks.len());
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
        if let Some(addresses) = all.addresses() {
            if !self.sites.iter().any(Site::is_shareable) {
                addresses.prepare(self.chosen.fork_of_buffers())?;
            }
            if let Some(node) = self.chosen.node_of_pages(self.location()) {
                addresses.start_threads(driver, node, self.chunks[0].size.padded());
            }
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
        if self.chosen.backing != Backing::Registered {
            return self.make(driver);
        }
        while self.ahead.len() < AHEAD && !matches!(self.ahead.back(), Some(Err(_))) {
            let Some(made) = self.make(driver).transpose() else {
                break;
            };
            self.ahead.push_back(made);
        }
        self.ahead.pop_front().transpose()
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
