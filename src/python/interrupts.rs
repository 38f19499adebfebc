//! Waits that Python's signal handlers break off: Ctrl-C is answered while a call waits.
//!
//! Python runs handlers in the main thread only. Other threads go on waiting.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use egmem::Progress;
use egmem::exchange::Error;
use egmem::exchange::blocking::Check;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::error::{OrRaise, ToPy};
use crate::gil::lock;

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

/// Runs `work` without the GIL. The function that it gets checks signals and calls `progress(done, total)`; `work`
/// must call it with no lock held. If Python raises there, the function breaks.
///
/// # Errors
/// The exception that Python raised; otherwise the error of `work`.
pub fn told<T: Send, E: ToPy + Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&mut dyn FnMut(Progress) -> ControlFlow<()>) -> Result<T, E> + Send,
) -> PyResult<T> {
    let mut calls = Calls::of(progress);
    let done = py.detach(|| work(&mut |made| calls.tell(made)));
    calls.result(done)
}

/// As [`told`], for growth that another thread continues when `work` is over. The function is called in this thread
/// alone: no other one takes the GIL for it, which would end the process at the interpreter's end.
///
/// # Errors
/// As `told`.
pub fn told_at_first<T: Send, E: ToPy + Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(Box<dyn FnMut(Progress) -> ControlFlow<()> + Send>) -> Result<T, E> + Send,
) -> PyResult<T> {
    // `None` outside of a call, and when `work` is over: the other thread drops no Python object.
    let calls = Arc::new(Mutex::new(Some(Calls::of(progress))));
    let (of_function, caller) = (Arc::clone(&calls), thread::current().id());
    let tell = move |made| {
        if thread::current().id() != caller {
            return ControlFlow::Continue(());
        }
        let Some(mut calls) = lock(&of_function).take() else {
            return ControlFlow::Continue(());
        };
        let goes_on = calls.tell(made);
        *lock(&of_function) = Some(calls);
        goes_on
    };
    let done = py.detach(|| work(Box::new(tell)));
    let calls = lock(&calls).take();
    match calls {
        Some(calls) => calls.result(done),
        None => done.or_raise(),
    }
}

/// Calls of a function, until one raises.
struct Calls {
    progress: Option<Py<PyAny>>,
    raised: Option<PyErr>,
}

impl Calls {
    fn of(progress: Option<&Bound<'_, PyAny>>) -> Self {
        Self {
            progress: progress.map(|progress| progress.clone().unbind()),
            raised: None,
        }
    }

    fn tell(&mut self, made: Progress) -> ControlFlow<()> {
        // The interpreter checks signals itself when the call is over.
        if self.progress.is_none() && made.done == made.total {
            return ControlFlow::Continue(());
        }
        let told = Python::attach(|py| {
            py.check_signals()?;
            match &self.progress {
                Some(progress) => progress.call1(py, (made.done, made.total)).map(drop),
                None => Ok(()),
            }
        });
        match told {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.raised = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    fn result<T, E: ToPy>(self, done: Result<T, E>) -> PyResult<T> {
        match self.raised {
            Some(error) => Err(error),
            None => done.or_raise(),
        }
    }
}
