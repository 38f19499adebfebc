//! The calls about streams, events and the work on them.

use std::ffi::{CStr, c_void};
use std::ptr;

use super::abi;
use super::backend::Cuda;
use super::handles::opaque;
use crate::*;

// The SAFETY comments below refer to this: pointers are to live values of the types in CUDA's headers. The
// call fills or reads them before it returns and does not keep them. The driver checks numbers and handles.
// The caller guarantees, by the contract of `Backend`, that nothing uses memory that a call removes.

impl Cuda {
    pub(super) fn stream_create(&self, device: i32) -> Result<StreamHandle> {
        let mut stream = ptr::null_mut();
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api()
                .stream_create(&mut stream, abi::STREAM_NON_BLOCKING)
        })?;
        Ok(StreamHandle {
            device,
            raw: stream as u64,
        })
    }

    pub(super) unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: as said above; the stream lives until here by the caller's contract.
        self.on_stream(stream, |raw| unsafe { self.api().stream_destroy(raw) })
    }

    pub(super) unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: as said above; the stream lives.
        self.on_stream(stream, |raw| unsafe { self.api().stream_synchronize(raw) })
    }

    pub(super) unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: as said above; the stream lives.
        done(self.on_stream(stream, |raw| unsafe { self.api().stream_query(raw) }))
    }

    pub(super) unsafe fn stream_wait_event(
        &self,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<()> {
        // SAFETY: as said above; stream and event live, the flags 0 are the default.
        self.on_stream(stream, |raw| unsafe {
            self.api().stream_wait_event(raw, opaque(event.0), 0)
        })
    }

    pub(super) unsafe fn stream_is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        let mut status = abi::STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: as said above; the stream lives, `status` is a live integer.
        self.on_stream(stream, |raw| unsafe {
            self.api().stream_is_capturing(raw, &mut status)
        })?;
        Ok(status != abi::STREAM_CAPTURE_STATUS_NONE)
    }

    pub(super) fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut mode = mode.0;
        // SAFETY: as said above; `mode` is a live integer.
        unsafe { self.api().thread_exchange_capture_mode(&mut mode)? };
        Ok(CaptureMode(mode))
    }

    pub(super) fn ctx_synchronize(&self, device: i32) -> Result<()> {
        // SAFETY: as said above.
        self.core
            .on(device, || unsafe { self.api().ctx_synchronize() })
    }

    pub(super) fn event_create(&self, device: i32, timing: bool) -> Result<EventHandle> {
        let flags = if timing {
            abi::EVENT_DEFAULT
        } else {
            abi::EVENT_DISABLE_TIMING
        };
        let mut event = ptr::null_mut();
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api().event_create(&mut event, flags)
        })?;
        let event = EventHandle(event as u64);
        self.core.events().insert(event, device);
        Ok(event)
    }

    pub(super) unsafe fn event_destroy(&self, event: EventHandle) -> Result<()> {
        // Removed first: once the event is destroyed, another thread may get the same handle for a new event.
        let device = self.core.events().remove(&event);
        // SAFETY: as said above; the event lives until here by the caller's contract.
        let destroy = || unsafe { self.api().event_destroy(opaque(event.0)) };
        match device {
            Some(device) => self.core.on(device, destroy),
            None => destroy(),
        }
    }

    pub(super) unsafe fn event_record(
        &self,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: as said above; stream and event live.
        self.on_stream(stream, |raw| unsafe {
            self.api().event_record(opaque(event.0), raw)
        })
    }

    pub(super) unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        // SAFETY: as said above; the event lives.
        self.core.at_event(event, || unsafe {
            self.api().event_synchronize(opaque(event.0))
        })
    }

    pub(super) unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: as said above; the event lives.
        done(
            self.core
                .at_event(event, || unsafe { self.api().event_query(opaque(event.0)) }),
        )
    }

    pub(super) unsafe fn event_elapsed_ms(
        &self,
        start: EventHandle,
        end: EventHandle,
    ) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: as said above; the events live.
        self.core.at_event(end, || unsafe {
            self.api()
                .event_elapsed_time(&mut milliseconds, opaque(start.0), opaque(end.0))
        })?;
        Ok(milliseconds)
    }

    pub(super) unsafe fn memcpy_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: as said above; the caller guarantees the ranges.
        self.on_stream(stream, |raw| unsafe {
            self.api().memcpy_async(dst.0, src.0, bytes as usize, raw)
        })
    }

    pub(super) unsafe fn memcpy_batch_async(
        &self,
        copies: &[MemcpyDesc],
        stream: StreamHandle,
    ) -> Result<()> {
        let mut dsts: Vec<u64> = copies.iter().map(|copy| copy.dst.0).collect();
        let mut srcs: Vec<u64> = copies.iter().map(|copy| copy.src.0).collect();
        let mut sizes: Vec<usize> = copies.iter().map(|copy| copy.bytes as usize).collect();
        let mut attributes = abi::MemcpyAttributes {
            src_access_order: abi::MEMCPY_SRC_ACCESS_ORDER_STREAM,
            ..Default::default()
        };
        // The attributes count from copy 0 on.
        let (mut first, mut failed) = (0, 0);
        // SAFETY: as said above; each list has `copies.len()` values, the attributes one. The caller guarantees the ranges.
        self.on_stream(stream, |raw| unsafe {
            self.api().memcpy_batch_async(
                dsts.as_mut_ptr(),
                srcs.as_mut_ptr(),
                sizes.as_mut_ptr(),
                copies.len(),
                &mut attributes,
                &mut first,
                1,
                &mut failed,
                raw,
            )
        })
    }

    pub(super) unsafe fn memset_d8_async(
        &self,
        dst: DevicePtr,
        value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: as said above; the caller guarantees the range.
        self.on_stream(stream, |raw| unsafe {
            self.api()
                .memset_d8_async(dst.0, value, bytes as usize, raw)
        })
    }

    pub(super) unsafe fn module_load(&self, device: i32, ptx: &CStr) -> Result<ModuleHandle> {
        let mut module = ptr::null_mut();
        // SAFETY: as said above; PTX is read up to its NUL.
        self.core.on(device, || unsafe {
            self.api().module_load_data(&mut module, ptx.as_ptr())
        })?;
        Ok(ModuleHandle(module as u64))
    }

    pub(super) unsafe fn module_unload(&self, device: i32, module: ModuleHandle) -> Result<()> {
        // SAFETY: as said above; the module lives until here by the caller's contract.
        self.core.on(device, || unsafe {
            self.api().module_unload(opaque(module.0))
        })
    }

    pub(super) unsafe fn module_function(
        &self,
        device: i32,
        module: ModuleHandle,
        name: &CStr,
    ) -> Result<FunctionHandle> {
        let mut function = ptr::null_mut();
        // SAFETY: as said above; the module lives.
        self.core.on(device, || unsafe {
            self.api()
                .module_get_function(&mut function, opaque(module.0), name.as_ptr())
        })?;
        Ok(FunctionHandle(function as u64))
    }

    pub(super) unsafe fn launch_kernel(
        &self,
        function: FunctionHandle,
        dims: LaunchDims,
        args: &[u64],
        stream: StreamHandle,
    ) -> Result<()> {
        let mut params: Vec<*mut c_void> = args
            .iter()
            .map(|arg| ptr::from_ref(arg).cast_mut().cast())
            .collect();
        // SAFETY: as said above. The driver copies the arguments and does not write them; the caller
        // guarantees that their number and widths are the kernel's.
        self.on_stream(stream, |raw| unsafe {
            self.api().launch_kernel(
                opaque(function.0),
                dims.blocks,
                1,
                1,
                dims.threads,
                1,
                1,
                0,
                raw,
                params.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
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
