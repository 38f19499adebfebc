//! `egmem.Slice`: a part of memory, made by `memory[a:b]`; and views of a part for the time of a call.

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::args::Size;
use crate::error::{OrRaise, invalid};
use crate::memory::{Memory, make};
use crate::region::{Owner, Region};

/// A part of memory, made by `memory[a:b]`. It keeps the memory, which cannot be closed meanwhile, and is used in the
/// same ways.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct Slice;

#[pymethods]
impl Slice {
    /// Where it begins in the memory that it is a part of, in bytes.
    #[getter]
    fn offset(slf: PyRef<'_, Self>) -> PyResult<u64> {
        let region = slf.as_super().region()?;
        match region.owner().or_raise()? {
            Owner::Part { offset, .. } => Ok(*offset),
            _ => Err(invalid("it is no slice")),
        }
    }
}

/// Returns the slice `memory[index]`.
///
/// # Errors
/// `TypeError` for an index that is no slice, `InvalidArgument` for a step other than 1.
pub fn of<'py>(region: &Arc<Region>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let Ok(slice) = index.cast::<PySlice>() else {
        return Err(PyTypeError::new_err(format!(
            "memory is indexed by slices of bytes, not by {}; what to do: use memory[a:b], or memoryview(memory)[i] for one byte",
            index.get_type().name()?
        )));
    };
    let found = slice.indices(region.len() as isize)?;
    if found.step != 1 {
        return Err(invalid(&format!(
            "a slice of memory has step 1, not {}; numpy.asarray(memory)[a:b:step] has others",
            found.step
        )));
    }
    let (whole, start) = region.whole();
    let owner = Owner::Part {
        whole: Arc::clone(whole),
        offset: start + found.start as u64,
        len: found.slicelength as u64,
    };
    make(index.py(), Slice, owner)
}

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
