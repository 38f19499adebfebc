//! Python's interpreter: the GIL and locks, state of this process alone, signals, and objects as programs have them.
//!
//! Python runs signal handlers in the main thread only: Ctrl-C is answered while a call there waits, except in the calls that
//! docs/python.md lists. Other threads go on waiting.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

pub use egmem::driver::PerProcess;
use egmem::exchange::blocking::Check;
use egmem::{Driver, Progress};
use pyo3::PyClass;
use pyo3::call::PyCallArgs;
use pyo3::exceptions::{PyImportError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use serde::Serialize;

use crate::error::{OrRaise, ToPy, closed, invalid};

/// Checks that the module is imported by the interpreter that imported it first: its objects are the process's, and the end of
/// another interpreter waits for ever for some of them. From Python 3.12 on Python checks that itself.
///
/// # Errors
/// `ImportError`.
pub fn expect_first() -> PyResult<()> {
    static FIRST: OnceLock<i64> = OnceLock::new();
    // SAFETY: the thread is attached, as an import is, and so it has an interpreter, which lives meanwhile.
    let own = unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) };
    match *FIRST.get_or_init(|| own) == own {
        true => Ok(()),
        false => Err(PyImportError::new_err(
            "egmem is imported by another interpreter of this process; what to do: import it in one, or use processes",
        )),
    }
}

/// Calls `work` without the GIL, and takes the GIL again if the thread had it.
///
/// A thread that waits for a GPU must not have the GIL: the GPU's work may need it, such as a host function in
/// Python.
pub fn detached(work: impl FnOnce() + Send) {
    let mut work = Some(work);
    if has_gil() {
        Python::try_attach(|py| {
            if let Some(work) = work.take() {
                py.detach(work);
            }
        });
    }
    // Without the GIL, or at the interpreter's end.
    if let Some(work) = work {
        work();
    }
}

/// Returns whether this thread has the GIL; `true` if the interpreter cannot tell.
///
/// A thread without the GIL must not take it only to release it: it may hold a lock of another library, for which a
/// thread with the GIL waits.
pub fn has_gil() -> bool {
    type Check = unsafe extern "C" fn() -> c_int;
    static CHECK: OnceLock<Option<Check>> = OnceLock::new();
    let check = CHECK.get_or_init(|| {
        // The limited API does not declare it, although the interpreters that this crate supports have it.
        // SAFETY: the name ends with a zero byte; the lookup runs no code.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"PyGILState_Check".as_ptr()) };
        // SAFETY: the symbol is Python's function of this name, with this signature since Python 3.4.
        let check = |symbol| unsafe { std::mem::transmute::<*mut c_void, Check>(symbol) };
        (!symbol.is_null()).then(|| check(symbol))
    });
    // SAFETY: the function may be called by any thread, with the GIL or without, also at the interpreter's end.
    check.is_none_or(|check| unsafe { check() } != 0)
}

/// Drops a value without the GIL: unmapping takes the driver's time.
pub fn drop_detached<T: Send>(value: T) {
    detached(|| drop(value));
}

/// Locks a mutex whose data is valid even after a holder panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The value of an object until that is closed. It is dropped without the GIL.
pub struct Open<T: Send>(Mutex<Option<T>>);

impl<T: Send> Open<T> {
    /// Holds a value.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(Some(value)))
    }

    /// Takes the value out; `None` if it was closed before.
    pub fn take(&self) -> Option<T> {
        lock(&self.0).take()
    }

    /// Returns whether the value was taken.
    pub fn is_closed(&self) -> bool {
        lock(&self.0).is_none()
    }

    /// Takes the value out and drops it.
    pub fn close(&self, py: Python<'_>) {
        let value = self.take();
        py.detach(|| drop(value));
    }

    /// Locks the value.
    pub fn lock(&self) -> MutexGuard<'_, Option<T>> {
        lock(&self.0)
    }
}

impl<T: Send + Clone> Open<T> {
    /// Returns a copy of the value; `None` if it was closed. The lock ends here: it must not be held while an exception is
    /// built, which runs Python code.
    pub fn value(&self) -> Option<T> {
        lock(&self.0).clone()
    }

    /// Returns a handle of the value, in the process that made it.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` in a forked child, where the value's locks may be held for ever.
    pub fn get(&self, what: &'static str, driver: impl FnOnce(&T) -> &Driver) -> PyResult<T> {
        let value = self.value().ok_or_else(|| closed(what))?;
        driver(&value).expect_this_process(what).or_raise()?;
        Ok(value)
    }
}

impl<T: Send> Drop for Open<T> {
    fn drop(&mut self) {
        if let Some(value) = self.take() {
            drop_detached(value);
        }
    }
}

/// The base of classes whose objects are closed at the end of a `with` block.
#[pyclass(subclass, frozen, module = "egmem", name = "_Closing")]
pub struct Closing;

#[pymethods]
impl Closing {
    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Closes. While an exception passes, an object that cannot be closed, such as memory with views, is left open, so that
    /// the exception is not hidden.
    fn __exit__(
        slf: &Bound<'_, Self>,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        match slf.call_method0("close") {
            Err(_) if !kind.is_none() => Ok(()),
            closed => closed.map(drop),
        }
    }

    fn __copy__(slf: &Bound<'_, Self>) -> PyResult<()> {
        not_copied(slf)
    }

    fn __deepcopy__(slf: &Bound<'_, Self>, _memo: &Bound<'_, PyAny>) -> PyResult<()> {
        not_copied(slf)
    }
}

/// Refuses a copy by the module `copy`, which would otherwise pickle the object for this process.
///
/// # Errors
/// `TypeError`.
pub fn not_copied(object: &Bound<'_, PyAny>) -> PyResult<()> {
    let name = object.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "egmem.{name} is not copied by the module copy; what to do: use the object itself, or pickle it for another \
         process; of memory copy_to(other) copies the bytes to other memory, and read() to a bytes object"
    )))
}

/// Returns the initial value of an object of a class that extends [`Closing`].
pub fn closing<T: PyClass<BaseType = Closing>>(value: T) -> PyClassInitializer<T> {
    PyClassInitializer::from(Closing).add_subclass(value)
}

/// Makes the object of a value.
///
/// # Errors
/// Python's.
pub fn object<T: PyClass>(
    py: Python<'_>,
    value: impl Into<PyClassInitializer<T>>,
) -> PyResult<Bound<'_, PyAny>> {
    Ok(Bound::new(py, value)?.into_any())
}

/// Makes an object of a class in `egmem._records`.
///
/// # Errors
/// Python's.
pub fn record<'py>(
    py: Python<'py>,
    class: &str,
    values: impl PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    call(py, "egmem._records", class, values)
}

/// Returns a class of `egmem._records`.
///
/// # Errors
/// `ImportError` late in the interpreter's shutdown.
pub fn record_class<'py>(py: Python<'py>, class: &str) -> PyResult<Bound<'py, PyAny>> {
    python(py, || py.import("egmem._records")?.getattr(class))
}

/// Returns a value as Python's dictionaries and lists, by way of JSON.
///
/// # Errors
/// None in practice: all values passed here have a form in JSON.
pub fn to_python<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(|error| invalid(&error.to_string()))?;
    call(py, "json", "loads", (text,))
}

/// Calls a function of a module in Python. The caller has no lock.
///
/// # Errors
/// Its exception; `ImportError` late in the interpreter's shutdown.
pub fn call<'py>(
    py: Python<'py>,
    module: &str,
    function: &str,
    arguments: impl PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    python(py, || {
        py.import(module)?.getattr(function)?.call1(arguments)
    })
}

/// The code of Python that this crate's calls run in a process.
#[derive(Default)]
struct Runs {
    count: usize,
    /// The thread that ends the interpreter, and since when, once it does.
    ends: Option<(ThreadId, Instant)>,
}

static RUNS: PerProcess<(Mutex<Runs>, Condvar)> = PerProcess::new();

/// How long the interpreter's end waits for code of Python's in other threads.
const END: Duration = Duration::from_secs(5);

thread_local! {
    /// The runs that this thread is in: code of Python's calls this crate, which runs code again.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Counts a run of code, and its end when it is dropped.
struct Run(&'static (Mutex<Runs>, Condvar));

impl Run {
    /// Begins a run. While the interpreter ends, a thread other than the one that ends it waits, unless it is in a run, for which
    /// the end waits: for ever from then on that it asks for the GIL, because PyO3 holds it there. A program may call the functions
    /// of its end and go on, and so does the thread then.
    fn begin(py: Python<'_>) -> Self {
        let runs = RUNS.get(|_| Default::default());
        let here = thread::current().id();
        loop {
            let mut state = lock(&runs.0);
            match state.ends {
                Some((ends, since))
                    if ends != here && DEPTH.get() == 0 && since.elapsed() < 2 * END => {}
                _ => {
                    state.count += 1;
                    DEPTH.set(DEPTH.get() + 1);
                    return Self(runs);
                }
            }
            drop(state);
            py.detach(|| thread::sleep(SLICE));
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        lock(&self.0.0).count -= 1;
        self.0.1.notify_all();
    }
}

/// Runs code of Python's. While the interpreter ends, Python before 3.14 ends a daemon thread that asks for the GIL by
/// unwinding its stack, which ends the process where a function of this crate is in between. So the end waits for such code,
/// and no thread begins it any more. The caller has no lock.
pub fn python<T>(py: Python<'_>, code: impl FnOnce() -> T) -> T {
    let _run = Run::begin(py);
    code()
}

/// Waits until no other thread runs code of Python's that this crate's functions call, but not for ever, and lets none begin.
#[pyfunction]
#[pyo3(name = "_end_runs")]
pub fn end_runs(py: Python<'_>) {
    py.detach(|| {
        let (state, ended) = RUNS.get(|_| Default::default());
        let mut state = lock(state);
        state.ends = Some((thread::current().id(), Instant::now()));
        drop(ended.wait_timeout_while(state, END, |state| state.count > 0));
    });
}

/// How often a wait runs Python's signal handlers.
pub const SLICE: Duration = Duration::from_millis(50);
/// How long a wait for a GPU asks without pauses: most copies end meanwhile.
const BUSY: Duration = Duration::from_millis(1);
/// The longest pause between two questions.
const PAUSE: Duration = Duration::from_millis(1);

thread_local! {
    /// The exception with which Python broke off this thread's call.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// The function that this thread's call of [`told`] has, which may be none.
    static TOLD: RefCell<Option<Option<Py<PyAny>>>> = const { RefCell::new(None) };
}

/// Calls Python, which breaks a call of [`interruptible`] off if it raises. At the interpreter's end nothing is called.
pub fn goes_on(call: impl FnOnce(Python<'_>) -> PyResult<()>) -> ControlFlow<()> {
    match Python::try_attach(call) {
        Some(Err(error)) => {
            RAISED.set(Some(error));
            ControlFlow::Break(())
        }
        _ => ControlFlow::Continue(()),
    }
}

/// Returns the check of clients whose calls are made by [`interruptible`].
pub fn check() -> Check {
    Arc::new(|| goes_on(|py| py.check_signals()))
}

/// Runs Python's signal handlers, for a wait without the GIL.
///
/// # Errors
/// The exception of a handler.
pub fn signals() -> PyResult<()> {
    Python::try_attach(|py| py.check_signals()).unwrap_or(Ok(()))
}

/// Runs `work` without the GIL.
///
/// # Errors
/// The exception with which Python broke it off; otherwise the error of `work`.
pub fn interruptible<T: Send, E: ToPy + Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T> {
    RAISED.take();
    let done = py.detach(work);
    match RAISED.take() {
        Some(error) => {
            py.detach(|| drop(done));
            Err(error)
        }
        None => done.or_raise(),
    }
}

/// Asks until there is an answer, without the GIL. The caller can stop waiting at any time: what is waited for goes on.
///
/// # Errors
/// The exception of a signal handler.
pub fn until<T: Send>(py: Python<'_>, mut ask: impl FnMut() -> Option<T> + Send) -> PyResult<T> {
    let begun = Instant::now();
    loop {
        let slice = Instant::now() + SLICE;
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

/// Runs `work` without the GIL. The function that it gets runs signal handlers and calls `progress(done, total)`, and breaks
/// if Python raises there; `work` must call it with no lock held. It calls nothing in another thread: no other one takes
/// the GIL for it, which would end the process at the interpreter's end.
///
/// # Errors
/// The exception that Python raised; otherwise the error of `work`.
pub fn told<T: Send, E: ToPy + Send>(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(fn(Progress) -> ControlFlow<()>) -> Result<T, E> + Send,
) -> PyResult<T> {
    // The function may make such a call itself.
    let outer = TOLD.replace(Some(progress.map(|progress| progress.clone().unbind())));
    let done = interruptible(py, || work(tell));
    TOLD.set(outer);
    done
}

fn tell(made: Progress) -> ControlFlow<()> {
    let Some(progress) = TOLD.take() else {
        return ControlFlow::Continue(()); // another thread's
    };
    // The interpreter runs handlers itself when the call is over.
    let is_over = progress.is_none() && made.done == made.total;
    let told = match is_over {
        true => ControlFlow::Continue(()),
        false => goes_on(|py| {
            py.check_signals()?;
            match &progress {
                Some(progress) => {
                    python(py, || progress.call1(py, (made.done, made.total)).map(drop))
                }
                None => Ok(()),
            }
        }),
    };
    TOLD.set(Some(progress));
    told
}
