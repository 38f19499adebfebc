//! The array interfaces of NumPy and CUDA.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::device;
use crate::error::raise;
use crate::span::Span;

fn common<'py>(py: Python<'py>, view: &Span, read_only: bool) -> PyResult<Bound<'py, PyDict>> {
    crate::frees::watch_captures(py)?;
    view.region.expose();
    let dictionary = PyDict::new(py);
    dictionary.set_item("version", 3)?;
    dictionary.set_item("shape", PyTuple::new(py, &view.shape)?)?;
    dictionary.set_item("typestr", view.dtype.typestr())?;
    dictionary.set_item("data", (view.address(), read_only))?;
    dictionary.set_item("strides", py.None())?;
    Ok(dictionary)
}

/// Returns the dictionary of NumPy's interface.
///
/// # Errors
/// `NotAccessible` unless the CPU may read.
pub fn numpy<'py>(py: Python<'py>, view: &Span) -> PyResult<Bound<'py, PyDict>> {
    let bytes = view.region.cpu(py)?;
    common(py, view, !bytes.writable)
}

/// Returns the dictionary of CUDA's interface. Its stream is the one that a pool's allocation is ordered by.
///
/// # Errors
/// `NoDeviceInterface`, which is also an `AttributeError`, for a view that is no GPU's and on a simulated driver.
pub fn cuda<'py>(py: Python<'py>, view: &Span) -> PyResult<Bound<'py, PyDict>> {
    let (kind, gpu) = view.device;
    if kind != device::CUDA {
        return Err(raise(
            "NoDeviceInterface",
            "a view of the CPU has no CUDA array interface",
            "use a view of a GPU: memory.on(\"cuda:0\")",
            None,
        ));
    }
    let writable = view.region.gpu(py, gpu)?;
    let dictionary = common(py, view, !writable)?;
    let stream = view.region.stream().map(|stream| stream.handle().raw);
    // 0 would be ambiguous: 1 is the legacy default stream.
    dictionary.set_item("stream", stream.map(|raw| raw.max(1)))?;
    Ok(dictionary)
}
