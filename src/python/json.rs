//! Values as Python's dictionaries, by way of JSON.

use pyo3::prelude::*;
use serde::Serialize;

use crate::error::invalid;

/// Returns a value as Python's dictionaries and lists.
///
/// # Errors
/// None in practice: all values passed here have a form in JSON.
pub fn to_python<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(|error| invalid(&error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}
