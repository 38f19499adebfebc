//! Frees memory in the order of GPU work: a payload returns once the work before it has run.
//!
//! Streams are accessed, and events recorded on them, only within the call that frees, never in
//! [`Deferred::poll`]. That costs an event record for each free (about as much as a launch). Recording one
//! batch at the next poll would cost less, but then
//! 1. the polling thread would access streams that are not its own: one that another thread just begins to
//!    capture (the capture becomes invalid), one that its owner has destroyed, or a per-thread default stream,
//!    whose handle means another stream in each thread;
//! 2. blocks would wait for work that was submitted to the stream after them;
//! 3. after the program has waited for its stream, a poll might still find nothing.
//!
//! [`OnStream`](crate::OnStream) records one event for many frees all the same, because it is not this queue that does:
//! 1. the handle is the program's, and only a call of its owner, or its drop, records an event. It has the stream, so the
//!    stream lives; it asks whether the stream is captured before each use, and takes no per-thread default stream;
//! 2. blocks that go to the same stream wait for nothing at all. Those that come here wait for the work before the record,
//!    which may be later than the free; the handle's bounds say for how many blocks;
//! 3. a block that the handle keeps counts as in use, not as deferred, until `OnStream::flush`, which a program calls before it
//!    waits.
//!
//! Many blocks that are freed at once need one event: [`Deferred::after_stream`].

mod deferral;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;
use std::thread::ThreadId;

pub(crate) use self::deferral::Deferral;
use crate::driver::{Driver, Relaxed, StreamHandle};
use crate::reports::Reports;
use crate::stream::{Event, Held, Stream};
use crate::teardown::{log_lost, wait_for_all_gpus};
use crate::{Error, Result};

/// How many events of a GPU are kept for later frees; more are destroyed.
const SPARES: usize = 256;

/// Payloads that wait for GPU work. Used under a lock; only [`drain`](Self::drain) and dropping it wait for a
/// GPU.
///
/// A GPU whose context is lost runs nothing any more, so payloads that waited for its work are free as soon
/// as no other GPU can take part in that work: a stream may have waited for another GPU's, which goes on. So
/// with one GPU such a payload has passed; with more it stays until [`drain`](Self::drain) has waited for all
/// of them. (Source: CUDA's description of ILLEGAL_ADDRESS and similar codes: the context cannot be used any
/// more, its memory is gone.)
pub(crate) struct Deferred<T: Copy> {
    driver: Driver,
    /// Batches, oldest first: each passes after those before it.
    queues: HashMap<Key, VecDeque<Batch<T>>>,
    /// Payloads that waited for a lost GPU.
    lost: Vec<T>,
    /// Unused events by GPU, so that a free creates none.
    spares: HashMap<i32, Vec<Event>>,
    /// How many payloads wait: they are too many to count under the lock.
    pending: usize,
    reports: Arc<Reports>,
}

/// What orders the batches of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    /// A stream; the per-thread one is another in each thread.
    Stream(StreamHandle, Option<ThreadId>),
    /// An event of the caller's, by its address, which is its own while it is held. The order of two events is unknown, so
    /// each has a queue.
    Event(usize),
}

impl Key {
    fn of(stream: &Stream) -> Self {
        let handle = stream.handle();
        let thread = (handle.raw == StreamHandle::PER_THREAD).then(|| std::thread::current().id());
        Self::Stream(handle, thread)
    }
}

/// Payloads, and the event after the work that they wait for.
struct Batch<T> {
    event: Mark,
    payloads: Vec<T>,
}

/// An event that nobody records while payloads wait for it.
enum Mark {
    Own(Event),
    Callers(Held),
}

impl Deref for Mark {
    type Target = Event;

    fn deref(&self) -> &Event {
        match self {
            Self::Own(event) => event,
            Self::Callers(event) => event,
        }
    }
}

/// The state of the work before an event.
enum WorkState {
    Done,
    /// It has not finished.
    Ahead,
    /// Its GPU is lost, and the work with it.
    Lost,
}

impl WorkState {
    fn of(done: Result<bool>) -> Result<Self> {
        match done {
            Ok(true) => Ok(Self::Done),
            Ok(false) => Ok(Self::Ahead),
            Err(Error::ContextLost { .. }) => Ok(Self::Lost),
            Err(error) => Err(error),
        }
    }
}

impl<T: Copy> Deferred<T> {
    pub(crate) fn new(driver: &Driver, reports: &Arc<Reports>) -> Self {
        Self {
            driver: driver.clone(),
            queues: HashMap::new(),
            lost: Vec::new(),
            spares: HashMap::new(),
            pending: 0,
            reports: Arc::clone(reports),
        }
    }

    /// Returns how many payloads wait.
    pub(crate) const fn pending(&self) -> usize {
        self.pending
    }

    /// Iterates over the waiting payloads, in no order.
    pub(crate) fn payloads(&self) -> impl Iterator<Item = &T> {
        let batches = self.queues.values().flatten();
        let payloads = batches.flat_map(|batch| &batch.payloads);
        payloads.chain(&self.lost)
    }

    /// Defers payloads until all work submitted to `stream` so far has run, including everything that the
    /// stream waits for: with one event for all. The stream is not needed after the call. Takes the list itself, because
    /// the caller holds a lock that a copy would hold longer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's stream, and for one that is being captured into a
    /// graph: the graph's work runs later, more than once or never. The driver's errors. The list is unchanged then, and no
    /// payload waits.
    pub(crate) fn after_stream(&mut self, stream: &Stream, payloads: &mut Vec<T>) -> Result<()> {
        let count = payloads.len();
        if count == 0 {
            return Ok(());
        }
        self.driver.expect_same(stream.driver(), "stream")?;
        let marked = match stream.is_capturing() {
            // An event recorded now would be part of the graph, and querying it would be an error.
            Ok(true) => Err(Error::invalid(
                "stream",
                "it is being captured into a graph, whose work runs when the graph is launched: \
                 free the memory after a stream that the graph was launched on",
            )),
            Ok(false) => self.record(stream),
            Err(error) => Err(error),
        };
        match marked {
            Ok(event) => {
                let queue = self.queues.entry(Key::of(stream)).or_default();
                queue.push_back(Batch {
                    event: Mark::Own(event),
                    payloads: std::mem::take(payloads),
                });
            }
            Err(Error::ContextLost { .. }) => self.lost.append(payloads),
            Err(error) => return Err(error),
        }
        self.pending += count;
        Ok(())
    }

    /// Records an event after all work submitted to `stream` so far.
    fn record(&mut self, stream: &Stream) -> Result<Event> {
        let device = stream.device();
        let spares = self.spares.entry(device).or_default();
        let event = match spares.pop() {
            Some(event) => event,
            None => Event::new(&self.driver, device, false)?,
        };
        match event.record(stream) {
            Ok(()) => Ok(event),
            Err(error) => {
                spares.push(event);
                Err(error)
            }
        }
    }

    /// Defers `payload` until the work that `event` currently marks has run. The event cannot be recorded
    /// again before then. An event that was never recorded has passed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's event, and for one of several processes. The driver's errors:
    /// CAPTURED_EVENT for an event that was recorded on a stream during a capture. The payload does not wait then.
    pub(crate) fn after_event(&mut self, event: Arc<Event>, payload: T) -> Result<()> {
        self.driver.expect_same(event.driver(), "event")?;
        // A hold does not keep another process from recording it.
        if event.is_interprocess() || event.is_imported() {
            return Err(Error::invalid(
                "event",
                "another process can record it again before the work has run: free the memory after the stream",
            ));
        }
        let key = Key::Event(Arc::as_ptr(&event).addr());
        if let Some(batch) = self.queues.get_mut(&key).and_then(VecDeque::back_mut) {
            batch.payloads.push(payload);
        } else {
            let event = event.hold();
            // Queries the event now, so that the caller gets the error if it can never pass.
            match WorkState::of(event.is_done())? {
                WorkState::Lost => self.lost.push(payload),
                WorkState::Done | WorkState::Ahead => {
                    let (event, payloads) = (Mark::Callers(event), vec![payload]);
                    let queue = self.queues.entry(key).or_default();
                    queue.push_back(Batch { event, payloads });
                }
            }
        }
        self.pending += 1;
        Ok(())
    }

    /// Adds payloads that have passed to `passed`. Never waits; queries one event of
    /// each stream, and each event given by a caller, and more only while they have passed.
    ///
    /// # Errors
    /// The driver's first error; the payloads that it concerns still wait. Payloads of other events that have
    /// passed are in `passed` anyway.
    pub(crate) fn poll(&mut self, passed: &mut Vec<T>) -> Result<()> {
        self.pass(passed, false)
    }

    /// Waits for everything and adds it to `passed`.
    ///
    /// # Errors
    /// As [`poll`](Self::poll); then some payloads still [wait](Self::pending), and a GPU may still use them.
    pub(crate) fn drain(&mut self, passed: &mut Vec<T>) -> Result<()> {
        self.pass(passed, true)
    }

    /// Moves payloads to `passed`: of each queue in order, for as long as their events have passed, or can be waited for.
    fn pass(&mut self, passed: &mut Vec<T>, waits: bool) -> Result<()> {
        if self.pending == 0 {
            return Ok(());
        }
        let _relaxed = Relaxed::new(&self.driver);
        let (passed_before, lost_before) = (passed.len(), self.lost.len());
        let mut result = Ok(());
        self.queues.retain(|_, queue| {
            while let Some(batch) = queue.front_mut() {
                let done = if waits {
                    batch.event.synchronize().map(|()| true)
                } else {
                    batch.event.is_done()
                };
                match WorkState::of(done) {
                    Ok(WorkState::Done) => passed.append(&mut batch.payloads),
                    Ok(WorkState::Lost) => self.lost.append(&mut batch.payloads),
                    Ok(WorkState::Ahead) => break,
                    Err(error) => {
                        if result.is_ok() {
                            result = Err(error);
                        }
                        break;
                    }
                }
                if let Some(batch) = queue.pop_front()
                    && let Mark::Own(event) = batch.event
                {
                    let spares = self.spares.entry(event.handle().device).or_default();
                    if spares.len() < SPARES {
                        spares.push(event);
                    }
                }
            }
            !queue.is_empty()
        });
        if self.lost.len() > lost_before {
            self.reports.add(|| {
                tracing::warn!("memory no longer waits for a GPU's work: the GPU is lost");
            });
        }
        if !self.lost.is_empty() {
            let over = if waits {
                wait_for_all_gpus(&self.driver).map(|()| true)
            } else {
                Ok(self.driver.device_count().is_ok_and(|count| count == 1))
            };
            match over {
                Ok(true) => passed.append(&mut self.lost),
                Ok(false) => {}
                Err(error) => result = result.and(Err(error)),
            }
        }
        self.pending -= passed.len() - passed_before;
        result
    }

    /// Takes all waiting payloads, to be [drained](Self::drain) while other threads go on freeing with this:
    /// the GPU may wait for them, through a host function in a stream.
    pub(crate) fn take(&mut self) -> Self {
        Self {
            driver: self.driver.clone(),
            queues: std::mem::take(&mut self.queues),
            lost: std::mem::take(&mut self.lost),
            spares: HashMap::new(),
            pending: std::mem::take(&mut self.pending),
            reports: Arc::clone(&self.reports),
        }
    }

    /// Puts back payloads that were taken and could not be drained.
    pub(crate) fn put_back(&mut self, mut taken: Self) {
        for (key, mut older) in taken.queues.drain() {
            let queue = self.queues.entry(key).or_default();
            older.append(queue);
            *queue = older;
        }
        self.lost.append(&mut taken.lost);
        self.pending += std::mem::take(&mut taken.pending);
    }
}

/// Waits: the memory may be unmapped next, and a GPU that accesses it then loses its context.
impl<T: Copy> Drop for Deferred<T> {
    fn drop(&mut self) {
        log_lost(
            "memory that a GPU may still use",
            self.drain(&mut Vec::new()),
        );
    }
}
