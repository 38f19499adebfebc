//! `egmem.kv.Events`: which keys come and go, in a queue.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use egmem::driver::Driver;
use egmem::kv::{self, TierEventKind};
use pyo3::exceptions::{PyKeyboardInterrupt, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::timeout_of;
use crate::error::{OrRaise, closed};
use crate::interpreter::{Closing, Open, SLICE, drop_detached, lock, python};

/// A change of keys that one call made.
#[pyclass(frozen, get_all, module = "egmem.kv")]
pub struct TierEvent {
    /// The event's place in the order of the changes. The events since a subscription have consecutive numbers.
    number: u64,
    /// The change: `"stored"` by a commit, `"evicted"` for other keys, `"removed"` by `remove`, or `"damaged"`: found with
    /// other bytes than were committed (`verify`).
    kind: &'static str,
    /// The group of the keys.
    group: u32,
    /// The keys, as `Tier.keys` returns them.
    keys: Vec<Py<PyBytes>>,
}

impl TierEvent {
    /// Makes the event's object.
    pub fn of(py: Python<'_>, event: &kv::TierEvent) -> Self {
        let keys = event.keys.iter();
        let key = |key: &kv::Key| PyBytes::new(py, key.as_bytes()).unbind();
        Self {
            number: event.number,
            kind: match event.kind {
                TierEventKind::Stored => "stored",
                TierEventKind::Evicted => "evicted",
                TierEventKind::Removed => "removed",
                TierEventKind::Damaged => "damaged",
                _ => "other",
            },
            group: event.group,
            keys: keys.map(key).collect(),
        }
    }
}

#[pymethods]
impl TierEvent {
    fn __repr__(&self) -> String {
        let (number, kind, count) = (self.number, self.kind, self.keys.len());
        format!("<egmem.kv.TierEvent {number}: {count} key(s) {kind}>")
    }
}

/// Events of a tier in a queue of their own, made by `Tier.events`, until this object is closed or deleted.
///
/// As an iterator it waits for the next event, and ends when the tier was closed and its events were taken. Other threads run
/// meanwhile. A signal handler that raises ends the wait, such as that of Ctrl-C.
#[pyclass(extends = Closing, frozen, module = "egmem.kv")]
pub struct Events {
    inner: Open<Arc<kv::Events>>,
    driver: Driver,
}

impl Events {
    /// Wraps a queue.
    pub fn new(events: kv::Events, driver: &Driver) -> Self {
        Self {
            inner: Open::new(Arc::new(events)),
            driver: driver.clone(),
        }
    }

    /// Waits for the next event until `end`. `None` at that time, and at once when no event comes any more.
    fn wait(&self, py: Python<'_>, end: Option<Instant>) -> PyResult<Option<TierEvent>> {
        self.driver.expect_this_process("events").or_raise()?;
        // The queue is looked up each time: another thread may close it.
        while let Some(events) = self.inner.value() {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            let (event, is_over) = py.detach(move || {
                let event = events.next_timeout(slice);
                (event, events.is_over())
            });
            if let Some(event) = event {
                return Ok(Some(TierEvent::of(py, &event)));
            }
            if is_over || left.is_some_and(|left| left == slice) {
                break;
            }
            py.check_signals()?;
        }
        Ok(None)
    }
}

#[pymethods]
impl Events {
    /// Returns the next event. Without `timeout`, which is in seconds, it waits as long as the tier is open. Returns `None` after that
    /// time, and when the tier was closed and its events were taken.
    #[pyo3(signature = (timeout=None))]
    fn get(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<TierEvent>> {
        let time = timeout.map(timeout_of).transpose()?;
        // A time beyond the clock's is no limit.
        self.wait(py, time.and_then(|time| Instant::now().checked_add(time)))
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<TierEvent>> {
        self.wait(py, None)
    }

    /// How many keys did not fit into the queue. They are missing in its events: read `Tier.keys` again after that.
    #[getter]
    fn lost(&self) -> PyResult<u64> {
        let events = self
            .inner
            .value()
            .ok_or_else(|| closed("queue of events"))?;
        Ok(events.lost())
    }

    /// Ends the subscription, and every wait for an event.
    fn close(&self) {
        drop_detached(self.inner.take());
    }
}

/// A function, until its subscription is closed.
type Function = Arc<Mutex<Option<Py<PyAny>>>>;

thread_local! {
    /// The events that a method puts off, if this thread is in one.
    static PUT_OFF: RefCell<Option<Vec<(Function, kv::TierEvent)>>> = const { RefCell::new(None) };
}

/// Does work without the GIL, and then calls functions with the events that it caused.
pub fn telling<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    // A function may call a method itself.
    let outer = PUT_OFF.replace(Some(Vec::new()));
    let done = py.detach(work);
    let put_off = PUT_OFF.replace(outer);
    for (function, event) in put_off.into_iter().flatten() {
        call(py, &function, &event);
    }
    done
}

/// Calls a function. Its exceptions are shown as unraisable: the keys have changed already.
fn call(py: Python<'_>, function: &Function, event: &kv::TierEvent) {
    let Some(function) = lock(function)
        .as_ref()
        .map(|function| function.clone_ref(py))
    else {
        return;
    };
    let event = Py::new(py, TierEvent::of(py, event));
    let called = event.and_then(|event| python(py, || function.call1(py, (event,))));
    let Err(error) = called else { return };
    if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        // Ctrl-C, which the program is to get when this call is over.
        let again = py
            .import("_thread")
            .and_then(|thread| thread.call_method0("interrupt_main"));
        if again.is_ok() {
            return;
        }
    }
    python(py, || error.write_unraisable(py, Some(function.bind(py))));
}

/// A function's subscription to the events of a tier, made by `Tier.on_event`, until this object is closed or deleted.
#[pyclass(extends = Closing, frozen, module = "egmem.kv")]
pub struct Subscription {
    inner: Mutex<Option<kv::Subscription>>,
    function: Function,
}

impl Subscription {
    /// Subscribes a function.
    ///
    /// # Errors
    /// `TypeError` for an object that cannot be called.
    pub fn new(tier: &kv::Tier, function: &Bound<'_, PyAny>) -> PyResult<Self> {
        if !function.is_callable() {
            let kind = function.get_type();
            return Err(PyTypeError::new_err(format!("{kind} is no function")));
        }
        let function: Function = Arc::new(Mutex::new(Some(function.clone().unbind())));
        let told = Arc::clone(&function);
        let inner = tier.on_event(move |event| {
            let direct = PUT_OFF.with_borrow_mut(|put_off| match put_off {
                Some(events) => {
                    events.push((Arc::clone(&told), event.clone()));
                    false
                }
                None => true,
            });
            if direct {
                Python::try_attach(|py| call(py, &told, event));
            }
        });
        Ok(Self {
            inner: Mutex::new(Some(inner)),
            function,
        })
    }
}

#[pymethods]
impl Subscription {
    /// Ends the subscription: the function is not called any more.
    fn close(&self, py: Python<'_>) {
        let ended = (lock(&self.inner).take(), lock(&self.function).take());
        let (subscription, function) = ended;
        py.detach(|| drop(subscription));
        drop(function);
    }

    /// The function may have the object that has this one, and the tier.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.function.try_lock() {
            Ok(function) => visit.call(&*function),
            // Another thread has it: the object lives.
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        let function = lock(&self.function).take();
        drop(function);
    }
}
