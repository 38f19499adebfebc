//! How a tier is created, and how it grows in the background.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use egmem_core::ledger::{AllocPath, Site};
use egmem_core::{Backing, BufferOptions, GrowingBuffer, Growth, Progress};

use crate::driver::{Location, setters};
use crate::geometry::Geometry;
use crate::header::{self, Tag};
use crate::tier::Tier;
use crate::{
    AttachOptions, Buffer, CopyMethod, Driver, Error, GrowthState, MemoryError, Result, TierMemory,
    Verify,
};

impl Tier {
    /// Returns options for a tier at `location`: a node's id, or any [`Location`] that the CPU can use.
    pub fn on(location: impl Into<Location>) -> TierOptions {
        TierOptions::on(location.into())
    }
}

/// Options for a tier in memory of its own; [`create`](Self::create) allocates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct TierOptions {
    buffer: BufferOptions,
    pages: u64,
    bytes: u64,
    page_sizes: Vec<u64>,
    method: CopyMethod,
    verify: Verify,
}

impl TierOptions {
    fn on(location: Location) -> Self {
        Self {
            buffer: Buffer::on(location).backing(Backing::Auto),
            pages: 0,
            bytes: 0,
            page_sizes: vec![0],
            method: CopyMethod::Auto,
            verify: Verify::Never,
        }
    }

    setters! {
        /// Sets the number of pages: 1 to 2^30.
        pages(pages: u64) => pages = pages;
        /// Sets the bytes of the tier, the table included, instead of a number of pages. It takes no more than these, before its
        /// memory is rounded up.
        bytes(bytes: u64) => bytes = bytes;
        /// Sets how [`Tier::load`] and [`Tier::store`] copy. The default is [`CopyMethod::Auto`].
        copy_method(method: CopyMethod) => method = method;
        /// Sets whether pages have checksums, and which are checked. The default is [`Verify::Never`].
        verify(verify: Verify) => verify = verify;
    }

    /// Sets the bytes of a page: 1 to 4 GiB. Pages lie side by side, and none is rounded up; the tier as a whole is
    /// rounded up to the granularity of its memory. Copies by a kernel need a multiple of 16.
    pub fn page_bytes(self, bytes: u64) -> Self {
        self.page_sizes([bytes])
    }

    /// Sets the bytes of pages of each group of [keys](crate::Key::in_group): 1 to 64 sizes of 1 byte to 4 GiB. Several groups share
    /// the bytes of [`bytes`](Self::bytes), and take them from each other in order of use.
    ///
    /// ```
    /// use egmem::driver::NodeId;
    /// use egmem::kv::{Key, Tier};
    /// use egmem::{Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let tier = Tier::on(NodeId(0)).bytes(32 << 20).page_sizes([64 << 10, 18 << 10]).create(&driver)?;
    /// let keys = [Key::from_bytes(b"block 0"), Key::from_bytes(b"block 0").in_group(1)];
    /// tier.prepare_store(&keys)?.commit()?;
    /// assert_eq!((tier.lookup(&keys), tier.page_bytes_of(1)), (2, Some(18 << 10)));
    /// # Ok::<(), egmem::kv::Error>(())
    /// ```
    pub fn page_sizes(mut self, sizes: impl IntoIterator<Item = u64>) -> Self {
        self.page_sizes = sizes.into_iter().collect();
        self
    }

    /// Sets which GPUs may use the tier. The default is every GPU that can reach the memory.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.buffer = self.buffer.access_by(who);
        self
    }

    /// Sets what the memory is. The default is [`Backing::Auto`].
    pub fn backing(mut self, backing: Backing) -> Self {
        self.buffer = self.buffer.backing(backing);
        self
    }

    /// Sets how much memory one driver call creates, as [`BufferOptions::growth`] does.
    pub fn growth(mut self, growth: Growth) -> Self {
        self.buffer = self.buffer.growth(growth);
        self
    }

    /// Sets the memory's name in the ledger.
    pub fn label(mut self, label: impl Into<egmem_core::ledger::Label>) -> Self {
        self.buffer = self.buffer.label(label);
        self
    }

    /// Allocates the memory, and creates a tier of free pages in it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for sizes out of range; those of
    /// [`BufferOptions::allocate`]; [`System`](crate::MemoryError::System) without `/proc`.
    #[track_caller]
    pub fn create(self, driver: &Driver) -> Result<Tier> {
        self.create_with(driver, |_| ControlFlow::Continue(()))
    }

    /// As [`create`](Self::create), and calls `progress` with the bytes that are there after each chunk, as
    /// [`BufferOptions::allocate_with`] does. If it breaks, everything is given back.
    ///
    /// # Errors
    /// As `create`, and [`Cancelled`](crate::MemoryError::Cancelled) after a break.
    #[track_caller]
    pub fn create_with(
        self,
        driver: &Driver,
        progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Tier> {
        let (geometry, buffer) = self.checked(Site::here())?;
        let memory = Arc::new(buffer.allocate_with(driver, progress)?);
        self.open(memory, geometry, None)
    }

    /// Opens a new tier in memory of its own.
    ///
    /// # Errors
    /// Those of [`AttachOptions::join`] and of the memory's view.
    pub(crate) fn open(
        self,
        memory: Arc<dyn TierMemory>,
        geometry: Geometry,
        growing: Option<Arc<GrowingBuffer>>,
    ) -> Result<Tier> {
        header::format(&memory.cpu()?, &geometry, &Tag::default())?;
        let options = AttachOptions::new(memory).copy_method(self.method);
        options.verify(self.verify).join(geometry, false, growing)
    }

    /// Checks the options. Returns where everything lies, and the options of the memory.
    pub(crate) fn checked(&self, caller: Site) -> Result<(Geometry, BufferOptions)> {
        self.method.check()?;
        let geometry = match self.page_sizes[..] {
            _ if self.pages > 0 && self.bytes > 0 => {
                let why = "a tier has a number of pages or of bytes";
                return Err(MemoryError::invalid("bytes", why).into());
            }
            [page_bytes] if self.bytes == 0 => Geometry::new(self.pages, page_bytes)?,
            [page_bytes] => Geometry::new(Geometry::fitting(self.bytes, page_bytes), page_bytes)?,
            _ => Geometry::of_bytes(self.bytes, &self.page_sizes)?,
        };
        if self.bytes > 0 && geometry.total > self.bytes {
            let why = format!("{} bytes have no room for a page", self.bytes);
            let valid = format!("{} or more", geometry.total);
            return Err(MemoryError::invalid_of("bytes", why, valid).into());
        }
        let buffer = self.buffer.clone().bytes(geometry.total);
        Ok((geometry, buffer.recorded_as(AllocPath::Vmm, caller)))
    }
}

impl TierOptions {
    /// Creates a tier whose memory grows in the background. Returns as soon as the table and the first page are there; a
    /// thread creates the rest, chunk by chunk ([`growth`](Self::growth)), and each page is free from then on that all
    /// of it is there. The tier is used as any other from the first, with fewer pages ([`Stats::usable`](crate::Stats::usable)).
    ///
    /// `progress` is called with the bytes that are there after each chunk, when their pages are free, and with no lock held:
    /// by the calling thread until this returns, and by the new thread then. If it breaks, or the driver refuses a
    /// chunk, this call fails, or later the growth stops. A tier whose growth has stopped keeps its pages and is used on.
    ///
    /// # Errors
    /// As [`create_with`](Self::create_with), for the memory until the first page;
    /// [`System`](crate::MemoryError::System) if the thread cannot be started. Later errors are [`Tier::growth_error`]'s.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use egmem::driver::NodeId;
    /// use egmem::kv::{Key, Tier};
    /// use egmem::{Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let options = Tier::on(NodeId(0)).pages(4096).page_bytes(64 << 10);
    /// let tier = options.create_in_background(&driver, |progress| {
    ///     println!("{} of {} bytes", progress.done, progress.total);
    ///     ControlFlow::Continue(())
    /// })?;
    /// tier.prepare_store(&[Key::from_bytes(b"block 0")])?.commit()?; // at once
    /// tier.wait_grown()?;
    /// assert_eq!(tier.stats().usable, 4096);
    /// # Ok::<(), egmem::kv::Error>(())
    /// ```
    #[track_caller]
    pub fn create_in_background(
        self,
        driver: &Driver,
        progress: impl FnMut(Progress) -> ControlFlow<()> + Send + 'static,
    ) -> Result<Tier> {
        let (geometry, buffer) = self.checked(Site::here())?;
        // Each call of the tier frees the pages that are there by then.
        let memory = buffer.allocate_in_background(driver, geometry.front(), progress)?;
        let memory = Arc::new(memory);
        self.open(memory.clone(), geometry, Some(memory))
    }
}

impl Tier {
    /// Returns whether the tier grows: `Complete` for one that was not created in the background. A forked child sees its
    /// parent's growth as stopped.
    pub fn growth(&self) -> GrowthState {
        let growing = self.0.growing.as_ref();
        growing.map_or(GrowthState::Complete, |memory| memory.growth())
    }

    /// Returns how many bytes of the memory are there, and how many there are to be.
    pub fn grown(&self) -> Progress {
        let total = self.0.geometry.total;
        let growing = self.0.growing.as_ref();
        growing.map_or(Progress::new(total, total), |memory| memory.progress())
    }

    /// Returns the error that stopped the growth: the driver's, or [`Cancelled`](crate::MemoryError::Cancelled).
    pub fn growth_error(&self) -> Option<MemoryError> {
        self.0.growing.as_ref()?.error()
    }

    /// Waits until the growth has ended: all pages are there, or it was stopped.
    ///
    /// # Errors
    /// [`growth_error`](Self::growth_error)'s; [`InvalidArgument`](crate::MemoryError::InvalidArgument) if the progress
    /// function calls this, and in a forked child.
    pub fn wait_grown(&self) -> Result<()> {
        let growing = self.0.growing.as_ref();
        Ok(growing.map_or(Ok(()), |memory| memory.wait())?)
    }

    /// As [`wait_grown`](Self::wait_grown), for at most `time`. `None` if the tier still grows then.
    ///
    /// # Errors
    /// As `wait_grown`.
    pub fn wait_grown_timeout(&self, time: Duration) -> Option<Result<()>> {
        let Some(memory) = &self.0.growing else {
            return Some(Ok(()));
        };
        Some(memory.wait_timeout(time)?.map_err(Error::from))
    }

    /// Stops the growth after the chunk under way: the tier keeps the pages that are there. Returns at once. Dropping the
    /// tier's last handle, store, load and job stops it too, and waits for that chunk.
    pub fn cancel_growth(&self) {
        if let Some(memory) = &self.0.growing {
            memory.cancel();
        }
    }
}

#[cfg(test)]
mod tests;
