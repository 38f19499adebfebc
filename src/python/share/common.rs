//! The parts that both ends of shared memory have.

use std::sync::Arc;
use std::time::{Duration, Instant};

use egmem::driver::Access;
use egmem::share::{Channel, Error};
use pyo3::prelude::*;

use crate::error::invalid;

/// The offset and the length of a part; `None` for all of the memory.
pub type Window = Option<(u64, u64)>;

/// How long a wait may last before signals are looked for.
pub const SLICE: Duration = Duration::from_millis(50);

/// Parses the access of other processes.
///
/// # Errors
/// `InvalidArgument`.
pub fn mode(text: &str) -> PyResult<Access> {
    match text {
        "rw" => Ok(Access::ReadWrite),
        "r" => Ok(Access::Read),
        _ => Err(invalid(&format!("mode is {text:?}; valid: \"rw\", \"r\""))),
    }
}

/// Answers a process by a thread of its own, so that a process that is stopped delays no other. Each such thread has a clone
/// of `answering`; beyond `most` of them nothing is done, which closes the connection.
pub fn answer(answering: &Arc<()>, most: usize, answer: impl FnOnce() + Send + 'static) {
    if Arc::strong_count(answering) > most {
        return tracing::warn!("too many processes get memory at a time");
    }
    let one = Arc::clone(answering);
    let work = move || {
        answer();
        drop(one);
    };
    let thread = std::thread::Builder::new().name("egmem-answer".into());
    if let Err(error) = thread.spawn(work) {
        tracing::warn!(%error, "a process that asks for memory gets no answer");
    }
}

/// Why a ticket admits to nothing.
pub enum Refused {
    /// The process that made it does not answer: it has ended.
    Ended,
    /// Its memory was closed.
    Closed,
    /// It was used before, or is no ticket.
    Unknown,
    /// The memory could not be exported.
    Failed(String),
    /// The connection failed.
    Lost(Error),
    /// The caller stopped the wait.
    Stopped,
}

/// Waits until a message comes on a channel. `go_on` is asked between waits.
pub fn wait(
    channel: &mut Channel,
    patience: Duration,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<(), Refused> {
    let begun = Instant::now();
    while !channel.wait_for_message(SLICE).map_err(Refused::Lost)? {
        if !go_on() {
            return Err(Refused::Stopped);
        }
        if begun.elapsed() >= patience {
            let error = Error::timed_out("waiting for memory", patience);
            return Err(Refused::Lost(error));
        }
    }
    Ok(())
}
