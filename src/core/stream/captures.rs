//! Tasks that wait until streams are no longer captured into CUDA graphs: frees, above all.
//!
//! A free on a captured stream is refused and makes the capture invalid, and so does an event between a captured stream and
//! another. No call tells of a capture's end, so the calls that are likely to follow it ask: see [`run_due`].

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::Stream;
use crate::Driver;
use crate::driver::{Code, StreamHandle};
use crate::per_driver::{PerDriver, lock};

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

/// Which streams may be captured: the driver is asked once for each.
#[derive(Default)]
struct Asked(Vec<(StreamHandle, bool)>);

impl Asked {
    fn may_be_captured(&mut self, stream: &Stream) -> bool {
        let handle = stream.handle();
        if let Some((_, answer)) = self.0.iter().find(|(asked, _)| *asked == handle) {
            return *answer;
        }
        let answer = stream.may_be_captured();
        self.0.push((handle, answer));
        answer
    }

    fn is_due(&mut self, waiting: &Waiting) -> bool {
        !waiting
            .streams
            .iter()
            .any(|stream| self.may_be_captured(stream))
    }
}

impl Stream {
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
    let mut asked = Asked::default();
    let due: Vec<Waiting> = lock(&waiting)
        .extract_if(.., |waiting| asked.is_due(waiting))
        .collect();
    COUNT.fetch_sub(due.len(), Relaxed);
    for Waiting { task, .. } in due {
        task();
    }
}
