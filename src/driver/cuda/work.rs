//! The calls about streams, events and the work on them.

use std::ffi::CStr;
use std::ptr;

use super::abi;
use super::core::{Core, methods};
use super::handles::{self, opaque};
use crate::*;

impl Core {
    pub(super) unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        done(unsafe { self.query_stream(stream) })
    }

    pub(super) unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        done(unsafe { self.query_event(event) })
    }

    methods! { |this|
    [pub(super) fn] stream_create(device: i32) -> StreamHandle {
        let mut stream = ptr::null_mut();
        @on(device) stream_create(&mut stream, abi::STREAM_NON_BLOCKING)
            => StreamHandle { device, raw: stream as u64 }
    }
    [pub(super) unsafe fn] stream_destroy(stream: StreamHandle) -> () {
        @on(stream.device) stream_destroy(opaque(stream.raw)) => ()
    }
    [pub(super) unsafe fn] stream_synchronize(stream: StreamHandle) -> () {
        @on(stream.device) stream_synchronize(opaque(stream.raw)) => ()
    }
    [unsafe fn] query_stream(stream: StreamHandle) -> () {
        @on(stream.device) stream_query(opaque(stream.raw)) => ()
    }
    [pub(super) unsafe fn] stream_wait_event(stream: StreamHandle, event: EventHandle) -> () {
        @on(stream.device) stream_wait_event(opaque(stream.raw), opaque(event.raw), 0) => ()
    }
    [pub(super) unsafe fn] stream_is_capturing(stream: StreamHandle) -> bool {
        let mut status = abi::STREAM_CAPTURE_STATUS_NONE;
        @on(stream.device) stream_is_capturing(opaque(stream.raw), &mut status)
            => status != abi::STREAM_CAPTURE_STATUS_NONE
    }
    [pub(super) fn] thread_exchange_capture_mode(mode: CaptureMode) -> CaptureMode {
        let mut mode = mode.0;
        @here() thread_exchange_capture_mode(&mut mode) => CaptureMode(mode)
    }
    [pub(super) fn] ctx_synchronize(device: i32) -> () {
        @on(device) ctx_synchronize() => ()
    }
    [pub(super) fn] event_create(device: i32, timing: bool) -> EventHandle {
        let flags = if timing { abi::EVENT_DEFAULT } else { abi::EVENT_DISABLE_TIMING };
        let mut event = ptr::null_mut();
        @on(device) event_create(&mut event, flags) => EventHandle { device, raw: event as u64 }
    }
    [pub(super) fn] event_create_interprocess(device: i32) -> EventHandle {
        let flags = abi::EVENT_DISABLE_TIMING | abi::EVENT_INTERPROCESS;
        let mut event = ptr::null_mut();
        @on(device) event_create(&mut event, flags) => EventHandle { device, raw: event as u64 }
    }
    [pub(super) unsafe fn] ipc_event_handle(event: EventHandle) -> IpcEventHandle {
        let mut bytes = [0; 64];
        @on(event.device) ipc_get_event_handle(&mut bytes, opaque(event.raw))
            => handles::take_event_handle(&mut bytes)
    }
    [pub(super) unsafe fn] ipc_open_event(device: i32, handle: &IpcEventHandle) -> EventHandle {
        let mut event = ptr::null_mut();
        @on(device) ipc_open_event_handle(&mut event, abi::IpcEventBytes(*handle.expose_bytes()))
            => EventHandle { device, raw: event as u64 }
    }
    [pub(super) unsafe fn] event_destroy(event: EventHandle) -> () {
        @on(event.device) event_destroy(opaque(event.raw)) => ()
    }
    [pub(super) unsafe fn] event_record(event: EventHandle, stream: StreamHandle) -> () {
        @on(stream.device) event_record(opaque(event.raw), opaque(stream.raw)) => ()
    }
    [pub(super) unsafe fn] event_synchronize(event: EventHandle) -> () {
        @on(event.device) event_synchronize(opaque(event.raw)) => ()
    }
    [unsafe fn] query_event(event: EventHandle) -> () {
        @on(event.device) event_query(opaque(event.raw)) => ()
    }
    [pub(super) unsafe fn] event_elapsed_ms(start: EventHandle, end: EventHandle) -> f32 {
        let mut milliseconds = 0.0;
        @on(end.device)
            event_elapsed_time(&mut milliseconds, opaque(start.raw), opaque(end.raw)) => milliseconds
    }
    [pub(super) unsafe fn] memcpy_async
        (dst: DevicePtr, src: DevicePtr, bytes: u64, stream: StreamHandle) -> () {
        @on(stream.device) memcpy_async(dst.0, src.0, bytes as usize, opaque(stream.raw)) => ()
    }
    [pub(super) unsafe fn] memcpy_batch_async(copies: &[MemcpyDesc], stream: StreamHandle) -> () {
        let mut dsts = Vec::from_iter(copies.iter().map(|copy| copy.dst.0));
        let mut srcs = Vec::from_iter(copies.iter().map(|copy| copy.src.0));
        let mut sizes = Vec::from_iter(copies.iter().map(|copy| copy.bytes as usize));
        let mut attributes = abi::MemcpyAttributes {
            src_access_order: abi::MEMCPY_SRC_ACCESS_ORDER_STREAM,
            ..Default::default()
        };
        // Each list has `copies.len()` values. There is one set of attributes, which counts from copy 0 on.
        let (mut first, mut failed) = (0, 0);
        @on(stream.device) memcpy_batch_async(
            dsts.as_mut_ptr(), srcs.as_mut_ptr(), sizes.as_mut_ptr(), copies.len(),
            &mut attributes, &mut first, 1, &mut failed, opaque(stream.raw)
        ) => ()
    }
    [pub(super) unsafe fn] memset_d8_async
        (dst: DevicePtr, value: u8, bytes: u64, stream: StreamHandle) -> () {
        @on(stream.device) memset_d8_async(dst.0, value, bytes as usize, opaque(stream.raw)) => ()
    }
    [pub(super) unsafe fn] module_load(device: i32, ptx: &CStr) -> ModuleHandle {
        let mut module = ptr::null_mut();
        @on(device) module_load_data(&mut module, ptx.as_ptr()) => ModuleHandle(module as u64)
    }
    [pub(super) unsafe fn] module_unload(device: i32, module: ModuleHandle) -> () {
        @on(device) module_unload(opaque(module.0)) => ()
    }
    [pub(super) unsafe fn] module_function(device: i32, module: ModuleHandle, name: &CStr) -> FunctionHandle {
        let mut function = ptr::null_mut();
        @on(device) module_get_function(&mut function, opaque(module.0), name.as_ptr())
            => FunctionHandle(function as u64)
    }
    [pub(super) unsafe fn] launch_kernel
        (function: FunctionHandle, dims: LaunchDims, args: &[u64], stream: StreamHandle) -> () {
        // The driver copies the arguments and does not write them. It reads as many as the kernel has.
        let mut params = Vec::from_iter(args.iter().map(|arg| ptr::from_ref(arg).cast_mut().cast()));
        @on(stream.device) launch_kernel(
            opaque(function.0), dims.blocks, 1, 1, dims.threads, 1, 1, 0, opaque(stream.raw),
            params.as_mut_ptr(), ptr::null_mut()
        ) => ()
    }
    }
}

/// Returns whether work is done: `NOT_READY` is an answer, not a failure.
fn done(result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.code() == Some(Code::NOT_READY) => Ok(false),
        Err(error) => Err(error),
    }
}
