//! Progress of long growth, reported to Python.

use std::ops::ControlFlow;

use egmem::Progress;
use pyo3::prelude::*;

use crate::error::OrRaise;

/// Runs `work` without the GIL. The function that it gets checks signals and calls `progress(done, total)`; `work`
/// must call it with no lock held. If Python raises there, the function breaks.
///
/// # Errors
/// The exception that Python raised; otherwise the error of `work`.
pub fn told<T: Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(&mut dyn FnMut(Progress) -> ControlFlow<()>) -> egmem::Result<T> + Send,
) -> PyResult<T> {
    let progress = progress.map(|progress| progress.clone().unbind());
    let mut raised = None;
    let done = py.detach(|| {
        work(&mut |made| {
            let tell = |py: Python<'_>| {
                py.check_signals()?;
                match &progress {
                    Some(progress) => progress.call1(py, (made.done, made.total)).map(drop),
                    None => Ok(()),
                }
            };
            // The interpreter checks signals itself when the call is over.
            if progress.is_none() && made.done == made.total {
                return ControlFlow::Continue(());
            }
            match Python::attach(tell) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    raised = Some(error);
                    ControlFlow::Break(())
                }
            }
        })
    });
    match raised {
        Some(error) => Err(error),
        None => done.or_raise(),
    }
}
