//! Orders streams by events, and marks work on them.

use super::Stream;
use super::event::Event;
use super::marks::Mark;
use crate::per_driver::lock;
use crate::{Error, Result};

/// `CU_STREAM_PER_THREAD`: one handle for another stream in each thread.
const PER_THREAD: u64 = 2;

impl Event {
    /// Marks the end of everything submitted to `stream` so far.
    ///
    /// # Errors
    /// The driver's errors; [`Error::InvalidArgument`] for another driver's stream, and while a heap's memory
    /// waits for the event's present mark.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.driver.expect_same(stream.driver(), "stream")?;
        let held = lock(&self.held);
        if *held > 0 {
            let why = "memory will be reused after the work that it marks: record another event";
            return Err(Error::invalid("event", why));
        }
        // SAFETY: the borrows keep both handles alive.
        unsafe { self.driver.event_record(self.handle, stream.handle()) }
    }
}

impl Stream {
    /// Makes work submitted to this stream from now on wait for `event`.
    ///
    /// # Errors
    /// The driver's errors, and [`Error::InvalidArgument`] for another driver's event.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.driver().expect_same(event.driver(), "event")?;
        // SAFETY: the borrows keep both handles alive.
        unsafe {
            self.driver()
                .stream_wait_event(self.handle(), event.handle())
        }
    }

    /// Makes work submitted to this stream from now on wait for everything submitted to `other` so far.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        self.driver().expect_same(other.driver(), "stream")?;
        if self.handle() == other.handle() {
            return Ok(());
        }
        let event = Event::new(other.driver(), other.device(), false)?;
        event.record(other)?;
        self.wait(&event)
    }

    /// Returns an event for [`mark`](Self::mark): a spare one, or a new one.
    ///
    /// # Errors
    /// The driver's errors.
    pub(super) fn spare_event(&self) -> Result<Event> {
        match self.marks().spare() {
            Some(event) => Ok(event),
            None => Event::new(self.driver(), self.device(), false),
        }
    }

    /// Records an event behind everything submitted to the stream so far.
    ///
    /// # Errors
    /// The driver's errors.
    pub(super) fn mark(&self, event: Event) -> Result<Mark> {
        let per_thread = self.handle().raw == PER_THREAD;
        self.marks()
            .mark(event, per_thread, |event| event.record(self))
    }

    /// Keeps the event of a mark whose work has ended, unless another thread still queries it.
    pub(super) fn keep_event(&self, mark: Mark) {
        self.marks().keep(mark);
    }
}
