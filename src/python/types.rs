//! The derived types, which have the buffer protocol, and how objects of them are made.

use std::sync::Mutex;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::locks::lock;
use crate::region::{Owner, Region};

/// A derived type, once the module is initialised.
pub struct Derived(PyOnceLock<Py<PyType>>);

/// `egmem.Block`
pub static BLOCK: Derived = Derived(PyOnceLock::new());
/// `egmem.PoolBlock`
pub static POOL_BLOCK: Derived = Derived(PyOnceLock::new());
/// `egmem.RemoteBuffer`
pub static REMOTE_BUFFER: Derived = Derived(PyOnceLock::new());
/// `egmem.SharedBuffer`
pub static SHARED_BUFFER: Derived = Derived(PyOnceLock::new());
/// `egmem.Slice`
pub static SLICE: Derived = Derived(PyOnceLock::new());
/// `egmem.kv.Page`
pub static PAGE: Derived = Derived(PyOnceLock::new());

impl Derived {
    /// Sets the type. The first one stays.
    pub fn set(&self, kind: &Bound<'_, PyType>) {
        self.0.set(kind.py(), kind.clone().unbind()).ok();
    }

    /// Makes an object that owns memory.
    ///
    /// # Errors
    /// Python's.
    pub fn make<'py>(&self, py: Python<'py>, owner: Owner) -> PyResult<Bound<'py, PyAny>> {
        let kind = self
            .0
            .get(py)
            .ok_or_else(|| PyRuntimeError::new_err("egmem._egmem is not initialised"))?;
        kind.bind(py)
            .call1((Made(Mutex::new(Some(Region::new(owner)))),))
    }
}

/// Memory on its way into an object of a derived type.
#[pyclass(frozen, module = "egmem", name = "_Made")]
pub struct Made(Mutex<Option<Region>>);

impl Made {
    /// Takes the memory.
    ///
    /// # Errors
    /// `TypeError` the second time.
    pub fn take(&self) -> PyResult<Region> {
        let region = lock(&self.0).take();
        region
            .ok_or_else(|| PyTypeError::new_err("objects of this type are not made by calling it"))
    }
}
