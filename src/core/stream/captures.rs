//! Tasks that wait until streams are no longer captured into CUDA graphs: frees, above all.
//!
//! A free on a captured stream is refused and makes the capture invalid, and so does an event between a captured stream and
//! another. No call tells of a capture's end, so the calls that are likely to follow it ask: see [`run_due`].

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::Stream;
use crate::per_driver::{PerDriver, lock};
use crate::{Driver, Error};

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

impl Waiting {
    fn is_due(&self) -> bool {
        !self.streams.iter().any(Stream::may_be_captured)
    }
}

impl Stream {
    /// Returns whether the stream may be captured into a graph, as far as the driver says. Nothing runs any more on a GPU
    /// whose context is lost.
    pub fn may_be_captured(&self) -> bool {
        // A refusal that may pass is tried once more.
        match self.is_capturing().or_else(|_| self.is_capturing()) {
            Ok(is_captured) => is_captured,
            Err(error) => !matches!(error, Error::ContextLost { .. }),
        }
    }
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
    let due: Vec<Waiting> = lock(&waiting)
        .extract_if(.., |waiting| waiting.is_due())
        .collect();
    COUNT.fetch_sub(due.len(), Relaxed);
    for Waiting { task, .. } in due {
        task();
    }
}
