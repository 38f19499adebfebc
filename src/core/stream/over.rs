//! The end of work, with a driver that may refuse to report it.

use std::thread::sleep;
use std::time::Duration;

use crate::{Error, Result};

/// How often a driver may refuse both the wait and the query before it counts as silent.
pub(super) const TRIES: u32 = 16;
/// How long after one refusal the driver is asked again.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// The driver's answer about the end of work.
#[derive(Debug)]
#[must_use = "the work may still run"]
pub struct Waited {
    /// The driver's first error: of the work, or only of the wait.
    pub result: Result<()>,
    /// Whether the work has certainly ended.
    pub over: bool,
}

/// Waits for the end of work with `wait`, and queries it with `is_done` if the wait is refused.
///
/// A refused wait says nothing about the work, so the wait is repeated while the driver says that work is
/// still running. Gives up after some refusals of both the wait and the query. CUDA returns the error of a
/// lost context from every later call, and the work of such a context has ended.
pub(super) fn wait(wait: impl Fn() -> Result<()>, is_done: impl Fn() -> Result<bool>) -> Waited {
    let result = wait();
    let mut last = result.clone();
    let mut refusals = 0;
    let over = loop {
        let Err(error) = &last else { break true };
        if matches!(error, Error::ContextLost { .. }) {
            break true;
        }
        if refusals == TRIES {
            break false;
        }
        tracing::warn!(%error, "waiting for GPU work is refused: trying once more");
        match is_done() {
            Ok(true) => break true,
            Ok(false) => {}
            Err(_) => refusals += 1,
        }
        sleep(PAUSE);
        last = wait();
    };
    Waited { result, over }
}
