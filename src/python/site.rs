//! The line of the Python program that allocates, for the ledger.

use egmem::ledger::{self, CallSite};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

/// Calls `work`, whose allocations have the line of the program in the ledger: that of the first Python frame outside of
/// this package, with the stack if `EGMEM_BACKTRACES` asks for it. A heap's chunks have the line that made the heap.
///
/// A thread without such a frame, as other libraries start, has no line.
pub fn from_program<T>(py: Python<'_>, work: impl FnOnce() -> T) -> T {
    ledger::called_from(line(py).ok().flatten(), work)
}

/// Returns the line; `None` if all frames are the package's.
///
/// # Errors
/// Python's, for a thread without frames.
fn line(py: Python<'_>) -> PyResult<Option<CallSite>> {
    static CURRENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let current = || py.import("sys")?.getattr("_getframe").map(Bound::unbind);
    // A native function has no frame of its own.
    let mut frame = CURRENT.get_or_try_init(py, current)?.bind(py).call0()?;
    while is_own(&frame)? {
        frame = frame.getattr(intern!(py, "f_back"))?;
        if frame.is_none() {
            return Ok(None);
        }
    }
    let code = frame.getattr(intern!(py, "f_code"))?;
    let file: String = code.getattr(intern!(py, "co_filename"))?.extract()?;
    let function: String = code.getattr(intern!(py, "co_name"))?.extract()?;
    // Python 3.11 has no line for a frame whose code was changed.
    let number: Option<u32> = frame.getattr(intern!(py, "f_lineno"))?.extract()?;
    let site = CallSite::new(file, number.unwrap_or(0)).function(function);
    Ok(Some(match ledger::captures_backtraces() {
        true => site.backtrace(&stack(&frame)?),
        false => site,
    }))
}

/// Returns whether a frame is of the package `egmem`.
fn is_own(frame: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = frame.py();
    let globals = frame.getattr(intern!(py, "f_globals"))?;
    let name = globals
        .cast::<PyDict>()?
        .get_item(intern!(py, "__name__"))?;
    let name: Option<String> = name.and_then(|name| name.extract().ok());
    Ok(name.is_some_and(|name| {
        let rest = name.strip_prefix("egmem");
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }))
}

/// Returns a frame and its callers as text, the outermost first, as tracebacks show them.
fn stack(frame: &Bound<'_, PyAny>) -> PyResult<String> {
    let traceback = frame.py().import("traceback")?;
    let frames: Vec<String> = traceback
        .call_method1("format_stack", (frame,))?
        .extract()?;
    Ok(frames.concat())
}
