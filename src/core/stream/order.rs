//! Orders streams by events, and marks work on them; tasks that wait until streams are no longer captured into CUDA graphs:
//! frees, above all.
//!
//! A free on a captured stream is refused and makes the capture invalid, and so does an event between a captured stream and
//! another. No call tells of a capture's end, so the calls that are likely to follow it ask: see [`run_due`].

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::{self, ThreadId};

use super::event::Event;
use super::{Stream, is_capturing};
use crate::driver::{Code, StreamHandle};
use crate::per_driver::{PerDriver, lock};
use crate::{Driver, Error, Result};

/// How many events a stream keeps for later marks; the rest are destroyed.
const SPARES: usize = 64;

/// The events of one stream, and how many marks were set on it.
#[derive(Debug, Default)]
pub(super) struct Marks {
    spares: Vec<Event>,
    recorded: u64,
}

/// A stream, as far as it orders work: for `CU_STREAM_PER_THREAD`, each thread's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Order(u64, Option<ThreadId>);

/// An event behind work on a stream.
#[derive(Debug)]
pub(super) struct Mark {
    pub(super) event: Arc<Event>,
    /// Marks of one order pass in the order of their numbers.
    #[cfg_attr(
        not(feature = "async"),
        allow(dead_code, reason = "for a thread that asks about many")
    )]
    pub(super) place: (Order, u64),
}

impl Event {
    /// Marks the end of everything submitted to `stream` so far.
    ///
    /// # Errors
    /// The driver's errors; [`Error::InvalidArgument`] for another driver's stream, and while a heap's memory
    /// waits for the event's present mark. Of an event that processes share, also for a stream that is being captured into
    /// a graph; and [`Error::System`] with `EOWNERDEAD` if the process that made it has ended.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.driver.expect_same(stream.driver(), "stream")?;
        self.expect_shareable_on(stream)?;
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
    /// Makes work submitted to this stream from now on wait for `event`: for its last record before this call, by any
    /// process that has it.
    ///
    /// # Errors
    /// The driver's errors, and [`Error::InvalidArgument`] for another driver's event. Of an event that processes share, as
    /// [`Event::record`].
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.driver().expect_same(event.driver(), "event")?;
        event.expect_shareable_on(self)?;
        // SAFETY: the borrows keep both handles alive.
        unsafe {
            self.driver()
                .stream_wait_event(self.handle(), event.handle())
        }
    }

    /// Makes work submitted to this stream from now on wait for everything submitted to `other` so far.
    ///
    /// If `other` is being captured into a CUDA graph, this stream becomes part of the capture. If only this stream is, the
    /// calling thread waits for `other` instead: a graph's work cannot wait for work outside, but it runs later than this call.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for(&self, other: &Self) -> Result<()> {
        self.driver().expect_same(other.driver(), "stream")?;
        if self.handle() == other.handle() {
            return Ok(());
        }
        let captured = (other.is_capturing()?, self.is_capturing()?);
        // SAFETY: `self` keeps its handle alive; the driver is the same.
        unsafe { other.order_before(self.handle(), captured) }
    }

    /// Makes work submitted to `user` from now on wait for everything submitted to this stream so far, of which memory called
    /// `what` is part. As [`wait_for`](Self::wait_for), but draws no stream into a capture.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] while this stream is being captured into a graph and `user` is not; the driver's errors.
    ///
    /// # Safety
    /// `user` is a live stream of this stream's driver.
    pub unsafe fn order_use(&self, user: StreamHandle, what: &'static str) -> Result<()> {
        if user == self.handle() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let captured = (self.is_capturing()?, unsafe {
            is_capturing(self.driver(), user)?
        });
        if captured == (true, false) {
            let why = "the stream that it was allocated on is being captured into a graph, so work on another stream \
                       cannot wait for the allocation: end the capture first, or use that stream";
            return Err(Error::invalid(what, why));
        }
        // SAFETY: the caller's promise.
        unsafe { self.order_before(user, captured) }
    }

    /// Orders `later` after this stream, of which the first or the second or both are being captured as `captured` says.
    ///
    /// # Safety
    /// `later` is a live stream of this stream's driver.
    unsafe fn order_before(&self, later: StreamHandle, (own, theirs): (bool, bool)) -> Result<()> {
        if theirs && !own {
            return self.synchronize();
        }
        let event = self.spare_event()?;
        event.record(self)?;
        // SAFETY: the caller's promise; the event is owned here.
        unsafe { self.driver().stream_wait_event(later, event.handle())? };
        // The wait is for the present mark, wherever the event is recorded next. One of a capture is the graph's.
        if !own {
            self.put_event(event);
        }
        Ok(())
    }

    /// Returns an event for [`mark`](Self::mark): a spare one, or a new one.
    ///
    /// # Errors
    /// The driver's errors.
    pub(super) fn spare_event(&self) -> Result<Event> {
        let spare = lock(&self.0.marks).spares.pop();
        spare.map_or_else(|| Event::new(self.driver(), self.device(), false), Ok)
    }

    /// Records an event behind everything submitted to the stream so far.
    ///
    /// # Errors
    /// The driver's errors.
    pub(super) fn mark(&self, event: Event) -> Result<Mark> {
        let per_thread = self.handle().raw == StreamHandle::PER_THREAD;
        let thread = per_thread.then(|| thread::current().id());
        // Held while the event is recorded, so that the numbers are in the stream's order.
        let mut marks = lock(&self.0.marks);
        event.record(self)?;
        marks.recorded += 1;
        Ok(Mark {
            event: Arc::new(event),
            place: (Order(self.0.id, thread), marks.recorded),
        })
    }

    /// Keeps the event of a mark whose work has ended, unless another thread still queries it.
    pub(super) fn keep_event(&self, mark: Mark) {
        if let Ok(event) = Arc::try_unwrap(mark.event) {
            self.put_event(event);
        }
    }

    /// Keeps an event that nothing needs where it is.
    fn put_event(&self, event: Event) {
        // Does not wait for the lock: a thread that records waits for the GPU if the stream is full.
        let mut marks = match self.0.marks.try_lock() {
            Ok(marks) => marks,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if marks.spares.len() < SPARES {
            marks.spares.push(event);
        }
    }

    /// Returns whether the stream may be captured into a graph, as far as the driver says. Of other errors than those of
    /// captures, the caller's next call tells.
    pub fn may_be_captured(&self) -> bool {
        // A refusal that may pass is tried once more.
        match self.is_capturing().or_else(|_| self.is_capturing()) {
            Ok(is_captured) => is_captured,
            Err(error) => error.code().is_some_and(is_of_captures),
        }
    }
}

/// What is to be done once, by any thread, with no lock held.
type Task = Box<dyn FnOnce() + Send>;

/// The tasks of a driver. They keep it alive, by their streams.
static WAITING: PerDriver<Arc<Mutex<Vec<Waiting>>>> = PerDriver::new();

/// How many tasks of all drivers wait: with none, asking for them takes a load.
static COUNT: AtomicUsize = AtomicUsize::new(0);

struct Waiting {
    streams: Vec<Stream>,
    task: Task,
}

/// Returns whether a code is about the capture of a stream: `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` to
/// `CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD`.
const fn is_of_captures(code: Code) -> bool {
    let first = Code::STREAM_CAPTURE_UNSUPPORTED.0;
    let last = Code::STREAM_CAPTURE_WRONG_THREAD.0;
    first <= code.0 && code.0 <= last
}

/// Keeps `task` until none of the streams, at least one, [may be captured](Stream::may_be_captured). The first call of
/// [`run_due`] after that runs it. A task whose time never comes is never run, nor is one in a forked child.
pub fn after_captures(streams: Vec<Stream>, task: impl FnOnce() + Send + 'static) {
    let Some(driver) = streams.first().map(|stream| stream.driver().clone()) else {
        return task();
    };
    let task: Task = Box::new(task);
    let waiting = WAITING.of(&driver);
    lock(&waiting).push(Waiting { streams, task });
    COUNT.fetch_add(1, Relaxed);
}

/// Runs the driver's tasks whose streams are no longer captured.
pub fn run_due(driver: &Driver) {
    if COUNT.load(Relaxed) == 0 || !driver.is_of_this_process() {
        return;
    }
    let waiting = WAITING.of(driver);
    // The driver is asked once for each stream.
    let mut asked: Vec<(StreamHandle, bool)> = Vec::new();
    let mut may_be_captured = |stream: &Stream| {
        let handle = stream.handle();
        let known = asked.iter().find(|(asked, _)| *asked == handle);
        known.map(|(_, answer)| *answer).unwrap_or_else(|| {
            let answer = stream.may_be_captured();
            asked.push((handle, answer));
            answer
        })
    };
    let due: Vec<Waiting> = lock(&waiting)
        .extract_if(.., |waiting| {
            !waiting.streams.iter().any(&mut may_be_captured)
        })
        .collect();
    COUNT.fetch_sub(due.len(), Relaxed);
    for Waiting { task, .. } in due {
        task();
    }
}
