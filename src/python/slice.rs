//! `egmem.Slice`: a part of memory, made by `memory[a:b]`.

use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PySlice;

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
