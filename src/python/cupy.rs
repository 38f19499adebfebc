//! The functions that CuPy's `CFunctionAllocator` calls: no Python runs when CuPy's pool takes memory or gives it
//! back.

use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use pyo3::prelude::*;

use crate::error::invalid;
use crate::frees::free_after_gpus;
use crate::heap::Heap;
use crate::interpreter::{detached, lock};

/// CuPy aligns its own memory to this.
const ALIGN: usize = 512;

/// A heap that CuPy's pool takes memory from, with the blocks in use.
struct Source {
    heap: egmem::Heap,
    blocks: Mutex<HashMap<usize, egmem::Block>>,
}

/// The object that CuPy's allocator refers to. It must outlive the memory allocated from it: CuPy keeps the
/// allocator's owner.
#[pyclass(frozen, module = "egmem", name = "_CupySource")]
pub struct CupySource {
    source: Box<Source>,
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
        let blocks = Mutex::default();
        Ok(Self {
            source: Box::new(Source { heap, blocks }),
        })
    }

    /// The arguments of `CFunctionAllocator` before its owner: parameter, allocation, free.
    #[getter]
    fn functions(&self) -> (usize, usize, usize) {
        let parameter = (&raw const *self.source).addr();
        (
            parameter,
            allocate as *const c_void as usize,
            free as *const c_void as usize,
        )
    }
}

/// `void* malloc(void* parameter, size_t size, int device)`
///
/// # Safety
/// `parameter` is a live [`Source`].
unsafe extern "C" fn allocate(parameter: *mut c_void, size: usize, _gpu: c_int) -> *mut c_void {
    // SAFETY: CuPy keeps the owner, and with it the source, while the allocator is used.
    let source = unsafe { &*parameter.cast::<Source>().cast_const() };
    if !source.heap.driver().is_of_this_process() {
        return std::ptr::null_mut();
    }
    let Ok(layout) = Layout::from_size_align(size.max(1), ALIGN) else {
        return std::ptr::null_mut();
    };
    // CuPy calls with the GIL, and growing takes the driver's time.
    let mut allocated = None;
    detached(|| allocated = Some(source.heap.allocate(layout)));
    match allocated {
        Some(Ok(block)) => {
            let address = block.device_ptr().0 as usize;
            lock(&source.blocks).insert(address, block);
            std::ptr::with_exposed_provenance_mut(address)
        }
        Some(Err(error)) => {
            tracing::warn!(%error, "CuPy gets no memory");
            std::ptr::null_mut()
        }
        None => std::ptr::null_mut(),
    }
}

/// `void free(void* parameter, void* memory, int device)`. CuPy expects the behaviour of `cudaFree`: the memory is
/// reused only after the GPUs' work.
///
/// # Safety
/// As [`allocate`].
unsafe extern "C" fn free(parameter: *mut c_void, memory: *mut c_void, _gpu: c_int) {
    // SAFETY: as in `allocate`.
    let source = unsafe { &*parameter.cast::<Source>().cast_const() };
    if !source.heap.driver().is_of_this_process() {
        return;
    }
    let block = lock(&source.blocks).remove(&memory.addr());
    if let Some(block) = block {
        detached(|| free_after_gpus(source.heap.driver(), block.len(), block));
    }
}
