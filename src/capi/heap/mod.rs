//! Heaps: blocks of any size in nanoseconds.

mod handle;

use std::ffi::{c_char, c_void};
use std::mem::{self, MaybeUninit};
use std::ptr::NonNull;
use std::sync::Arc;

use egmem::{Block, Error, Stream};

use crate::args::{handle, object, write_backing};
use crate::failure::{Failure, Outcome, given_json};
use crate::options::read;
use crate::stream::borrowed_handle;
use crate::{
    args, ask, call, egm_driver, egm_event, egm_heap_options, egm_status, egm_stream, make, noted,
    on,
};

pub use handle::egm_heap;
use handle::free_now;

/// Creates a heap. It reserves addresses for its limit at once, and adds memory as needed.
///
/// # Safety
/// `driver` is null or a driver; `options` is null or points to as many bytes as its first field says; `out` is null
/// or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_create(
    driver: Option<&egm_driver>,
    options: *const egm_heap_options,
    out: Option<&mut MaybeUninit<*mut egm_heap>>,
) -> egm_status {
    let create = |driver: &egm_driver| {
        // SAFETY: the caller's promise.
        unsafe { egm_heap::create(&driver.0, &read(options)?) }
    };
    noted(|| make(driver, out, create))
}

/// Allocates a block of `size` bytes, at least 1, at a multiple of `align`: a power of two, or 0 for 16. The bytes
/// are not initialised. The address is the same for every GPU and, where the CPU has access, for the CPU; it is valid
/// until the block is freed.
///
/// Fails with ::EGM_INVALID_ARGUMENT for 0 bytes, for more than 1 TiB - 2 MiB, and for a wrong alignment;
/// ::EGM_HEAP_FULL; if the heap has to grow, ::EGM_NODE_TOO_FULL, ::EGM_OUT_OF_MEMORY, and others of the driver.
///
/// # Safety
/// `heap` is null or a heap; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_alloc(
    heap: Option<&egm_heap>,
    size: usize,
    align: usize,
    out: Option<&mut MaybeUninit<*mut c_void>>,
) -> egm_status {
    ask(heap, out, |heap| heap.allocate(size, align))
}

/// As egm_heap_alloc(), with every byte 0. The CPU writes the zeros, or a GPU if the CPU may not write.
///
/// # Safety
/// As egm_heap_alloc().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_alloc_zeroed(
    heap: Option<&egm_heap>,
    size: usize,
    align: usize,
    out: Option<&mut MaybeUninit<*mut c_void>>,
) -> egm_status {
    ask(heap, out, |heap| heap.allocate_zeroed(size, align))
}

/// Frees a block. The heap may hand it out again at once, to any thread: GPU work that uses it has ended. A null
/// pointer is left alone.
///
/// Fails with ::EGM_INVALID_ARGUMENT, and changes nothing, for an address at which no block of the heap in use
/// begins: one of another heap, within a block, or freed before. An address that was freed and allocated again is a
/// block in use.
///
/// # Safety
/// `heap` is null or a heap. No thread and no GPU uses the block at `block`. Any thread may call this, also another
/// than the one that allocated the block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_free(heap: Option<&egm_heap>, block: *mut c_void) -> egm_status {
    // SAFETY: the caller's promise.
    on(heap, |heap| unsafe { heap.free(block, free_now) })
}

/// Frees a block once all work submitted to `stream` so far has run. The call does not wait. A null block is left
/// alone.
///
/// Where the call fails, the block is not freed: wait for the GPU's work and free it by egm_heap_free().
///
/// # Safety
/// As egm_heap_free(), but work that was submitted to `stream` before may use the block; `stream` is null or a
/// stream. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_free_after(
    heap: Option<&egm_heap>,
    block: *mut c_void,
    stream: Option<&egm_stream>,
) -> egm_status {
    on(heap, |heap| {
        let stream = handle(stream)?;
        // SAFETY: the caller's promise.
        unsafe { heap.free(block, |block| block.free_after(&stream.0)) }
    })
}

/// As egm_heap_free_after(), for a stream of the program's own, a `CUstream` or `cudaStream_t`.
///
/// # Safety
/// As egm_heap_free_after(). `handle` is a stream of the primary context of GPU `gpu`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_free_after_cuda_stream(
    heap: Option<&egm_heap>,
    block: *mut c_void,
    gpu: i32,
    handle: *mut c_void,
) -> egm_status {
    on(heap, |heap| {
        let (driver, handle) = (heap.heap().driver(), borrowed_handle(gpu, handle));
        // SAFETY: the caller promises a stream, which is used within this call only: the heap keeps an event.
        let stream = unsafe { Stream::borrowed(driver, handle) };
        // SAFETY: the caller's promise.
        unsafe { heap.free(block, |block| block.free_after(&stream)) }.map_err(|failure| {
            let count = driver.device_count().unwrap_or(i32::MAX);
            Error::expect_gpu(gpu, count).map_or_else(Failure::from, |()| failure)
        })
    })
}

/// Frees a block once the work that `event` currently marks has run. Do not record the event again before then. As
/// egm_heap_free_after() otherwise.
///
/// Fails with ::EGM_INVALID_ARGUMENT for an event of several processes, which another process can record again: use
/// egm_heap_free_after().
///
/// # Safety
/// As egm_heap_free_after(), for work that `event` marks; `event` is null or an event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_free_after_event(
    heap: Option<&egm_heap>,
    block: *mut c_void,
    event: Option<&egm_event>,
) -> egm_status {
    on(heap, |heap| {
        let event = handle(event)?;
        let after = |block: Block| block.free_after_event(Arc::clone(&event.0));
        // SAFETY: the caller's promise.
        unsafe { heap.free(block, after) }
    })
}

/// Resizes a block in place and tells by `out` whether that was possible; otherwise nothing changes. Added bytes are
/// not initialised. In a heap in debug mode it is never possible.
///
/// Fails with ::EGM_INVALID_ARGUMENT for an address at which no block in use begins.
///
/// # Safety
/// `heap` is null or a heap; `out` is null or may be written. No thread and no GPU uses the bytes that the block
/// loses, and no other call is made with the block meanwhile. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_resize(
    heap: Option<&egm_heap>,
    block: *mut c_void,
    size: usize,
    out: Option<&mut MaybeUninit<bool>>,
) -> egm_status {
    ask(heap, out, |heap| {
        // SAFETY: the caller's promise.
        unsafe { heap.resize(block, size) }
    })
}

/// Returns the number of bytes that may be used at a block: at least as many as were asked for.
///
/// Fails with ::EGM_INVALID_ARGUMENT for an address at which no block in use begins.
///
/// # Safety
/// `heap` is null or a heap; `out` is null or may be written; no other call frees or resizes the block meanwhile. Any
/// thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_usable_size(
    heap: Option<&egm_heap>,
    block: *const c_void,
    out: Option<&mut MaybeUninit<usize>>,
) -> egm_status {
    ask(heap, out, |heap| Ok(heap.find(block)?.bytes as usize))
}

/// Returns what the heap's memory is, ::EGM_BACKING_DRIVER or ::EGM_BACKING_REGISTERED, and writes why, as text, to
/// `reason` unless it is null. Free the text by egm_string_free().
///
/// # Safety
/// `heap` is null or a heap; `out` and `reason` are null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_backing(
    heap: Option<&egm_heap>,
    out: Option<NonNull<i32>>,
    reason: Option<NonNull<*mut c_char>>,
) -> egm_status {
    on(heap, |heap| {
        // SAFETY: the caller's promise.
        unsafe { write_backing(heap.heap().backing(), out, reason) }
    })
}

/// Adds memory until at least `bytes` are free. Fails as egm_heap_alloc() for a heap that has to grow.
///
/// # Safety
/// `heap` is null or a heap. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_reserve(heap: Option<&egm_heap>, bytes: u64) -> egm_status {
    on(heap, |heap| Ok(heap.heap().reserve(bytes)?))
}

/// Gives unused memory back in whole chunks, but leaves at least `keep` bytes free if there are as many; returns the
/// bytes given back. `out` may be null.
///
/// # Safety
/// `heap` is null or a heap; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_trim(
    heap: Option<&egm_heap>,
    keep: u64,
    out: Option<&mut MaybeUninit<u64>>,
) -> egm_status {
    on(heap, |heap| {
        let given = heap.heap().trim_to(keep)?;
        args::write(out, given);
        Ok(())
    })
}

/// Takes blocks back that were freed after GPU work which has ended by now. With `wait`, waits for the others first:
/// never ends if their work waits for something that this thread has yet to do.
///
/// # Safety
/// `heap` is null or a heap. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_collect(heap: Option<&egm_heap>, wait: bool) -> egm_status {
    on(heap, |heap| {
        if wait {
            heap.heap().collect_all()?;
        } else {
            heap.heap().collect()?;
        }
        Ok(())
    })
}

/// In a heap with ::EGM_DEBUG, checks the guards of all blocks and all freed blocks in quarantine.
///
/// Fails with ::EGM_DAMAGED, whose message names the damage found now and since the last check, each once, and with
/// ::EGM_INVALID_ARGUMENT for a heap that is not in debug mode.
///
/// # Safety
/// `heap` is null or a heap. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_check(heap: Option<&egm_heap>) -> egm_status {
    on(heap, |heap| Ok(heap.heap().check()?))
}

/// Destroys a heap. Its memory is given back once the GPU work that blocks were freed after has ended, for which the
/// call waits, and no shared block is left. A null pointer is left alone.
///
/// Fails with ::EGM_STILL_HELD while blocks are in use: the heap is not destroyed then, and stays usable.
///
/// # Safety
/// `heap` is null, or a heap that no thread uses during the call, nor afterwards if it succeeds: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_destroy(heap: *mut egm_heap) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let Some(found) = (unsafe { heap.as_ref() }) else {
            return Ok(());
        };
        let is_forked = !found.heap().driver().is_of_this_process();
        if !is_forked {
            found.expect_no_blocks()?;
        }
        // SAFETY: the caller's promise.
        let taken = unsafe { args::take(heap) };
        if is_forked {
            mem::forget(taken); // its locks may be held by threads of the parent
        }
        Ok(())
    })
}

/// A heap's statistics at one moment, in bytes and numbers. Set `struct_size` to sizeof(egm_heap_stats) before the
/// call.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct egm_heap_stats {
    /// The size of this structure, by which the library knows the program's version.
    pub struct_size: usize,
    /// Blocks in use.
    pub live_blocks: u64,
    /// Bytes of these blocks. A block of up to 2 KiB counts with its usable size.
    pub live: u64,
    /// Bytes taken by these blocks and the deferred ones, including rounding.
    pub used: u64,
    /// Bytes in threads' caches.
    pub cached: u64,
    /// Freed blocks whose GPU work has not ended.
    pub deferred_blocks: u64,
    /// Free bytes outside slabs of small blocks.
    pub free: u64,
    /// The largest free range.
    pub largest_free: u64,
    /// The memory that the heap has.
    pub backed: u64,
    /// The most memory that the heap ever had.
    pub backed_high_water: u64,
    /// The most memory that the heap may have.
    pub limit: u64,
    /// The size of the heap's tables, in the process's ordinary memory; with the most that the table of this
    /// interface can have.
    pub metadata: u64,
    /// Blocks allocated since the heap was made.
    pub allocated_blocks: u64,
    /// Blocks freed since then.
    pub freed_blocks: u64,
    /// Allocations that failed.
    pub failed: u64,
}

/// Returns the heap's statistics. Set `out->struct_size` to sizeof(egm_heap_stats) before the call.
///
/// Takes microseconds or, with much memory in small blocks, longer. Threads that need more than their caches hold
/// wait meanwhile.
///
/// # Safety
/// `heap` is null or a heap; `out` is null or points to as many bytes as its first field says. Any thread may call
/// this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_get_stats(
    heap: Option<&egm_heap>,
    out: *mut egm_heap_stats,
) -> egm_status {
    on(heap, |heap| {
        let out = object(NonNull::new(out), "out")?;
        // SAFETY: the caller's promise.
        unsafe { write(out, heap) }
    })
}

/// Gives all statistics as JSON, those of each size class too. Free the text by egm_string_free().
///
/// # Safety
/// `heap` is null or a heap; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_stats_json(
    heap: Option<&egm_heap>,
    out: Option<&mut MaybeUninit<*mut c_char>>,
) -> egm_status {
    ask(heap, out, |heap| given_json(&heap.heap().stats()))
}

/// Writes the statistics, as far as the program's structure has room.
///
/// # Safety
/// `out` points to as many bytes as its first field says.
unsafe fn write(out: NonNull<egm_heap_stats>, heap: &egm_heap) -> Outcome {
    // SAFETY: the caller promises its first field.
    let size = unsafe { out.cast::<usize>().read() };
    if size < size_of::<usize>() || size > 1 << 16 {
        let why = format!("{size}: set it to the size of the structure before the call");
        return Err(Failure::invalid("struct_size", why));
    }
    let known = size.min(size_of::<egm_heap_stats>());
    let found = heap.heap().stats();
    let stats = egm_heap_stats {
        struct_size: known,
        live_blocks: found.live_blocks,
        live: found.live,
        used: found.used,
        cached: found.cached,
        deferred_blocks: found.deferred_blocks,
        free: found.free,
        largest_free: found.largest_free,
        backed: found.backed,
        backed_high_water: found.backed_high_water,
        limit: found.limit,
        metadata: found.metadata + heap.metadata(found.backed_high_water),
        allocated_blocks: found.allocated_blocks,
        freed_blocks: found.freed_blocks,
        failed: found.failed,
    };
    // SAFETY: the caller promises `size` bytes, and `stats` has no padding: its fields are words.
    unsafe {
        out.cast::<u8>()
            .copy_from_nonoverlapping(NonNull::from(&stats).cast(), known);
    }
    Ok(())
}
