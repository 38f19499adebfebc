//! Views of a part of memory for the time of a call.

use std::ffi::c_int;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::args::Size;
use crate::error::invalid;
use crate::region::Region;

/// `PyBUF_READ` and `PyBUF_WRITE`.
const READ: c_int = 0x100;
const WRITE: c_int = 0x200;

/// Calls `work` with a memoryview of a part. It is not made by the buffer protocol, which counts the address as given
/// away.
///
/// # Errors
/// `InvalidArgument` for a part that is not in the memory; `NotAccessible`; those of `work`.
pub fn with_part<'py, T>(
    py: Python<'py>,
    region: &Region,
    offset: Size,
    nbytes: Option<Size>,
    to_write: bool,
    work: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<T> {
    let (size, offset) = (region.len(), offset.0);
    let len = nbytes.map_or(size.saturating_sub(offset), |nbytes| nbytes.0);
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(invalid(&format!(
            "{len} bytes at offset {offset} are outside of {size} bytes"
        )));
    }
    let bytes = match to_write {
        true => region.writable(py)?,
        false => region.cpu(py)?,
    };
    let start = bytes.address.wrapping_add(offset as usize);
    let mode = if bytes.writable { WRITE } else { READ };
    // SAFETY: the thread is attached. The CPU may access the range, which lies in the memory; the region keeps it to
    // the end of this function, and the view is released before.
    let part = unsafe {
        let view = ffi::PyMemoryView_FromMemory(start.cast(), len as ffi::Py_ssize_t, mode);
        Bound::from_owned_ptr_or_err(py, view)?
    };
    let done = work(&part);
    part.call_method0("release")?;
    done
}
