//! Waits that Python's signal handlers break off: Ctrl-C is answered while a call waits.
//!
//! Python runs handlers in the main thread only. Other threads go on waiting.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use egmem::exchange::Error;
use egmem::exchange::blocking::Check;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::error::OrRaise;

/// How often a wait for a GPU runs Python's signal handlers.
const CHECK: Duration = Duration::from_millis(50);
/// How long a wait for a GPU asks without pauses: most copies end meanwhile.
const BUSY: Duration = Duration::from_millis(1);
/// The longest pause between two questions.
const PAUSE: Duration = Duration::from_millis(1);

thread_local! {
    /// The exception with which a handler broke this thread's wait off.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Returns the check of clients whose calls are made by [`waiting`].
pub fn check() -> Check {
    Arc::new(|| {
        // At the interpreter's end no handler runs.
        match Python::try_attach(|py| py.check_signals()) {
            Some(Err(error)) => {
                RAISED.set(Some(error));
                ControlFlow::Break(())
            }
            _ => ControlFlow::Continue(()),
        }
    })
}

/// Runs calls of a client without the GIL.
///
/// # Errors
/// The exception of a signal handler; otherwise the error of the calls.
pub fn waiting<T: Send>(
    py: Python<'_>,
    calls: impl FnOnce() -> Result<T, Error> + Send,
) -> PyResult<T> {
    match py.detach(calls) {
        Err(Error::Interrupted) => Err(RAISED
            .take()
            .unwrap_or_else(|| PyKeyboardInterrupt::new_err(()))),
        done => done.or_raise(),
    }
}

/// Asks until there is an answer, without the GIL. The caller can stop waiting at any time: what is waited for goes on.
///
/// # Errors
/// The exception of a signal handler.
pub fn until<T: Send>(py: Python<'_>, mut ask: impl FnMut() -> Option<T> + Send) -> PyResult<T> {
    let begun = Instant::now();
    loop {
        let slice = Instant::now() + CHECK;
        let answer = py.detach(|| {
            loop {
                let answer = ask();
                if answer.is_some() || Instant::now() >= slice {
                    return answer;
                }
                match begun.elapsed() {
                    elapsed if elapsed < BUSY => thread::yield_now(),
                    elapsed => thread::sleep((elapsed / 16).min(PAUSE)),
                }
            }
        });
        match answer {
            Some(answer) => return Ok(answer),
            None => py.check_signals()?,
        }
    }
}
