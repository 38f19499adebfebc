//! Objects as Python programs have them.

use pyo3::PyClass;
use pyo3::prelude::*;
use serde::Serialize;

use crate::error::invalid;

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

/// Returns a value as Python's dictionaries and lists, by way of JSON.
///
/// # Errors
/// None in practice: all values passed here have a form in JSON.
pub fn to_python<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(|error| invalid(&error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}
