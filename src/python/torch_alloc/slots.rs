//! The heap behind each of PyTorch's calls. Its functions carry no context, so each heap has functions of its own.

use std::ffi::c_void;
use std::sync::OnceLock;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::pool::StreamPool;
use super::symbols;
use crate::error::{ToPy, not_supported};
use crate::heap::Heap;

/// The most heaps that PyTorch may allocate from, in a process.
pub const SLOTS: usize = 16;

static POOLS: [OnceLock<StreamPool>; SLOTS] = [const { OnceLock::new() }; SLOTS];

/// PyTorch's allocator objects of each slot: in the order of streams, and for segments. They are never dropped.
static ALLOCATORS: [[PyOnceLock<Py<PyAny>>; 2]; SLOTS] =
    [const { [const { PyOnceLock::new() }; 2] }; SLOTS];

/// Returns the pool of a slot, if it is in use.
pub fn pool(slot: usize) -> Option<&'static StreamPool> {
    POOLS.get(slot)?.get()
}

/// A heap that PyTorch allocates from. It stays until the process ends.
#[pyclass(frozen, module = "egmem", name = "_TorchSlot")]
pub struct TorchSlot {
    pub slot: usize,
}

/// Gives a heap functions for PyTorch. The same heap has the same functions again.
#[pyfunction]
#[pyo3(name = "_torch_register", signature = (heap, keep))]
pub fn register(heap: &Bound<'_, Heap>, keep: u64) -> PyResult<TorchSlot> {
    let heap = heap.get().handle()?;
    for (slot, pool) in POOLS.iter().enumerate() {
        let pool = pool.get_or_init(|| StreamPool::new(heap.clone(), keep));
        if pool.heap().device_ptr() == heap.device_ptr() && pool.heap().driver().same(heap.driver())
        {
            return Ok(TorchSlot { slot });
        }
    }
    Err(not_supported(
        &format!(
            "PyTorch allocates from {SLOTS} heaps already, and they stay until the process ends"
        ),
        "use one of those heaps again",
    ))
}

#[pymethods]
impl TorchSlot {
    /// The addresses of the functions for `torch._C._cuda_customAllocator`: allocate, and free in the order of
    /// streams; or for `segments`, free after all work of all GPUs, as PyTorch's caching allocator expects.
    #[pyo3(signature = (*, segments))]
    fn functions(&self, segments: bool) -> (usize, usize) {
        let functions = match segments {
            true => symbols::SEGMENTS,
            false => symbols::FUNCTIONS,
        };
        let (allocate, free) = functions[self.slot];
        (
            allocate as *const c_void as usize,
            free as *const c_void as usize,
        )
    }

    /// Returns PyTorch's allocator object, which `make` creates from these functions. It is created once, and stays
    /// until the process ends: PyTorch's pools refer to it without owning it, and return memory to it after their
    /// Python objects are gone.
    #[pyo3(signature = (make, *, segments))]
    fn allocator(
        &self,
        py: Python<'_>,
        make: &Bound<'_, PyAny>,
        segments: bool,
    ) -> PyResult<Py<PyAny>> {
        let made = ALLOCATORS[self.slot][usize::from(segments)].get_or_try_init(py, || {
            make.call1(self.functions(segments)).map(Bound::unbind)
        })?;
        Ok(made.clone_ref(py))
    }

    /// The addresses of the functions that a whole process's allocator has besides: record_stream,
    /// begin_allocate_to_pool, end_allocate_to_pool, release_pool.
    #[getter]
    fn more_functions(&self) -> (usize, usize, usize, usize) {
        let more = symbols::MORE[self.slot];
        (
            more.record as *const c_void as usize,
            more.begin as *const c_void as usize,
            more.end as *const c_void as usize,
            more.release as *const c_void as usize,
        )
    }

    /// The bytes in use and the bytes of freed blocks that their streams keep.
    #[getter]
    fn bytes(&self) -> (u64, u64) {
        pool(self.slot).map_or((0, 0), StreamPool::bytes)
    }

    /// Gives freed blocks that streams keep back to the heap.
    fn give_back_idle(&self, py: Python<'_>) {
        if let Some(pool) = pool(self.slot) {
            py.detach(|| pool.give_back_idle());
        }
    }

    /// The exception of the last allocation that failed, or `None`.
    pub fn last_error(&self) -> Option<PyErr> {
        pool(self.slot)?.last_error().map(ToPy::to_py)
    }

    /// Has failed allocations raise PyTorch's error by its function `c10::detail::torchCheckFail`, whose address is
    /// given. Only for the allocator of a whole process: other callers of these functions take a null pointer.
    ///
    /// # Safety
    /// In Python's terms: any other address crashes the process.
    fn raise_by(&self, address: usize) {
        symbols::raise_by(self.slot, address);
    }
}
