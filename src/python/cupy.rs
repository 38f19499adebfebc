//! The functions that CuPy's `CFunctionAllocator` calls: no Python runs when CuPy's pool takes memory or gives it
//! back.

use std::ffi::{c_int, c_void};

use egmem::driver::StreamHandle;
use pyo3::prelude::*;

use crate::error::invalid;
use crate::heap::Heap;
use crate::interpreter::detached;
use crate::torch_alloc::pool::{Caller, StreamPool};

/// The object that CuPy's allocator refers to: a heap that CuPy's pool takes memory from. It must outlive the memory allocated
/// from it: CuPy keeps the allocator's owner.
#[pyclass(frozen, module = "egmem", name = "_CupySource")]
pub struct CupySource {
    pool: Box<StreamPool>,
}

#[pymethods]
impl CupySource {
    #[new]
    fn new(heap: &Bound<'_, Heap>) -> PyResult<Self> {
        let heap = heap.get().handle()?;
        if heap.driver().is_simulated() {
            return Err(invalid(
                "CuPy's GPUs cannot use memory of a simulated driver",
            ));
        }
        // CuPy's own pool keeps idle memory.
        let pool = Box::new(StreamPool::new(heap, 0));
        Ok(Self { pool })
    }

    /// The arguments of `CFunctionAllocator` before its owner: parameter, allocation, free.
    #[getter]
    fn functions(&self) -> (usize, usize, usize) {
        let parameter = (&raw const *self.pool).addr();
        (
            parameter,
            allocate as *const c_void as usize,
            free as *const c_void as usize,
        )
    }
}

/// `void* malloc(void* parameter, size_t size, int device)`. CuPy calls with the GIL.
///
/// # Safety
/// `parameter` is a live [`StreamPool`].
unsafe extern "C" fn allocate(parameter: *mut c_void, size: usize, device: c_int) -> *mut c_void {
    // SAFETY: CuPy keeps the owner, and with it the pool, while the allocator is used.
    let pool = unsafe { &*parameter.cast::<StreamPool>().cast_const() };
    let stream = StreamHandle { device, raw: 0 };
    match pool.allocate(size as u64, stream, Caller::WithoutLock) {
        Ok(address) => std::ptr::with_exposed_provenance_mut(address as usize),
        Err(error) => {
            tracing::warn!(%error, "CuPy gets no memory");
            std::ptr::null_mut()
        }
    }
}

/// `void free(void* parameter, void* memory, int device)`. CuPy expects the behaviour of `cudaFree`: the memory is
/// reused only after the GPUs' work.
///
/// # Safety
/// As [`allocate`].
unsafe extern "C" fn free(parameter: *mut c_void, memory: *mut c_void, _gpu: c_int) {
    // SAFETY: as in `allocate`.
    let pool = unsafe { &*parameter.cast::<StreamPool>().cast_const() };
    let address = memory.addr() as u64;
    detached(|| pool.free_segment(address));
}
