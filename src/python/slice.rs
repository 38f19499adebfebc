//! `egmem.Slice`: a part of memory, made by `memory[a:b]`.

use pyo3::prelude::*;

use crate::error::{OrRaise, invalid};
use crate::memory::Memory;
use crate::region::Owner;

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
