//! `egmem.kv.Subscription`: a function that is told which keys come and go.
//!
//! The tier calls the function in the thread that changes keys. Methods of this package have locks of their own then, and
//! no GIL, for which a thread with the GIL may wait. So they put events off until their work is done: [`telling`].

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use egmem::kv;
use pyo3::exceptions::{PyKeyboardInterrupt, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::locks::lock;

use super::events::TierEvent;

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
    let called =
        Py::new(py, TierEvent::of(py, event)).and_then(|event| function.call1(py, (event,)));
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
    error.write_unraisable(py, Some(function.bind(py)));
}

/// A function's subscription to the events of a tier, made by `Tier.on_event`, until this object is closed or deleted.
#[pyclass(frozen, module = "egmem.kv")]
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

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_args))]
    fn __exit__(&self, py: Python<'_>, _args: &Bound<'_, PyTuple>) {
        self.close(py);
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
