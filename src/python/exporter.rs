//! The buffer protocol. The limited API of Python 3.9 has no declarations for it, although its interpreters have it,
//! so the types that Python sees are derived from this crate's classes with the two slots added.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};

use crate::memory::Memory;
use crate::region::Region;

/// `Py_buffer` as all interpreters from 3.9 on have it.
#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

/// `Py_bf_getbuffer` and `Py_bf_releasebuffer`.
const GET_BUFFER: c_int = 1;
const RELEASE_BUFFER: c_int = 2;

/// `PyBUF_…`: the caller's request.
const WRITABLE: c_int = 0x1;
const FORMAT: c_int = 0x4;
const SHAPE: c_int = 0x8;
const STRIDES: c_int = 0x10 | SHAPE;

/// Fills in `view` for [`Memory`]'s bytes.
///
/// # Safety
/// As Python calls `bf_getbuffer`: attached, `slf` an instance of a type of [`derive`], `view` writable.
unsafe extern "C" fn get_buffer(slf: *mut PyObject, view: *mut PyBuffer, flags: c_int) -> c_int {
    // SAFETY: Python calls this with the GIL held.
    let py = unsafe { Python::assume_attached() };
    if view.is_null() {
        PyBufferError::new_err("no view to fill in").restore(py);
        return -1;
    }
    // SAFETY: the caller's promise.
    let slf = unsafe { Bound::from_borrowed_ptr(py, slf) };
    match exported(&slf, flags & WRITABLE != 0) {
        Ok((region, bytes)) => {
            // SAFETY: `view` is writable. Its pointers to its own fields are valid for as long as it is, as Python
            // does in `PyBuffer_FillInfo`; `obj` is a new reference, and `internal` owns the region until
            // `release_buffer`.
            unsafe {
                ptr::write(
                    view,
                    PyBuffer {
                        buf: bytes.address.cast(),
                        obj: slf.into_ptr(),
                        len: bytes.len as ffi::Py_ssize_t,
                        itemsize: 1,
                        readonly: c_int::from(!bytes.writable),
                        ndim: 1,
                        format: if flags & FORMAT != 0 {
                            c"B".as_ptr().cast_mut()
                        } else {
                            ptr::null_mut()
                        },
                        shape: ptr::null_mut(),
                        strides: ptr::null_mut(),
                        suboffsets: ptr::null_mut(),
                        internal: Arc::into_raw(region).cast_mut().cast(),
                    },
                );
                if flags & SHAPE != 0 {
                    (*view).shape = &raw mut (*view).len;
                }
                if flags & STRIDES == STRIDES {
                    (*view).strides = &raw mut (*view).itemsize;
                }
            }
            0
        }
        Err(error) => {
            // SAFETY: `view` is writable; without an object it is not released.
            unsafe { (*view).obj = ptr::null_mut() };
            error.restore(py);
            -1
        }
    }
}

fn exported(
    slf: &Bound<'_, PyAny>,
    to_write: bool,
) -> PyResult<(Arc<Region>, crate::region::CpuBytes)> {
    crate::frees::watch_captures(slf.py())?;
    let region = slf.cast::<Memory>()?.get().region()?;
    let bytes = region.cpu(slf.py())?;
    if to_write && !bytes.writable {
        return Err(PyBufferError::new_err("the CPU may only read this memory"));
    }
    // Other libraries take the address from here: torch.from_numpy(array).to("cuda", non_blocking=True).
    region.expose();
    Ok((region, bytes))
}

/// Releases a view that [`get_buffer`] filled in.
///
/// # Safety
/// As Python calls `bf_releasebuffer`: once for each view that [`get_buffer`] filled in.
unsafe extern "C" fn release_buffer(_slf: *mut PyObject, view: *mut PyBuffer) {
    // SAFETY: `internal` came from `Arc::into_raw` and is given back once.
    let region = unsafe { Arc::from_raw((*view).internal.cast::<Region>().cast_const()) };
    crate::gil::drop_detached(region);
}

/// Derives a type with the buffer protocol from `base`, a class of this crate that extends [`Memory`].
///
/// # Errors
/// Python's.
pub fn derive<'py>(base: &Bound<'py, PyType>, name: &'static CStr) -> PyResult<Bound<'py, PyType>> {
    let py = base.py();
    let mut slots = [
        ffi::PyType_Slot {
            slot: GET_BUFFER,
            pfunc: get_buffer as *mut c_void,
        },
        ffi::PyType_Slot {
            slot: RELEASE_BUFFER,
            pfunc: release_buffer as *mut c_void,
        },
        ffi::PyType_Slot {
            slot: 0,
            pfunc: ptr::null_mut(),
        },
    ];
    let mut spec = ffi::PyType_Spec {
        name: name.as_ptr(),
        basicsize: 0, // as the base has
        itemsize: 0,
        flags: (ffi::Py_TPFLAGS_DEFAULT | ffi::Py_TPFLAGS_BASETYPE) as _,
        slots: slots.as_mut_ptr(),
    };
    let bases = PyTuple::new(py, [base])?;
    // SAFETY: the specification and its slots live through the call, the name for ever; the functions have the slots'
    // signatures, and they touch only the fields of `Memory`.
    let made = unsafe {
        Bound::from_owned_ptr_or_err(
            py,
            ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr()),
        )?
    };
    let made = made.cast_into::<PyType>()?;
    made.setattr("__doc__", base.getattr("__doc__")?)?;
    Ok(made)
}
