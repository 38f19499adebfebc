//! Events: points in streams' work.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use super::lent::Sharing;
use super::over::{self, Waited};
use crate::Result;
use crate::driver::{Driver, EventHandle, Relaxed};
use crate::explain::name_missing_gpu;
use crate::per_driver::lock;
use crate::teardown::give_back_or_log;

/// A point in a stream's work, destroyed when dropped. One that is [lent](Self::lend) to other processes is destroyed after
/// they have let go of it.
#[derive(Debug)]
pub struct Event {
    pub(super) driver: Driver,
    pub(super) handle: EventHandle,
    /// How many uses need the mark to stay where it is. Locked while it moves.
    pub(super) held: Mutex<u64>,
    pub(super) sharing: Sharing,
}

impl Event {
    /// Creates an event on GPU `device`; without `timing` it is cheaper.
    ///
    /// Source: `cuEventCreate`.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`](crate::Error::NoSuchGpu), or the driver's error.
    pub fn new(driver: &Driver, device: i32, timing: bool) -> Result<Self> {
        let handle = driver
            .event_create(device, timing)
            .map_err(|error| name_missing_gpu(driver, error, device))?;
        Ok(Self::of(driver, handle, Sharing::Private))
    }

    /// Takes over a driver's event.
    pub(super) fn of(driver: &Driver, handle: EventHandle, sharing: Sharing) -> Self {
        Self {
            driver: driver.clone(),
            handle,
            held: Mutex::new(0),
            sharing,
        }
    }

    /// Waits until the marked work is done; at once if the event was never recorded. Captures of streams into CUDA graphs are
    /// not disturbed.
    ///
    /// # Errors
    /// As [`Stream::synchronize`](super::Stream::synchronize); CAPTURED_EVENT for an event that was recorded on a stream
    /// during its capture. [`Error::System`](crate::Error::System) with `EOWNERDEAD` for an event of a process that has
    /// ended before the work.
    pub fn synchronize(&self) -> Result<()> {
        if self.is_imported() {
            return self.synchronize_imported();
        }
        let _relaxed = Relaxed::new(&self.driver);
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.driver.event_synchronize(self.handle) }
    }

    /// Returns whether the marked work is done. Captures of streams into CUDA graphs are not disturbed.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    pub fn is_done(&self) -> Result<bool> {
        let exporter = self.expect_exporter();
        let _relaxed = Relaxed::new(&self.driver);
        // SAFETY: `self` keeps the handle alive.
        let is_done = unsafe { self.driver.event_query(self.handle)? };
        if !is_done {
            exporter?;
        }
        Ok(is_done)
    }

    /// Waits until the marked work has ended, for a caller that must not unmap the work's memory before. As
    /// [`Stream::wait_until_over`](super::Stream::wait_until_over), and also right for work that another thread submitted to
    /// `CU_STREAM_PER_THREAD`, which is another stream in each thread.
    pub fn wait_until_over(&self) -> Waited {
        over::wait(|| self.synchronize(), || self.is_done())
    }

    /// Returns the milliseconds from `start` to this event, both created with timing and done; 0 on the
    /// simulator.
    ///
    /// # Errors
    /// The driver's errors: NOT_READY before both are done, INVALID_HANDLE without timing.
    pub fn elapsed_ms_since(&self, start: &Self) -> Result<f32> {
        self.driver.expect_same(&start.driver, "event")?;
        // SAFETY: the borrows keep both handles alive.
        unsafe { self.driver.event_elapsed_ms(start.handle, self.handle) }
    }

    /// Returns the driver's handle.
    pub const fn handle(&self) -> EventHandle {
        self.handle
    }

    /// Returns the event's driver.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Keeps the mark where it is while the result lives: the event cannot be recorded again.
    pub fn hold(self: Arc<Self>) -> Held {
        *lock(&self.held) += 1;
        Held(self)
    }
}

/// An event that is not recorded again while this lives.
#[derive(Debug)]
pub struct Held(Arc<Event>);

impl Deref for Held {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        *lock(&self.0.held) -= 1;
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.sharing.keep(&self.driver, self.handle) {
            return;
        }
        give_back_or_log(&self.driver, "an event", || {
            // SAFETY: owned by `self`, and no other process holds it; the driver keeps an event that work still waits for.
            unsafe { self.driver.event_destroy(self.handle) }
        });
    }
}
