//! Progress of long growth, reported to Python.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::thread;

use egmem::Progress;
use pyo3::prelude::*;

use crate::error::{OrRaise, ToPy};
use crate::locks::lock;

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
