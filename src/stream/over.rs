//! The end of work, from a driver that may refuse to tell of it.

use std::thread::sleep;
use std::time::Duration;

use crate::{Error, Result};

/// How often a driver may refuse both to wait and to tell before it counts as silent.
pub(super) const TRIES: u32 = 16;

/// What a driver says about the end of work.
#[derive(Debug)]
pub(super) struct Waited {
    /// The first refusal: the work failed, or only the wait.
    pub(super) result: Result<()>,
    /// Whether the work has ended for certain.
    pub(super) over: bool,
}

/// Waits for the end of work by `wait`, and asks by `is_done` where that is refused.
///
/// A refused wait says nothing about the work, so the wait is repeated for as long as the driver says that
/// work is still running. It gives up after some refusals of both the wait and the question. CUDA returns the
/// error of a lost context from every call from then on, and the work of such a context has ended.
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
        sleep(Duration::from_millis(1));
        last = wait();
    };
    Waited { result, over }
}
