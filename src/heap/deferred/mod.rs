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
//! Many blocks that are freed at once need one event: [`Deferred::after_stream_all`].

mod deferral;
mod queue;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::thread::ThreadId;

pub(crate) use self::deferral::Deferral;
use self::queue::{Batch, Fate, Queue, Spares, fate};
use crate::driver::{Driver, Relaxed, StreamHandle};
use crate::stream::{Event, Held, Stream};
use crate::teardown::log_lost;
use crate::{Error, Result};

/// `CU_STREAM_PER_THREAD`
pub(super) const PER_THREAD: u64 = 2;

/// A stream, as far as it orders work.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key(StreamHandle, Option<ThreadId>);

impl Key {
    fn of(stream: &Stream) -> Self {
        let handle = stream.handle();
        let thread = (handle.raw == PER_THREAD).then(|| std::thread::current().id());
        Self(handle, thread)
    }
}

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
    streams: HashMap<Key, Queue<T>>,
    /// Waiting payloads by event address. Their order is unknown, so each event is queried.
    events: HashMap<usize, Waiting<T>>,
    /// Payloads that waited for a lost GPU.
    lost: Vec<T>,
    spares: Spares<T>,
    /// How many payloads wait: they are too many to count under the lock.
    pending: usize,
}

struct Waiting<T> {
    event: Held,
    payloads: Vec<T>,
}

impl<T: Copy> Deferred<T> {
    pub(crate) fn new(driver: &Driver) -> Self {
        Self {
            driver: driver.clone(),
            streams: HashMap::new(),
            events: HashMap::new(),
            lost: Vec::new(),
            spares: Spares::new(),
            pending: 0,
        }
    }

    /// Returns how many payloads wait.
    pub(crate) const fn pending(&self) -> usize {
        self.pending
    }

    /// Iterates over the waiting payloads, in no order.
    pub(crate) fn payloads(&self) -> impl Iterator<Item = &T> {
        let by_stream = self.streams.values().flatten();
        let by_stream = by_stream.flat_map(|batch| &batch.payloads);
        let by_event = self.events.values().flat_map(|waiting| &waiting.payloads);
        by_stream.chain(by_event).chain(&self.lost)
    }

    /// Defers `payload` until all work submitted to `stream` so far has run, including everything that the
    /// stream waits for. The stream is not needed after the call.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's stream, and for one that is being captured into a
    /// graph: the graph's work runs later, more than once or never. The driver's errors. The payload does not wait then.
    pub(crate) fn after_stream(&mut self, stream: &Stream, payload: T) -> Result<()> {
        self.add(stream, 1, |list| list.push(payload))
    }

    /// As [`after_stream`](Self::after_stream) for many payloads, with one event for all. Takes the list itself, because
    /// the caller holds a lock that a copy would hold longer, and leaves another list for the caller to drop.
    ///
    /// # Errors
    /// As [`after_stream`](Self::after_stream). The list is then unchanged.
    pub(crate) fn after_stream_all(
        &mut self,
        stream: &Stream,
        payloads: &mut Vec<T>,
    ) -> Result<()> {
        let count = payloads.len();
        if count == 0 {
            return Ok(());
        }
        self.add(stream, count, |list| match list.is_empty() {
            true => std::mem::swap(list, payloads),
            false => list.append(payloads), // to those of a lost GPU
        })
    }

    /// Lets `put` add `count` payloads to the list of those that wait for the stream's work so far.
    fn add(&mut self, stream: &Stream, count: usize, put: impl FnOnce(&mut Vec<T>)) -> Result<()> {
        match self.mark(stream)? {
            Some(mut batch) => {
                put(&mut batch.payloads);
                let queue = self.streams.entry(Key::of(stream)).or_default();
                queue.push_back(batch);
            }
            None => put(&mut self.lost),
        }
        self.pending += count;
        Ok(())
    }

    /// Records an event after all work on `stream`; returns `None` if the GPU is lost.
    fn mark(&mut self, stream: &Stream) -> Result<Option<Batch<T>>> {
        self.driver.expect_same(stream.driver(), "stream")?;
        let marked = match stream.is_capturing() {
            // An event recorded now would be part of the graph, and querying it would be an error.
            Ok(true) => Err(Error::invalid(
                "stream",
                "it is being captured into a graph, whose work runs when the graph is launched: \
                 free the memory after a stream that the graph was launched on",
            )),
            Ok(false) => self.spares.record(&self.driver, stream),
            Err(error) => Err(error),
        };
        match marked {
            Ok(batch) => Ok(Some(batch)),
            Err(Error::ContextLost { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Defers `payload` until the work that `event` currently marks has run. The event cannot be recorded
    /// again before then. An event that was never recorded has passed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's event. The driver's errors: CAPTURED_EVENT for an
    /// event that was recorded on a stream during a capture. The payload does not wait then.
    pub(crate) fn after_event(&mut self, event: Arc<Event>, payload: T) -> Result<()> {
        self.driver.expect_same(event.driver(), "event")?;
        let key = Arc::as_ptr(&event).addr();
        if let Some(waiting) = self.events.get_mut(&key) {
            waiting.payloads.push(payload);
        } else {
            let event = event.hold();
            // Queries the event now, so that the caller gets the error if it can never pass.
            let relaxed = Relaxed::new(&self.driver);
            let fate = fate(event.is_done());
            drop(relaxed);
            match fate? {
                Fate::Lost => self.lost.push(payload),
                Fate::Done | Fate::Ahead => {
                    let payloads = vec![payload];
                    self.events.insert(key, Waiting { event, payloads });
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
        if self.pending == 0 {
            return Ok(());
        }
        let before = passed.len();
        let result = self.go_through(passed, Event::is_done);
        if !self.lost.is_empty() && self.driver.device_count().is_ok_and(|count| count == 1) {
            passed.append(&mut self.lost);
        }
        self.pending -= passed.len() - before;
        result
    }

    /// Waits for everything and adds it to `passed`.
    ///
    /// # Errors
    /// As [`poll`](Self::poll); then some payloads still [wait](Self::pending), and a GPU may still use them.
    pub(crate) fn drain(&mut self, passed: &mut Vec<T>) -> Result<()> {
        if self.pending == 0 {
            return Ok(());
        }
        let before = passed.len();
        let mut result = self.go_through(passed, |event| event.synchronize().map(|()| true));
        if !self.lost.is_empty() {
            match self.wait_for_all_gpus() {
                Ok(()) => passed.append(&mut self.lost),
                Err(error) => result = result.and(Err(error)),
            }
        }
        self.pending -= passed.len() - before;
        result
    }

    /// Takes all waiting payloads, to be [drained](Self::drain) while other threads go on freeing with this:
    /// the GPU may wait for them, through a host function in a stream.
    pub(crate) fn take(&mut self) -> Self {
        let rest = Self::new(&self.driver);
        let mut taken = std::mem::replace(self, rest);
        std::mem::swap(&mut self.spares, &mut taken.spares);
        taken
    }

    /// Puts back payloads that were taken and could not be drained.
    pub(crate) fn put_back(&mut self, mut taken: Self) {
        for (key, mut older) in taken.streams.drain() {
            let queue = self.streams.entry(key).or_default();
            older.append(queue);
            *queue = older;
        }
        for (key, older) in taken.events.drain() {
            match self.events.entry(key) {
                Entry::Occupied(mut entry) => entry.get_mut().payloads.extend(older.payloads),
                Entry::Vacant(entry) => {
                    entry.insert(older);
                }
            }
        }
        self.lost.append(&mut taken.lost);
        self.pending += std::mem::take(&mut taken.pending);
    }

    /// Queries the events, each stream's in order, for as long as they have passed.
    fn go_through(
        &mut self,
        passed: &mut Vec<T>,
        ask: impl Fn(&Event) -> Result<bool>,
    ) -> Result<()> {
        let _relaxed = Relaxed::new(&self.driver);
        let lost_before = self.lost.len();
        let mut result = Ok(());
        // Moves the payloads of an event that has passed, and returns whether it has.
        let mut settle = |event: &Event, payloads: &mut Vec<T>| {
            match fate(ask(event)) {
                Ok(Fate::Done) => passed.append(payloads),
                Ok(Fate::Lost) => self.lost.append(payloads),
                Ok(Fate::Ahead) => return false,
                Err(error) => {
                    if result.is_ok() {
                        result = Err(error);
                    }
                    return false;
                }
            }
            true
        };
        self.streams.retain(|key, queue| {
            while let Some(batch) = queue.front_mut()
                && settle(&batch.event, &mut batch.payloads)
                && let Some(batch) = queue.pop_front()
            {
                self.spares.put(key.0.device, batch);
            }
            !queue.is_empty()
        });
        self.events
            .retain(|_, waiting| !settle(&waiting.event, &mut waiting.payloads));
        if self.lost.len() > lost_before {
            tracing::warn!("memory no longer waits for a GPU's work: the GPU is lost");
        }
        result
    }

    fn wait_for_all_gpus(&self) -> Result<()> {
        let _relaxed = Relaxed::new(&self.driver);
        for device in 0..self.driver.device_count()? {
            if let Err(error) = self.driver.ctx_synchronize(device)
                && !matches!(error, Error::ContextLost { .. })
            {
                return Err(error);
            }
        }
        Ok(())
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
