//! Memory of heaps for PyTorch's allocator interface (`CUDAPluggableAllocator`): functions that PyTorch calls, with no Python on
//! the way. They carry no context, so each heap has functions of its own. And the functions that CuPy's `CFunctionAllocator` calls
//! when CuPy's pool takes memory or gives it back.

mod graphs;
mod pool;

use std::cell::Cell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use egmem::driver::StreamHandle;
use egmem::{Explained, Language};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::{ToPy, not_supported};
use crate::heap::Heap;
use crate::interpreter::detached;

use graphs::PoolId;
use pool::{Caller, StreamPool};

/// The most heaps that PyTorch may allocate from, in a process.
const SLOTS: usize = 16;

static POOLS: [OnceLock<StreamPool>; SLOTS] = [const { OnceLock::new() }; SLOTS];

/// PyTorch's allocator objects of each slot: in the order of streams, and for segments. They are never dropped.
static ALLOCATORS: [[PyOnceLock<Py<PyAny>>; 2]; SLOTS] =
    [const { [const { PyOnceLock::new() }; 2] }; SLOTS];

/// Returns the pool of a slot, if it is in use.
fn pool(slot: usize) -> Option<&'static StreamPool> {
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
        let (allocate, free) = match segments {
            true => FUNCTIONS[self.slot].segments,
            false => FUNCTIONS[self.slot].ordered,
        };
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
        let more = &FUNCTIONS[self.slot];
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
        RAISE[self.slot].store(address, Relaxed);
    }
}

/// `void* alloc(ssize_t size, int device, cudaStream_t stream)`
type Allocate = unsafe extern "C-unwind" fn(isize, c_int, *mut c_void) -> *mut c_void;
/// `void free(void* pointer, ssize_t size, int device, cudaStream_t stream)`
type Free = unsafe extern "C" fn(*mut c_void, isize, c_int, *mut c_void);
/// `void record_stream(void* pointer, cudaStream_t stream)`
type Record = unsafe extern "C" fn(*mut c_void, *mut c_void);
/// `void begin_allocate_to_pool(int device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter)`. The pair of
/// numbers is passed as a structure of two; the function, which is not trivial, by its address.
type Begin = unsafe extern "C" fn(c_int, Pool, *mut c_void);
/// `void end_allocate_to_pool(int device, MempoolId_t pool)`, and `release_pool` alike.
type End = unsafe extern "C" fn(c_int, Pool);

/// `std::pair<unsigned long long, unsigned long long>`.
#[repr(C)]
struct Pool {
    first: u64,
    second: u64,
}

impl From<Pool> for PoolId {
    fn from(pool: Pool) -> Self {
        [pool.first, pool.second]
    }
}

/// The functions of a slot. `ordered` are in the order of streams; the pair in `segments` is for PyTorch's caching
/// allocator, and the others for the allocator of a whole process.
pub(crate) struct Functions {
    pub ordered: (Allocate, Free),
    segments: (Allocate, Free),
    record: Record,
    begin: Begin,
    end: End,
    release: End,
}

/// `[[noreturn]] void c10::detail::torchCheckFail(const char* function, const char* file, uint32_t line,
/// const char* message)`, which throws.
type CheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

/// For each slot the address of [`CheckFail`], or 0.
static RAISE: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];

fn stream_of(device: c_int, stream: *mut c_void) -> StreamHandle {
    let raw = stream.addr() as u64;
    StreamHandle { device, raw }
}

/// PyTorch's caching allocator takes `SEGMENTS` with its lock.
unsafe extern "C-unwind" fn allocate<const SLOT: usize, const SEGMENTS: bool>(
    size: isize,
    gpu: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let (Some(pool), Ok(bytes)) = (pool(SLOT), u64::try_from(size)) else {
        return std::ptr::null_mut();
    };
    if bytes == 0 {
        return std::ptr::null_mut();
    }
    let caller = match SEGMENTS {
        true => Caller::WithLock,
        false => Caller::WithoutLock,
    };
    match pool.allocate(bytes, stream_of(gpu, stream), caller) {
        Ok(address) => std::ptr::with_exposed_provenance_mut(address as usize),
        Err(error) => {
            let address = RAISE[SLOT].load(Relaxed);
            if address != 0 {
                raise(address, &error);
            }
            std::ptr::null_mut()
        }
    }
}

/// Throws PyTorch's exception through this crate's frames, which have only values that may be dropped then.
fn raise(address: usize, error: &egmem::Error) -> ! {
    let remedy = Explained(error).remedy_in(Language::Python);
    let text = format!("CUDA out of memory. egmem: {error}; {remedy}");
    let text = text.trim_end_matches("; ").replace('\0', " ");
    let text = CString::new(text).unwrap_or_default();
    // SAFETY: `raise_by` was given the function's address.
    unsafe {
        let check_fail = std::mem::transmute::<usize, CheckFail>(address);
        check_fail(c"egmem.torch".as_ptr(), c"egmem".as_ptr(), 0, text.as_ptr())
    }
}

unsafe extern "C" fn free<const SLOT: usize>(
    memory: *mut c_void,
    _size: isize,
    gpu: c_int,
    stream: *mut c_void,
) {
    if let Some(pool) = pool(SLOT).filter(|_| !memory.is_null()) {
        pool.free(memory.addr() as u64, stream_of(gpu, stream));
    }
}

/// As [`free`], for memory in which PyTorch has blocks of its own: it expects `cudaFree`, after which no GPU uses it.
unsafe extern "C" fn free_segment<const SLOT: usize>(
    memory: *mut c_void,
    _size: isize,
    _gpu: c_int,
    _stream: *mut c_void,
) {
    if let Some(pool) = pool(SLOT).filter(|_| !memory.is_null()) {
        pool.free_segment(memory.addr() as u64);
    }
}

unsafe extern "C" fn record<const SLOT: usize>(memory: *mut c_void, stream: *mut c_void) {
    if let Some(pool) = pool(SLOT) {
        pool.record(memory.addr() as u64, stream.addr() as u64);
    }
}

unsafe extern "C" fn begin<const SLOT: usize>(gpu: c_int, id: Pool, _filter: *mut c_void) {
    if let Some(pool) = pool(SLOT) {
        pool.begin_capture(gpu, id.into());
    }
}

unsafe extern "C" fn end<const SLOT: usize>(gpu: c_int, id: Pool) {
    if let Some(pool) = pool(SLOT) {
        pool.end_capture(gpu, id.into());
    }
}

unsafe extern "C" fn release<const SLOT: usize>(_gpu: c_int, id: Pool) {
    if let Some(pool) = pool(SLOT) {
        pool.release_graph(id.into());
    }
}

/// One entry for each slot.
macro_rules! for_slots {
    ($($slot:literal)*) => {
        /// The functions of each slot.
        pub(crate) const FUNCTIONS: [Functions; SLOTS] = [$(Functions {
            ordered: (allocate::<$slot, false>, free::<$slot>),
            segments: (allocate::<$slot, true>, free_segment::<$slot>),
            record: record::<$slot>,
            begin: begin::<$slot>,
            end: end::<$slot>,
            release: release::<$slot>,
        }),*];
    };
}

for_slots!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

/// The object that CuPy's allocator refers to: a heap that CuPy's pool takes memory from.
///
/// **Lifetime.** CuPy's allocator keeps this object, but CuPy's memory has only the pool's address, and outlives the allocator
/// where a pool ends before its arrays. Each allocation therefore has a count of the pool, which its free gives up.
#[pyclass(frozen, module = "egmem", name = "_CupySource")]
pub struct CupySource {
    pool: Arc<StreamPool>,
}

#[pymethods]
impl CupySource {
    #[new]
    fn new(heap: &Bound<'_, Heap>) -> PyResult<Self> {
        // CuPy's own pool keeps idle memory.
        let pool = Arc::new(StreamPool::new(heap.get().handle()?, 0));
        Ok(Self { pool })
    }

    /// The arguments of `CFunctionAllocator` before its owner: parameter, allocation, free.
    #[getter]
    fn functions(&self) -> (usize, usize, usize) {
        let parameter = Arc::as_ptr(&self.pool).expose_provenance();
        (
            parameter,
            cupy_allocate as *const c_void as usize,
            cupy_free as *const c_void as usize,
        )
    }

    /// The exception of this thread's last allocation that failed, or `None`. Another call does not return it again.
    #[staticmethod]
    fn last_error() -> Option<PyErr> {
        CUPY_ERROR.take().map(ToPy::to_py)
    }
}

thread_local! {
    /// Why the thread's last failed allocation for CuPy failed, until CuPy's pool asks for it.
    static CUPY_ERROR: Cell<Option<egmem::Error>> = const { Cell::new(None) };
}

/// `void* malloc(void* parameter, size_t size, int device)`. CuPy calls with the GIL.
///
/// # Safety
/// `parameter` is the address of an `Arc`'s [`StreamPool`], which lives during the call.
unsafe extern "C" fn cupy_allocate(
    parameter: *mut c_void,
    size: usize,
    device: c_int,
) -> *mut c_void {
    let parameter = parameter.cast::<StreamPool>().cast_const();
    // SAFETY: the allocator that calls keeps the `CupySource`, which has a count of the pool; others share it too.
    let pool = unsafe { &*parameter };
    let stream = StreamHandle { device, raw: 0 };
    match pool.allocate(size as u64, stream, Caller::WithoutLock) {
        Ok(address) => {
            // SAFETY: the address is `Arc::as_ptr`'s, of the global allocator, and the `CupySource` has a count meanwhile.
            unsafe { Arc::increment_strong_count(parameter) };
            std::ptr::with_exposed_provenance_mut(address as usize)
        }
        Err(error) => {
            // A thread that ends may have no slot any more.
            CUPY_ERROR.try_with(|slot| slot.set(Some(error))).ok();
            std::ptr::null_mut()
        }
    }
}

/// `void free(void* parameter, void* memory, int device)`. CuPy expects the behaviour of `cudaFree`: the memory is
/// reused only after the GPUs' work.
///
/// # Safety
/// `memory` is null, or [`cupy_allocate`] has returned it for this `parameter`, and it is freed once.
unsafe extern "C" fn cupy_free(parameter: *mut c_void, memory: *mut c_void, _gpu: c_int) {
    if memory.is_null() {
        return; // a failed allocation, which has added no count
    }
    // SAFETY: the address is `Arc::as_ptr`'s, of the global allocator. The allocation of this memory has added the count that is
    // taken here, once, and it keeps the pool until then.
    let pool = unsafe { Arc::from_raw(parameter.cast::<StreamPool>().cast_const()) };
    let address = memory.addr() as u64;
    // The last one ends the heap, which takes the driver's time too.
    detached(move || {
        pool.free_segment(address);
        drop(pool);
    });
}
