//! `memory[a:b]`: a part of memory.

use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::error::invalid;
use crate::memory::make;
use crate::region::{Owner, Region};
use crate::slice::Slice;

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
