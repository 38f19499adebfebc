//! One stream's payloads in order, and the events between them.

use std::collections::{HashMap, VecDeque};

use crate::driver::Driver;
use crate::stream::{Event, Stream};
use crate::{Error, Result};

/// How many events of a GPU are kept for later frees; more are destroyed.
const SPARES: usize = 256;

/// The most payloads that a spare list keeps capacity for.
const ROOM: usize = 16;

/// A stream's batches, oldest first.
pub(super) type Queue<T> = VecDeque<Batch<T>>;

/// Payloads, and the event after the work that they wait for.
pub(super) struct Batch<T> {
    pub(super) event: Event,
    pub(super) payloads: Vec<T>,
}

/// The state of the work before an event.
pub(super) enum Fate {
    Done,
    /// It has not finished.
    Ahead,
    /// Its GPU is lost, and the work with it.
    Lost,
}

pub(super) fn fate(done: Result<bool>) -> Result<Fate> {
    match done {
        Ok(true) => Ok(Fate::Done),
        Ok(false) => Ok(Fate::Ahead),
        Err(Error::ContextLost { .. }) => Ok(Fate::Lost),
        Err(error) => Err(error),
    }
}

/// Unused events by GPU, with empty lists, so that a free creates neither.
pub(super) struct Spares<T>(HashMap<i32, Vec<Batch<T>>>);

impl<T> Spares<T> {
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    /// Records an event after all work submitted to `stream` so far; returns a batch without payloads.
    pub(super) fn record(&mut self, driver: &Driver, stream: &Stream) -> Result<Batch<T>> {
        let device = stream.device();
        let spare = self.0.get_mut(&device).and_then(Vec::pop);
        let batch = match spare {
            Some(batch) => batch,
            None => Batch {
                event: Event::new(driver, device, false)?,
                payloads: Vec::new(),
            },
        };
        match batch.event.record(stream) {
            Ok(()) => Ok(batch),
            Err(error) => {
                self.put(device, batch);
                Err(error)
            }
        }
    }

    /// Keeps an emptied batch for reuse.
    pub(super) fn put(&mut self, device: i32, mut batch: Batch<T>) {
        batch.payloads.clear();
        batch.payloads.shrink_to(ROOM);
        let spares = self.0.entry(device).or_default();
        if spares.len() < SPARES {
            spares.push(batch);
        }
    }
}
