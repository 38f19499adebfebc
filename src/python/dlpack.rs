//! DLPack 1.x: capsules that other libraries take without a copy.
//!
//! A capsule owns a share of the memory. Its consumer calls the deleter, on any thread, with the GIL or without. The
//! last share ends without the GIL.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;

use crate::error::{OrRaise, invalid, raise};
use crate::region::Region;
use crate::view::{CPU, CUDA, CUDA_HOST, View};

/// `DLPACK_FLAG_BITMASK_READ_ONLY`
const READ_ONLY: u64 = 1;

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: [i32; 2],
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, of DLPack before 1.0.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct ManagedVersioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A structure that a capsule points to, by the capsule's name.
trait InCapsule {
    const NAME: &CStr;
}

impl InCapsule for Managed {
    const NAME: &CStr = c"dltensor";
}

impl InCapsule for ManagedVersioned {
    const NAME: &CStr = c"dltensor_versioned";
}

/// The object that a capsule owns: the structure that it points to comes first.
#[repr(C)]
struct Held<M> {
    managed: M,
    /// Shape and strides, which the tensor points to.
    _numbers: Vec<i64>,
    _region: Arc<Region>,
}

/// Exports a view.
///
/// # Errors
/// `ExportError`, which is a `BufferError`, for a copy and for another kind of device; `NoDeviceInterface` for a GPU
/// on a simulated driver; `NotAccessible`.
pub fn export<'py>(
    py: Python<'py>,
    view: &View,
    stream: Option<&Bound<'py, PyAny>>,
    max_version: Option<(u32, u32)>,
    device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<Bound<'py, PyAny>> {
    if copy == Some(true) {
        let message = "memory is never copied by an export";
        let remedy = "copy the array that you get";
        return Err(raise("ExportError", message, remedy));
    }
    crate::frees::watch_captures(py)?;
    let device = device.unwrap_or(view.device);
    let writable = expose(py, view, device, stream)?;
    let versioned = max_version.is_some_and(|(major, _)| major >= 1);
    if !versioned && !writable {
        return Err(PyBufferError::new_err(
            "read-only memory needs a consumer that knows DLPack 1.0: max_version=(1, 0)",
        ));
    }
    if versioned {
        let flags = if writable { 0 } else { READ_ONLY };
        capsule(py, view, device, |tensor| ManagedVersioned {
            // The first version that has float8, or that has versions.
            version: [1, u32::from(view.dtype.code >= 7)],
            context: std::ptr::null_mut(),
            deleter: Some(delete::<ManagedVersioned>),
            flags,
            tensor,
        })
    } else {
        capsule(py, view, device, |tensor| Managed {
            tensor,
            context: std::ptr::null_mut(),
            deleter: Some(delete::<Managed>),
        })
    }
}

/// Checks that `device` may use the memory, and notes that a consumer has its address. Returns whether it may write.
///
/// # Errors
/// Those of [`export`].
fn expose(
    py: Python<'_>,
    view: &View,
    device: (i32, i32),
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<bool> {
    match device {
        (CPU | CUDA_HOST, 0) => {
            let writable = view.region.cpu(py)?.writable;
            view.region.expose();
            Ok(writable)
        }
        (CUDA, gpu) => {
            let writable = view.region.gpu(py, gpu)?;
            order(py, view, gpu, stream)?;
            view.region.expose();
            Ok(writable)
        }
        _ => {
            let message = format!("the memory cannot be exported to DLPack's device {device:?}");
            let remedy = "use (1, 0), (3, 0), or (2, gpu)";
            Err(raise("ExportError", &message, remedy))
        }
    }
}

/// Makes the consumer's stream wait for a pool's allocation.
fn order(py: Python<'_>, view: &View, gpu: i32, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    let raw = match stream.filter(|stream| !stream.is_none()) {
        None => 1, // the legacy default stream
        Some(stream) => stream.extract::<i64>()?,
    };
    let Some(own) = view.region.stream().filter(|_| raw != -1) else {
        return Ok(());
    };
    if raw < 1 {
        return Err(invalid(&format!(
            "stream {raw} is ambiguous; valid: 1, 2, -1 or a stream's handle"
        )));
    }
    let theirs = crate::stream::foreign(&view.region.driver, gpu, raw as u64)?;
    py.detach(|| theirs.wait_for(own)).or_raise()
}

/// Returns the shape and, behind it, the strides in elements.
fn numbers(shape: &[i64]) -> Vec<i64> {
    let product = |behind: &[i64]| {
        let sizes = behind.iter().map(|dimension| (*dimension).max(1));
        sizes.fold(1_i64, i64::saturating_mul)
    };
    let strides = (1..=shape.len()).map(|behind| product(&shape[behind..]));
    shape.iter().copied().chain(strides).collect()
}

/// Returns a capsule with a structure on the heap, which its deleter frees.
fn capsule<'py, M: InCapsule>(
    py: Python<'py>,
    view: &View,
    device: (i32, i32),
    managed: impl FnOnce(Tensor) -> M,
) -> PyResult<Bound<'py, PyAny>> {
    let mut numbers = numbers(&view.shape);
    let shape = numbers.as_mut_ptr();
    let tensor = Tensor {
        data: std::ptr::with_exposed_provenance_mut(view.address() as usize),
        device: [device.0, device.1],
        ndim: view.shape.len() as i32,
        code: view.dtype.code,
        bits: view.dtype.size * 8,
        lanes: 1,
        shape,
        // In the same vector, behind the shape.
        strides: shape.wrapping_add(view.shape.len()),
        byte_offset: 0,
    };
    let held = Held {
        managed: managed(tensor),
        _numbers: numbers,
        _region: Arc::clone(&view.region),
    };
    let managed: *mut M = Box::into_raw(Box::new(held)).cast();
    // SAFETY: the pointer is not null, and the name lives for ever; the destructor fits the name.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed.cast(), M::NAME.as_ptr(), Some(destroy::<M>));
        if capsule.is_null() {
            delete(managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// Frees the structure that [`capsule`] made.
///
/// # Safety
/// `managed` came from [`capsule`] with the same type, and no code uses it afterwards.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    if !managed.is_null() {
        // SAFETY: the caller's promise; `Held` begins with the structure.
        drop(unsafe { Box::from_raw(managed.cast::<Held<M>>()) });
    }
}

/// Frees a tensor that was not consumed: a consumer renames the capsule and calls the deleter itself.
///
/// # Safety
/// As Python calls a capsule's destructor; `capsule` is one of [`capsule`]'s with an `M`, if it has this name.
unsafe extern "C" fn destroy<M: InCapsule>(capsule: *mut PyObject) {
    // SAFETY: the capsule is alive during its destructor; the pointer under the first name is this crate's.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) != 0 {
            delete(ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()).cast::<M>());
        }
    }
}
