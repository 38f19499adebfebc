//! A heap's statistics.

use std::ffi::c_char;
use std::ptr::NonNull;

use super::egm_heap;
use crate::call::call;
use crate::failure::{Failure, Outcome};
use crate::{args, egm_status, text};

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
    heap: *const egm_heap,
    out: *mut egm_heap_stats,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let heap = unsafe { args::object(heap, "heap")? };
        // SAFETY: the caller's promise.
        unsafe { write(args::out(out, "out")?, heap) }
    })
}

/// Gives all statistics as JSON, those of each size class too. Free the text by egm_string_free().
///
/// # Safety
/// `heap` is null or a heap; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_heap_stats_json(
    heap: *const egm_heap,
    out: *mut *mut c_char,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let heap = unsafe { args::object(heap, "heap")? };
        let out = args::out(out, "out")?;
        // SAFETY: the caller's promise.
        unsafe { text::give_json(out, &heap.heap().stats()) }
    })
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
