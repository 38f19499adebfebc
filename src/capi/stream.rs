//! Streams, events, and stream-ordered pools.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;

use egmem::driver::StreamHandle;
use egmem::pool::PoolOptions;
use egmem::{Error, Event, Pool, Stream};

use crate::args::{handle, read_handle_types};
use crate::buffer::pointer;
use crate::failure::Outcome;
use crate::options::{With, check_flags, read, read_gpus};
use crate::{
    EGM_OVERCOMMIT, answer, args, ask, call, destroy, egm_buffer, egm_driver, egm_pool_options,
    egm_status, make, noted, on,
};

/// A stream: orders the work of one GPU. Any thread may use it, several at a time.
pub struct egm_stream(pub(crate) Stream);

/// A point in a stream's work. Any thread may use it, several at a time.
pub struct egm_event(pub(crate) Arc<Event>);

/// Creates a stream on a GPU, which the legacy default stream does not wait for.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_create(
    driver: Option<&egm_driver>,
    gpu: i32,
    out: Option<&mut MaybeUninit<*mut egm_stream>>,
) -> egm_status {
    make(driver, out, |driver| {
        Ok(egm_stream(Stream::new(&driver.0, gpu)?))
    })
}

/// Names a stream of the program's own.
pub(crate) fn borrowed_handle(gpu: i32, handle: *mut c_void) -> StreamHandle {
    let raw = handle.expose_provenance() as u64;
    StreamHandle { device: gpu, raw }
}

/// Wraps a stream of the program's own, a `CUstream` or `cudaStream_t`. Destroying the result leaves that stream as
/// it is.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. `handle` is a stream of the primary context of GPU
/// `gpu`, and outlives the result and all pool memory that was allocated or used on it. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_borrow(
    driver: Option<&egm_driver>,
    gpu: i32,
    handle: *mut c_void,
    out: Option<&mut MaybeUninit<*mut egm_stream>>,
) -> egm_status {
    make(driver, out, |driver| {
        Error::expect_gpu(gpu, driver.0.device_count()?)?;
        let handle = borrowed_handle(gpu, handle);
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrowed(&driver.0, handle) };
        Ok(egm_stream(stream))
    })
}

/// Returns the driver's handle, for calls of CUDA: a `CUstream`. It is valid until the stream is destroyed.
///
/// # Safety
/// `stream` is null or a stream; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_handle(
    stream: Option<&egm_stream>,
    out: Option<&mut MaybeUninit<*mut c_void>>,
) -> egm_status {
    ask(stream, out, |stream| Ok(pointer(stream.0.handle().raw)))
}

/// Waits until all work on the stream is done. Fails with the error of earlier work.
///
/// # Safety
/// `stream` is null or a stream. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_synchronize(stream: Option<&egm_stream>) -> egm_status {
    call(|| Ok(handle(stream)?.0.synchronize()?))
}

/// Tells whether all work on the stream is done. Fails with the error of earlier work.
///
/// # Safety
/// `stream` is null or a stream; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_is_done(
    stream: Option<&egm_stream>,
    out: Option<&mut MaybeUninit<bool>>,
) -> egm_status {
    answer(out, || Ok(handle(stream)?.0.is_done()?))
}

/// Destroys a stream; work in flight continues, and pool memory that was allocated on it keeps it. A null pointer is
/// left alone.
///
/// # Safety
/// `stream` is null, or a stream that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_destroy(stream: *mut egm_stream) -> egm_status {
    // SAFETY: the caller's promise.
    unsafe { destroy(stream) }
}

/// Creates an event on a GPU.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_create(
    driver: Option<&egm_driver>,
    gpu: i32,
    out: Option<&mut MaybeUninit<*mut egm_event>>,
) -> egm_status {
    make(driver, out, |driver| {
        Ok(egm_event(Event::new(&driver.0, gpu, false)?.into()))
    })
}

/// Creates an event on a GPU that can be sent to other processes by egm_channel_send_event(), so that GPU work of one waits
/// for work of the other with no CPU in between. Streams of its GPU alone record it and wait for it, unless they are being
/// captured into a graph.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_create_interprocess(
    driver: Option<&egm_driver>,
    gpu: i32,
    out: Option<&mut MaybeUninit<*mut egm_event>>,
) -> egm_status {
    make(driver, out, |driver| {
        Ok(egm_event(Event::interprocess(&driver.0, gpu)?.into()))
    })
}

/// Makes work submitted to a stream from now on wait for an event: for its last record before this call, by any process
/// that has it. Returns at once.
///
/// Of an event that processes share, fails with ::EGM_INVALID_ARGUMENT for a stream of another GPU than the event's and for
/// one that is being captured into a graph, and with ::EGM_SYSTEM if the process that made the event has ended.
///
/// # Safety
/// `stream` is null or a stream; `event` is null or an event. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_wait_event(
    stream: Option<&egm_stream>,
    event: Option<&egm_event>,
) -> egm_status {
    on(stream, |stream| Ok(stream.0.wait(&handle(event)?.0)?))
}

/// Marks the work submitted to a stream so far. Fails while blocks wait for the work that the event marks now, and as
/// egm_stream_wait_event().
///
/// # Safety
/// `event` is null or an event; `stream` is null or a stream. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_record(
    event: Option<&egm_event>,
    stream: Option<&egm_stream>,
) -> egm_status {
    on(event, |event| Ok(event.0.record(&handle(stream)?.0)?))
}

/// Waits until the marked work is done; at once if the event was never recorded. Fails with ::EGM_SYSTEM for an event of
/// another process that has ended before the work.
///
/// # Safety
/// `event` is null or an event. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_synchronize(event: Option<&egm_event>) -> egm_status {
    on(event, |event| Ok(event.0.synchronize()?))
}

/// Destroys an event; blocks that wait for it keep it, and so do processes that it was sent to. A null pointer is left alone.
///
/// # Safety
/// `event` is null, or an event that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_destroy(event: *mut egm_event) -> egm_status {
    // SAFETY: the caller's promise.
    unsafe { destroy(event) }
}

/// A memory pool, whose allocations happen in the order of a stream. Any thread may use it, several at a time.
pub struct egm_pool(pub(crate) Pool);

/// The bytes of a pool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_pool_stats {
    /// Held from the system now.
    pub reserved: u64,
    /// The most that was ever held.
    pub reserved_high: u64,
    /// Allocated now.
    pub used: u64,
    /// The most that was ever allocated.
    pub used_high: u64,
}

/// Creates a pool and grants access. It takes no memory before the first allocation.
///
/// # Safety
/// `driver` is null or a driver; `options` is null or points to as many bytes as its first field says; `out` is null
/// or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_create(
    driver: Option<&egm_driver>,
    options: *const egm_pool_options,
    out: Option<&mut MaybeUninit<*mut egm_pool>>,
) -> egm_status {
    make(driver, out, |driver| {
        // SAFETY: the caller's promise.
        unsafe { create_pool(driver, &read(options)?) }
    })
}

/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn create_pool(driver: &egm_driver, options: &egm_pool_options) -> Outcome<egm_pool> {
    check_flags(options.flags, EGM_OVERCOMMIT)?;
    // SAFETY: the caller's promise.
    let gpus = unsafe { read_gpus(options.gpus, options.gpu_count)? };
    // SAFETY: the caller's promise.
    let label = unsafe { args::optional_text(options.label, "label")? };
    let build = Pool::options(options.location.read()?)
        .max_size(options.max_size)
        .release_threshold(options.release_threshold)
        .handle_types(read_handle_types(options.handle_types)?)
        .overcommit(options.flags & EGM_OVERCOMMIT != 0)
        .with(gpus, PoolOptions::access_by)
        .with(label, PoolOptions::label);
    Ok(egm_pool(build.create(&driver.0)?))
}

/// Allocates `bytes`, usable by work that is submitted to `stream` from now on. Destroy the buffer by
/// egm_buffer_free_on(), or by egm_buffer_destroy().
///
/// Fails with ::EGM_INVALID_ARGUMENT for 0 bytes, ::EGM_NODE_TOO_FULL, ::EGM_OUT_OF_MEMORY.
///
/// # Safety
/// `pool` is null or a pool; `stream` is null or a stream; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_alloc(
    pool: Option<&egm_pool>,
    bytes: u64,
    stream: Option<&egm_stream>,
    out: Option<&mut MaybeUninit<*mut egm_buffer>>,
) -> egm_status {
    let allocate = |pool: &egm_pool| {
        let memory = pool.0.allocate(bytes, &handle(stream)?.0)?;
        Ok(egm_buffer::Pool(memory))
    };
    noted(|| make(pool, out, allocate))
}

/// Returns the pool's bytes.
///
/// # Safety
/// `pool` is null or a pool; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_get_stats(
    pool: Option<&egm_pool>,
    out: Option<&mut MaybeUninit<egm_pool_stats>>,
) -> egm_status {
    ask(pool, out, |pool| {
        let stats = pool.0.stats()?;
        Ok(egm_pool_stats {
            reserved: stats.reserved,
            reserved_high: stats.reserved_high,
            used: stats.used,
            used_high: stats.used_high,
        })
    })
}

/// Gives free memory back to the system until `keep` bytes are held, or no more is free.
///
/// # Safety
/// `pool` is null or a pool. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_trim(pool: Option<&egm_pool>, keep: u64) -> egm_status {
    on(pool, |pool| Ok(pool.0.trim_to(keep)?))
}

/// Destroys a pool; its buffers keep its memory until they are destroyed. A null pointer is left alone.
///
/// # Safety
/// `pool` is null, or a pool that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_destroy(pool: *mut egm_pool) -> egm_status {
    // SAFETY: the caller's promise.
    unsafe { destroy(pool) }
}
