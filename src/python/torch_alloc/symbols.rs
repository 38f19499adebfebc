//! The functions that PyTorch calls: `CUDAPluggableAllocator`'s.

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use egmem::driver::StreamHandle;
use egmem::{Explained, Language};

use super::graphs::PoolId;
use super::pool::Caller;
use super::slots::{SLOTS, pool};

/// `void* alloc(ssize_t size, int device, cudaStream_t stream)`
pub type Allocate = unsafe extern "C-unwind" fn(isize, c_int, *mut c_void) -> *mut c_void;
/// `void free(void* pointer, ssize_t size, int device, cudaStream_t stream)`
pub type Free = unsafe extern "C" fn(*mut c_void, isize, c_int, *mut c_void);
/// `void record_stream(void* pointer, cudaStream_t stream)`
pub type Record = unsafe extern "C" fn(*mut c_void, *mut c_void);
/// `void begin_allocate_to_pool(int device, MempoolId_t pool, std::function<bool(cudaStream_t)> filter)`. The pair of
/// numbers is passed as a structure of two; the function, which is not trivial, by its address.
pub type Begin = unsafe extern "C" fn(c_int, Pool, *mut c_void);
/// `void end_allocate_to_pool(int device, MempoolId_t pool)`, and `release_pool` alike.
pub type End = unsafe extern "C" fn(c_int, Pool);

/// `std::pair<unsigned long long, unsigned long long>`.
#[repr(C)]
pub struct Pool {
    first: u64,
    second: u64,
}

impl Pool {
    const fn id(&self) -> PoolId {
        [self.first, self.second]
    }
}

/// The functions that a whole process's allocator has besides.
#[derive(Clone, Copy)]
pub struct More {
    /// A stream uses a block.
    pub record: Record,
    /// A capture begins.
    pub begin: Begin,
    /// A capture has ended.
    pub end: End,
    /// A graph's memory is released.
    pub release: End,
}

/// `[[noreturn]] void c10::detail::torchCheckFail(const char* function, const char* file, uint32_t line,
/// const char* message)`, which throws.
type CheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char) -> !;

/// For each slot the address of [`CheckFail`], or 0.
static RAISE: [AtomicUsize; SLOTS] = [const { AtomicUsize::new(0) }; SLOTS];

/// Sets how failures of a slot are raised.
pub fn raise_by(slot: usize, address: usize) {
    if let Some(raise) = RAISE.get(slot) {
        raise.store(address, Relaxed);
    }
}

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
        check_fail(
            c"egm_torch_malloc".as_ptr(),
            c"egmem".as_ptr(),
            0,
            text.as_ptr(),
        )
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
        pool.begin_capture(gpu, id.id());
    }
}

unsafe extern "C" fn end<const SLOT: usize>(gpu: c_int, id: Pool) {
    if let Some(pool) = pool(SLOT) {
        pool.end_capture(gpu, id.id());
    }
}

unsafe extern "C" fn release<const SLOT: usize>(_gpu: c_int, id: Pool) {
    if let Some(pool) = pool(SLOT) {
        pool.release_graph(id.id());
    }
}

/// One entry for each slot.
macro_rules! for_slots {
    ($($slot:literal)*) => {
        /// Allocation and free of each slot, in the order of streams.
        pub const FUNCTIONS: [(Allocate, Free); SLOTS] = [$((allocate::<$slot, false>, free::<$slot>)),*];
        /// Allocation and free of each slot, for segments of PyTorch's caching allocator.
        pub const SEGMENTS: [(Allocate, Free); SLOTS] = [$((allocate::<$slot, true>, free_segment::<$slot>)),*];
        /// The other functions of each slot.
        pub const MORE: [More; SLOTS] = [$(More {
            record: record::<$slot>,
            begin: begin::<$slot>,
            end: end::<$slot>,
            release: release::<$slot>,
        }),*];
    };
}

for_slots!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);

/// Allocates from the first heap that was registered, for `torch.cuda.memory.CUDAPluggableAllocator`, which finds its
/// functions by name. Returns null if there is no room, or no heap yet.
///
/// # Safety
/// `stream` is a live stream of the GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn egm_torch_malloc(
    size: isize,
    gpu: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { allocate::<0, true>(size, gpu, stream) }
}

/// Frees memory of [`egm_torch_malloc`] after all work of all GPUs, as `cudaFree` does.
///
/// # Safety
/// As [`egm_torch_malloc`]; no work that is submitted later uses the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_torch_free(
    memory: *mut c_void,
    size: isize,
    gpu: c_int,
    stream: *mut c_void,
) {
    // SAFETY: the caller's promise.
    unsafe { free_segment::<0>(memory, size, gpu, stream) }
}
