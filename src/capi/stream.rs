//! Streams and events.

use std::ffi::c_void;
use std::sync::Arc;

use egmem::driver::StreamHandle;
use egmem::{Driver, Error, Event, Stream};

use crate::buffer::pointer;
use crate::call::call;
use crate::driver::create;
use crate::{args, egm_driver, egm_status};

/// A stream: orders the work of one GPU. Any thread may use it, several at a time.
pub struct egm_stream {
    pub(crate) stream: Stream,
}

/// A point in a stream's work. Any thread may use it, several at a time.
pub struct egm_event {
    pub(crate) event: Arc<Event>,
}

impl egm_event {
    pub(crate) fn of(event: Event) -> Self {
        let event = Arc::new(event);
        Self { event }
    }
}

/// Creates a stream on a GPU, which the legacy default stream does not wait for.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_create(
    driver: *const egm_driver,
    gpu: i32,
    out: *mut *mut egm_stream,
) -> egm_status {
    let make = |driver: &Driver| {
        Ok(egm_stream {
            stream: Stream::new(driver, gpu)?,
        })
    };
    // SAFETY: the caller's promise.
    unsafe { create(driver, out, make) }
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
    driver: *const egm_driver,
    gpu: i32,
    handle: *mut c_void,
    out: *mut *mut egm_stream,
) -> egm_status {
    let make = |driver: &Driver| {
        Error::expect_gpu(gpu, driver.device_count()?)?;
        let handle = borrowed_handle(gpu, handle);
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrowed(driver, handle) };
        Ok(egm_stream { stream })
    };
    // SAFETY: the caller's promise.
    unsafe { create(driver, out, make) }
}

/// Returns the driver's handle, for calls of CUDA: a `CUstream`. It is valid until the stream is destroyed.
///
/// # Safety
/// `stream` is null or a stream; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_handle(
    stream: *const egm_stream,
    out: *mut *mut c_void,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let stream = unsafe { args::object(stream, "stream")? };
        let out = args::out(out, "out")?;
        // SAFETY: the caller's promise.
        unsafe { out.write(pointer(stream.stream.handle().raw)) };
        Ok(())
    })
}

/// Waits until all work on the stream is done. Fails with the error of earlier work.
///
/// # Safety
/// `stream` is null or a stream. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_synchronize(stream: *const egm_stream) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let stream = unsafe { args::object(stream, "stream")? };
        Ok(stream.stream.synchronize()?)
    })
}

/// Tells whether all work on the stream is done. Fails with the error of earlier work.
///
/// # Safety
/// `stream` is null or a stream; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_is_done(
    stream: *const egm_stream,
    out: *mut bool,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let stream = unsafe { args::object(stream, "stream")? };
        let out = args::out(out, "out")?;
        let done = stream.stream.is_done()?;
        // SAFETY: the caller's promise.
        unsafe { out.write(done) };
        Ok(())
    })
}

/// Destroys a stream; work in flight continues, and pool memory that was allocated on it keeps it. A null pointer is
/// left alone.
///
/// # Safety
/// `stream` is null, or a stream that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_stream_destroy(stream: *mut egm_stream) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { args::take(stream) });
        Ok(())
    })
}

/// Creates an event on a GPU.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_create(
    driver: *const egm_driver,
    gpu: i32,
    out: *mut *mut egm_event,
) -> egm_status {
    let make = |driver: &Driver| Ok(egm_event::of(Event::new(driver, gpu, false)?));
    // SAFETY: the caller's promise.
    unsafe { create(driver, out, make) }
}

/// Creates an event on a GPU that can be sent to other processes by egm_channel_send_event(), so that GPU work of one waits
/// for work of the other with no CPU in between. Streams of its GPU alone record it and wait for it, unless they are being
/// captured into a graph.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_create_interprocess(
    driver: *const egm_driver,
    gpu: i32,
    out: *mut *mut egm_event,
) -> egm_status {
    let make = |driver: &Driver| Ok(egm_event::of(Event::interprocess(driver, gpu)?));
    // SAFETY: the caller's promise.
    unsafe { create(driver, out, make) }
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
    stream: *const egm_stream,
    event: *const egm_event,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let stream = unsafe { args::object(stream, "stream")? };
        // SAFETY: the caller's promise.
        let event = unsafe { args::object(event, "event")? };
        Ok(stream.stream.wait(&event.event)?)
    })
}

/// Marks the work submitted to a stream so far. Fails while blocks wait for the work that the event marks now, and as
/// egm_stream_wait_event().
///
/// # Safety
/// `event` is null or an event; `stream` is null or a stream. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_record(
    event: *const egm_event,
    stream: *const egm_stream,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let event = unsafe { args::object(event, "event")? };
        // SAFETY: the caller's promise.
        let stream = unsafe { args::object(stream, "stream")? };
        Ok(event.event.record(&stream.stream)?)
    })
}

/// Waits until the marked work is done; at once if the event was never recorded. Fails with ::EGM_SYSTEM for an event of
/// another process that has ended before the work.
///
/// # Safety
/// `event` is null or an event. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_synchronize(event: *const egm_event) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let event = unsafe { args::object(event, "event")? };
        Ok(event.event.synchronize()?)
    })
}

/// Destroys an event; blocks that wait for it keep it, and so do processes that it was sent to. A null pointer is left alone.
///
/// # Safety
/// `event` is null, or an event that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_event_destroy(event: *mut egm_event) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { args::take(event) });
        Ok(())
    })
}
