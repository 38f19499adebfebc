//! The seam's calls on libcuda.

use std::ffi::{CStr, c_char, c_void};
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::{Arc, OnceLock};

use super::abi::{self, MemAccessDesc, MemAllocationProp, MemLocation};
use super::core::Core;
use super::fd;
use super::handles::{export, import, opaque};
use super::runtime::Runtime;
use super::symbols::{DriverApi, Opaque};
use crate::Result;
use crate::*;

/// Opens the CUDA driver of this machine.
pub(crate) fn open() -> Result<Arc<dyn Backend>> {
    let core = Core::open()?;
    Ok(Arc::new(Cuda {
        core: Arc::new(core),
        runtime: OnceLock::new(),
    }))
}

/// The backend: the driver API, and the runtime API once it is used.
#[derive(Debug)]
struct Cuda {
    core: Arc<Core>,
    runtime: OnceLock<Result<Runtime>>,
}

/// Reads a string that `read` writes, NUL-terminated, into a buffer of the given length.
fn string(read: impl FnOnce(*mut c_char, i32) -> Result<()>) -> Result<String> {
    let mut buffer = [0_u8; 256];
    // One byte less, so that the text ends with a NUL whatever the driver does.
    read(buffer.as_mut_ptr().cast(), buffer.len() as i32 - 1)?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

// The SAFETY comments below refer to this: pointers are to live values of the types in CUDA's headers. The
// call fills or reads them before it returns and does not keep them. The driver checks numbers and handles.
// The caller guarantees, by the contract of `Backend`, that nothing uses memory that a call removes.

// SAFETY: each method makes the call that it is named after and reports its result.
unsafe impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn driver_pools(&self) -> &dyn PoolCalls {
        &*self.core
    }

    fn runtime_pools(&self) -> Result<&dyn PoolCalls> {
        let runtime = self.runtime.get_or_init(|| Runtime::open(&self.core));
        match runtime {
            Ok(runtime) => Ok(runtime),
            Err(error) => Err(error.clone()),
        }
    }

    fn driver_version(&self) -> Result<CudaVersion> {
        let mut version = 0;
        // SAFETY: as said above.
        unsafe { self.api().driver_get_version(&mut version)? };
        Ok(CudaVersion(version))
    }

    fn device_count(&self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: as said above.
        unsafe { self.api().device_get_count(&mut count)? };
        Ok(count)
    }

    fn device_name(&self, device: i32) -> Result<String> {
        let device = self.core.device(device)?;
        // SAFETY: as said above; the buffer is as long as said.
        string(|text, len| unsafe { self.api().device_get_name(text, len, device) })
    }

    fn device_uuid(&self, device: i32) -> Result<[u8; 16]> {
        let device = self.core.device(device)?;
        let mut uuid = [0; 16];
        // SAFETY: as said above.
        unsafe { self.api().device_get_uuid(&mut uuid, device)? };
        Ok(uuid)
    }

    fn device_pci_bus_id(&self, device: i32) -> Result<String> {
        let device = self.core.device(device)?;
        // SAFETY: as said above; the buffer is as long as said.
        string(|text, len| unsafe { self.api().device_get_pci_bus_id(text, len, device) })
    }

    fn device_total_mem(&self, device: i32) -> Result<u64> {
        let device = self.core.device(device)?;
        let mut bytes = 0;
        // SAFETY: as said above.
        unsafe { self.api().device_total_mem(&mut bytes, device)? };
        Ok(bytes as u64)
    }

    fn device_attribute(&self, device: i32, attribute: DeviceAttribute) -> Result<i32> {
        let device = self.core.device(device)?;
        let mut value = 0;
        // SAFETY: as said above. A driver refuses an attribute that it does not know.
        unsafe {
            self.api()
                .device_get_attribute(&mut value, attribute.0, device)?;
        }
        Ok(value)
    }

    fn device_can_access_peer(&self, device: i32, peer: i32) -> Result<bool> {
        let (device, peer) = (self.core.device(device)?, self.core.device(peer)?);
        let mut can = 0;
        // SAFETY: as said above.
        unsafe { self.api().device_can_access_peer(&mut can, device, peer)? };
        Ok(can != 0)
    }

    fn device_p2p_attribute(&self, device: i32, peer: i32, attribute: P2pAttribute) -> Result<i32> {
        let (device, peer) = (self.core.device(device)?, self.core.device(peer)?);
        let mut value = 0;
        // SAFETY: as said above. A driver refuses an attribute that it does not know.
        unsafe {
            self.api()
                .device_get_p2p_attribute(&mut value, attribute.0, device, peer)?;
        }
        Ok(value)
    }

    fn mem_info(&self, device: i32) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api().mem_get_info(&mut free, &mut total)
        })?;
        Ok((free as u64, total as u64))
    }

    fn mem_granularity(&self, props: &AllocationProps, kind: GranularityKind) -> Result<u64> {
        let key = (*props, kind);
        if let Some(bytes) = self.core.granularities().get(&key) {
            return Ok(*bytes);
        }
        let (props, mut bytes) = (MemAllocationProp::from(props), 0);
        // SAFETY: as said above.
        unsafe {
            self.api()
                .mem_get_allocation_granularity(&mut bytes, &props, kind as u32)?;
        }
        self.core.granularities().insert(key, bytes as u64);
        Ok(bytes as u64)
    }

    fn mem_create(&self, size: u64, props: &AllocationProps) -> Result<PhysicalHandle> {
        let (raw, mut handle) = (MemAllocationProp::from(props), 0);
        // SAFETY: as said above; the flags must be 0.
        let created = unsafe { self.api().mem_create(&mut handle, size as usize, &raw, 0) };
        match created {
            Ok(()) => Ok(PhysicalHandle(handle)),
            Err(error) => Err(self.core.age(error, props.location, props.handle_types)),
        }
    }

    unsafe fn mem_release(&self, handle: PhysicalHandle) -> Result<()> {
        // SAFETY: as said above.
        unsafe { self.api().mem_release(handle.0) }
    }

    fn mem_address_reserve(&self, size: u64, alignment: u64, hint: u64) -> Result<DevicePtr> {
        let mut ptr = 0;
        // SAFETY: as said above; the hint is not binding, the flags must be 0.
        unsafe {
            self.api()
                .mem_address_reserve(&mut ptr, size as usize, alignment as usize, hint, 0)?;
        }
        Ok(DevicePtr(ptr))
    }

    unsafe fn mem_address_free(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        // SAFETY: as said above.
        unsafe { self.api().mem_address_free(ptr.0, size as usize) }
    }

    unsafe fn mem_map(
        &self,
        ptr: DevicePtr,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
    ) -> Result<()> {
        // SAFETY: as said above; the flags must be 0.
        unsafe {
            self.api()
                .mem_map(ptr.0, size as usize, offset as usize, handle.0, 0)
        }
    }

    unsafe fn mem_unmap(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        // SAFETY: as said above.
        unsafe { self.api().mem_unmap(ptr.0, size as usize) }
    }

    unsafe fn mem_set_access(
        &self,
        ptr: DevicePtr,
        size: u64,
        access: &[AccessDesc],
    ) -> Result<()> {
        let descs: Vec<MemAccessDesc> = access.iter().map(MemAccessDesc::from).collect();
        // SAFETY: as said above; the count is that of `descs`.
        unsafe {
            self.api()
                .mem_set_access(ptr.0, size as usize, descs.as_ptr(), descs.len())
        }
    }

    fn mem_get_access(&self, location: Location, ptr: DevicePtr) -> Result<u64> {
        let (location, mut flags) = (MemLocation::from(location), 0);
        // SAFETY: as said above.
        unsafe { self.api().mem_get_access(&mut flags, &location, ptr.0)? };
        Ok(flags)
    }

    unsafe fn mem_export(
        &self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Result<ShareableHandle> {
        export(Call::MemExportToShareableHandle, kind, |out, bits| {
            // SAFETY: `out` is to an int or to 64 bytes, as `bits` says; the flags must be 0.
            unsafe { self.api().mem_export(out, handle.0, bits, 0) }
        })
    }

    fn mem_import(&self, handle: &ShareableHandle) -> Result<PhysicalHandle> {
        let mut imported = 0;
        import(handle, |os_handle, bits| {
            // SAFETY: `os_handle` is an open fd's number or to 64 bytes, as `bits` says; the driver
            // checks that they name memory.
            unsafe { self.api().mem_import(&mut imported, os_handle, bits) }
        })?;
        Ok(PhysicalHandle(imported))
    }

    unsafe fn mem_properties(&self, handle: PhysicalHandle) -> Result<AllocationProps> {
        let mut props = MemAllocationProp::ZERO;
        // SAFETY: as said above.
        unsafe { self.api().mem_get_properties(&mut props, handle.0)? };
        props.to_props(Call::MemGetAllocationPropertiesFromHandle)
    }

    fn mem_retain(&self, ptr: DevicePtr) -> Result<PhysicalHandle> {
        let mut handle = 0;
        // SAFETY: as said above; the driver looks the address up and does not follow it.
        unsafe { self.api().mem_retain(&mut handle, opaque(ptr.0))? };
        Ok(PhysicalHandle(handle))
    }

    fn pointer_attribute(&self, ptr: DevicePtr, attribute: PointerAttribute) -> Result<u64> {
        // The widest attribute is 64 bits; narrower ones leave the rest as it is.
        let mut value = 0_u64;
        self.core.anywhere(|| {
            let data = (&raw mut value).cast();
            // SAFETY: `data` is to 8 bytes, which hold each attribute of the enum; the driver looks
            // the address up and does not follow it.
            unsafe {
                self.api()
                    .pointer_get_attribute(data, attribute as i32, ptr.0)
            }
        })?;
        Ok(match attribute {
            PointerAttribute::DeviceOrdinal => i64::from(value as u32 as i32) as u64,
            _ => value,
        })
    }

    fn mem_address_range(&self, ptr: DevicePtr) -> Result<(DevicePtr, u64)> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: as said above; the driver looks the address up and does not follow it.
        self.core.anywhere(|| unsafe {
            self.api()
                .mem_get_address_range(&mut base, &mut size, ptr.0)
        })?;
        Ok((DevicePtr(base), size as u64))
    }

    unsafe fn mem_dma_buf(&self, ptr: DevicePtr, size: u64) -> Result<OwnedFd> {
        let mut raw = -1_i32;
        self.core.anywhere(|| {
            let out = (&raw mut raw).cast();
            // SAFETY: `out` is to an int, which this handle type is; the flags 0 are the default.
            unsafe {
                self.api().mem_get_handle_for_address_range(
                    out,
                    ptr.0,
                    size as usize,
                    abi::DMA_BUF_FD,
                    0,
                )
            }
        })?;
        // SAFETY: the driver has just created the fd for this call and written it.
        unsafe { fd::take(Call::MemGetHandleForAddressRange, raw) }
    }

    fn mem_alloc(&self, device: i32, size: u64) -> Result<DevicePtr> {
        let mut ptr = 0;
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api().mem_alloc(&mut ptr, size as usize)
        })?;
        Ok(DevicePtr(ptr))
    }

    unsafe fn mem_free(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        // SAFETY: as said above.
        self.core
            .on(device, || unsafe { self.api().mem_free(ptr.0) })
    }

    fn mem_host_alloc(&self, device: i32, size: u64) -> Result<DevicePtr> {
        let mut ptr = ptr::null_mut();
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api()
                .mem_host_alloc(&mut ptr, size as usize, abi::HOST_ALLOC_PORTABLE_DEVICEMAP)
        })?;
        Ok(DevicePtr(ptr as u64))
    }

    unsafe fn mem_free_host(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api().mem_free_host(opaque(ptr.0))
        })
    }

    unsafe fn mem_host_register(
        &self,
        device: i32,
        ptr: DevicePtr,
        size: u64,
        read_only: bool,
    ) -> Result<()> {
        let flags = match read_only {
            true => abi::HOST_REGISTER_PORTABLE_DEVICEMAP | abi::HOST_REGISTER_READ_ONLY,
            false => abi::HOST_REGISTER_PORTABLE_DEVICEMAP,
        };
        // SAFETY: as said above; the range is the caller's, which the driver checks too.
        self.core.on(device, || unsafe {
            self.api()
                .mem_host_register(opaque(ptr.0), size as usize, flags)
        })
    }

    unsafe fn mem_host_unregister(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api().mem_host_unregister(opaque(ptr.0))
        })
    }

    fn mem_host_device_pointer(&self, device: i32, ptr: DevicePtr) -> Result<DevicePtr> {
        let mut address = 0;
        // SAFETY: as said above; the driver looks the address up and does not follow it; the flags must be 0.
        self.core.on(device, || unsafe {
            self.api()
                .mem_host_get_device_pointer(&mut address, opaque(ptr.0), 0)
        })?;
        Ok(DevicePtr(address))
    }

    fn mem_alloc_managed(&self, device: i32, size: u64) -> Result<DevicePtr> {
        let mut ptr = 0;
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api()
                .mem_alloc_managed(&mut ptr, size as usize, abi::MEM_ATTACH_GLOBAL)
        })?;
        Ok(DevicePtr(ptr))
    }

    fn stream_create(&self, device: i32) -> Result<StreamHandle> {
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

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: as said above; the stream lives until here by the caller's contract.
        self.on_stream(stream, |raw| unsafe { self.api().stream_destroy(raw) })
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: as said above; the stream lives.
        self.on_stream(stream, |raw| unsafe { self.api().stream_synchronize(raw) })
    }

    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: as said above; the stream lives.
        done(self.on_stream(stream, |raw| unsafe { self.api().stream_query(raw) }))
    }

    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        // SAFETY: as said above; stream and event live, the flags 0 are the default.
        self.on_stream(stream, |raw| unsafe {
            self.api().stream_wait_event(raw, opaque(event.0), 0)
        })
    }

    unsafe fn stream_is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        let mut status = abi::STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: as said above; the stream lives, `status` is a live integer.
        self.on_stream(stream, |raw| unsafe {
            self.api().stream_is_capturing(raw, &mut status)
        })?;
        Ok(status != abi::STREAM_CAPTURE_STATUS_NONE)
    }

    fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut mode = mode.0;
        // SAFETY: as said above; `mode` is a live integer.
        unsafe { self.api().thread_exchange_capture_mode(&mut mode)? };
        Ok(CaptureMode(mode))
    }

    fn ctx_synchronize(&self, device: i32) -> Result<()> {
        // SAFETY: as said above.
        self.core
            .on(device, || unsafe { self.api().ctx_synchronize() })
    }

    fn event_create(&self, device: i32, timing: bool) -> Result<EventHandle> {
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

    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()> {
        // Removed first: once the event is destroyed, another thread may get the same handle for a new event.
        let device = self.core.events().remove(&event);
        // SAFETY: as said above; the event lives until here by the caller's contract.
        let destroy = || unsafe { self.api().event_destroy(opaque(event.0)) };
        match device {
            Some(device) => self.core.on(device, destroy),
            None => destroy(),
        }
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        // SAFETY: as said above; stream and event live.
        self.on_stream(stream, |raw| unsafe {
            self.api().event_record(opaque(event.0), raw)
        })
    }

    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        // SAFETY: as said above; the event lives.
        self.core.at_event(event, || unsafe {
            self.api().event_synchronize(opaque(event.0))
        })
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: as said above; the event lives.
        done(
            self.core
                .at_event(event, || unsafe { self.api().event_query(opaque(event.0)) }),
        )
    }

    unsafe fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: as said above; the events live.
        self.core.at_event(end, || unsafe {
            self.api()
                .event_elapsed_time(&mut milliseconds, opaque(start.0), opaque(end.0))
        })?;
        Ok(milliseconds)
    }

    unsafe fn memcpy_async(
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

    unsafe fn memset_d8_async(
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

    unsafe fn module_load(&self, device: i32, ptx: &CStr) -> Result<ModuleHandle> {
        let mut module = ptr::null_mut();
        // SAFETY: as said above; PTX is read up to its NUL.
        self.core.on(device, || unsafe {
            self.api().module_load_data(&mut module, ptx.as_ptr())
        })?;
        Ok(ModuleHandle(module as u64))
    }

    unsafe fn module_unload(&self, device: i32, module: ModuleHandle) -> Result<()> {
        // SAFETY: as said above; the module lives until here by the caller's contract.
        self.core.on(device, || unsafe {
            self.api().module_unload(opaque(module.0))
        })
    }

    unsafe fn module_function(
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

    unsafe fn launch_kernel(
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

impl Cuda {
    fn api(&self) -> &DriverApi {
        &self.core.api
    }

    fn on_stream<T>(
        &self,
        stream: StreamHandle,
        work: impl FnOnce(Opaque) -> Result<T>,
    ) -> Result<T> {
        self.core.on_stream(stream, work)
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
