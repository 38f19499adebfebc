//! Marks behind work on a stream: events, which are reused.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::ThreadId;

use super::{Event, Stream};
use crate::Result;
use crate::per_driver::lock;

/// How many events a stream keeps for later marks; the rest are destroyed.
const SPARES: usize = 64;

/// `CU_STREAM_PER_THREAD`: one handle for another stream in each thread.
const PER_THREAD: u64 = 2;

/// The events of one stream.
#[derive(Debug)]
pub(super) struct Marks {
    /// Identifies the stream: addresses and handles are reused.
    stream: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    spares: Vec<Event>,
    recorded: u64,
}

/// A stream, as far as it orders work.
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

impl Marks {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            stream: NEXT.fetch_add(1, Relaxed),
            state: Mutex::new(State {
                spares: Vec::new(),
                recorded: 0,
            }),
        }
    }
}

impl Stream {
    /// Returns an event for [`mark`](Self::mark): a spare one, or a new one.
    ///
    /// # Errors
    /// The driver's errors.
    pub(super) fn spare_event(&self) -> Result<Event> {
        let spare = lock(&self.0.marks.state).spares.pop();
        match spare {
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
        let thread = per_thread.then(|| std::thread::current().id());
        // Held while the event is recorded, so that the numbers are in the stream's order.
        let mut state = lock(&self.0.marks.state);
        event.record(self)?;
        state.recorded += 1;
        Ok(Mark {
            event: Arc::new(event),
            place: (Order(self.0.marks.stream, thread), state.recorded),
        })
    }

    /// Keeps the event of a mark whose work has ended, unless another thread still queries it.
    pub(super) fn keep_event(&self, mark: Mark) {
        let Ok(event) = Arc::try_unwrap(mark.event) else {
            return;
        };
        // Does not wait for the lock: a thread that records waits for the GPU if the stream is full.
        let mut state = match self.0.marks.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if state.spares.len() < SPARES {
            state.spares.push(event);
        }
    }
}
