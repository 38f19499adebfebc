//! Libraries whose arrays a call takes: their current stream orders a call that names none.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A library with a current stream for each GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// PyTorch.
    Torch,
    /// CuPy.
    CuPy,
}

impl Library {
    const ALL: [Self; 2] = [Self::Torch, Self::CuPy];

    const fn module(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::CuPy => "cupy",
        }
    }

    const fn class(self) -> &'static str {
        match self {
            Self::Torch => "Tensor",
            Self::CuPy => "ndarray",
        }
    }

    /// Returns the library whose array an object is. No library is imported: an array's is there already.
    ///
    /// # Errors
    /// Python's.
    pub fn of(array: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let modules = array.py().import("sys")?.getattr("modules")?;
        let modules = modules.cast::<PyDict>()?;
        for library in Self::ALL {
            let Some(module) = modules.get_item(library.module())? else {
                continue;
            };
            // A module of the same name may be another one, or be imported only in part.
            if let Ok(class) = module.getattr(library.class())
                && array.is_instance(&class)?
            {
                return Ok(Some(library));
            }
        }
        Ok(None)
    }

    /// Returns the library's current stream of a GPU in this thread.
    ///
    /// # Errors
    /// Python's.
    pub fn current_stream<'py>(self, py: Python<'py>, gpu: i32) -> PyResult<Bound<'py, PyAny>> {
        let cuda = py.import(self.module())?.getattr("cuda")?;
        match self {
            Self::Torch => cuda.call_method1("current_stream", (gpu,)),
            Self::CuPy => cuda.call_method1("get_current_stream", (gpu,)),
        }
    }
}
