//! How a tier is created.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::driver::Location;
use crate::geometry::Geometry;
use crate::header::{self, Tag};
use crate::inner::Inner;
use crate::table::Table;
use crate::tier::Tier;
use crate::{Buffer, CopyMethod, Driver, Result, Verify};
use egmem_core::ledger::{AllocPath, Site};
use egmem_core::{Backing, BufferOptions, Growth, Progress};

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
    page_bytes: u64,
    pub(crate) method: CopyMethod,
    pub(crate) verify: Verify,
}

impl TierOptions {
    fn on(location: Location) -> Self {
        Self {
            buffer: Buffer::on(location).backing(Backing::Auto),
            pages: 0,
            page_bytes: 0,
            method: CopyMethod::Auto,
            verify: Verify::Never,
        }
    }

    /// Sets the number of pages: 1 to 2^30.
    pub const fn pages(mut self, pages: u64) -> Self {
        self.pages = pages;
        self
    }

    /// Sets the bytes of a page: 1 to 4 GiB. Pages lie side by side, and none is rounded up; the tier as a whole is
    /// rounded up to the granularity of its memory. Copies by a kernel need a multiple of 16.
    pub const fn page_bytes(mut self, bytes: u64) -> Self {
        self.page_bytes = bytes;
        self
    }

    /// Sets how [`Tier::load`] and [`Tier::store`] copy. The default is [`CopyMethod::Auto`].
    pub const fn copy_method(mut self, method: CopyMethod) -> Self {
        self.method = method;
        self
    }

    /// Sets whether pages have checksums, and which are checked. The default is [`Verify::Never`].
    pub const fn verify(mut self, verify: Verify) -> Self {
        self.verify = verify;
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
    /// [`BufferOptions::allocate`].
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
        header::format(&memory.cpu()?, &geometry, &Tag::default())?;
        let table = Table::new(geometry.pages, geometry.page_bytes)?;
        let inner = Inner::new(memory, geometry, table)?;
        Ok(Tier::new(
            inner.copying_by(self.method).verifying(self.verify),
        ))
    }

    /// Checks the options. Returns where everything lies, and the options of the memory.
    pub(crate) fn checked(&self, caller: Site) -> Result<(Geometry, BufferOptions)> {
        self.method.check()?;
        let geometry = Geometry::new(self.pages, self.page_bytes)?;
        let buffer = self.buffer.clone().bytes(geometry.total);
        Ok((geometry, buffer.recorded_as(AllocPath::Vmm, caller)))
    }
}
