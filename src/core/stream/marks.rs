//! Marks behind work on a stream: events, which are reused.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::ThreadId;

use super::event::Event;
use crate::Result;
use crate::per_driver::lock;

/// How many events a stream keeps for later marks; the rest are destroyed.
const SPARES: usize = 64;

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

    /// Returns a spare event, if there is one.
    pub(super) fn spare(&self) -> Option<Event> {
        lock(&self.state).spares.pop()
    }

    /// Numbers the mark that `record` sets: `event` behind everything submitted to the stream so far. If
    /// `per_thread`, each thread has a stream of its own behind the same handle.
    ///
    /// # Errors
    /// Those of `record`.
    pub(super) fn mark(
        &self,
        event: Event,
        per_thread: bool,
        record: impl FnOnce(&Event) -> Result<()>,
    ) -> Result<Mark> {
        let thread = per_thread.then(|| std::thread::current().id());
        // Held while the event is recorded, so that the numbers are in the stream's order.
        let mut state = lock(&self.state);
        record(&event)?;
        state.recorded += 1;
        Ok(Mark {
            event: Arc::new(event),
            place: (Order(self.stream, thread), state.recorded),
        })
    }

    /// Keeps the event of a mark whose work has ended, unless another thread still queries it.
    pub(super) fn keep(&self, mark: Mark) {
        if let Ok(event) = Arc::try_unwrap(mark.event) {
            self.put(event);
        }
    }

    /// Keeps an event that nothing needs where it is.
    pub(super) fn put(&self, event: Event) {
        // Does not wait for the lock: a thread that records waits for the GPU if the stream is full.
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if state.spares.len() < SPARES {
            state.spares.push(event);
        }
    }
}
