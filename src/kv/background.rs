//! Tiers that grow in the background: their first pages are used while the memory of the others is created.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use egmem_core::Progress;
use egmem_core::ledger::Site;

use crate::{Driver, Error, GrowthState, MemoryError, Result, Tier, TierOptions};

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
        mut progress: impl FnMut(Progress) -> ControlFlow<()> + Send + 'static,
    ) -> Result<Tier> {
        let (geometry, buffer) = self.checked(Site::here())?;
        let grown = Arc::new(AtomicU64::new(0));
        // Not of the tier, which ends the thread: so it ends with its last handle. Each call of the tier frees the pages that are
        // there by then.
        let growing = Arc::clone(&grown);
        let grow = move |made: Progress| {
            growing.store(made.done, Ordering::Release);
            progress(made)
        };
        let memory = buffer.allocate_in_background(driver, geometry.front(), grow)?;
        let memory = Arc::new(memory);
        self.open(memory.clone(), geometry, Some((memory, grown)))
    }
}

impl Tier {
    /// Returns whether the tier grows: `Complete` for one that was not created in the background. A forked child sees its
    /// parent's growth as stopped.
    pub fn growth(&self) -> GrowthState {
        self.0
            .growing
            .as_ref()
            .map_or(GrowthState::Complete, |memory| memory.growth())
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
        Ok(self
            .0
            .growing
            .as_ref()
            .map_or(Ok(()), |memory| memory.wait())?)
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
