//! The CUDA driver, loaded at run time.
//!
//! Nothing here panics if the library is absent, a stub, too old, or lacks functions.
//! Functions are looked up one by one, and result codes are integers.
//!
//! Calls that need a context run in the device's primary context, which is retained on first use and released
//! with the driver. The caller's current context is the same after each call, failed or not. Every method
//! works from any thread. As with CUDA itself, a child made by `fork` without `exec` cannot use a driver that
//! was opened before the fork; dropping it and its objects in the child does nothing.

mod abi;
mod core;
mod library;
mod pools;
mod symbols;

use std::ffi::CStr;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::{Arc, OnceLock};

use self::core::Core;
use crate::backend::done;
use crate::*;
use abi::{
    MemAllocationProp, MemLocation, descs, export, import, opaque, take, take_event_handle, widened,
};
use library::methods;
use pools::Pools;

/// Opens the CUDA driver of this machine.
pub(super) fn open() -> Result<Arc<dyn Backend>> {
    let core = Arc::new(Core::open()?);
    Ok(Arc::new(Cuda {
        pools: Pools::of_driver(Arc::clone(&core)),
        runtime: OnceLock::new(),
        core,
    }))
}

/// The backend: the driver API, and the runtime API once it is used.
#[derive(Debug)]
struct Cuda {
    core: Arc<Core>,
    pools: Pools,
    runtime: OnceLock<Pools>,
}

impl Deref for Cuda {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Cuda {
    methods! { |this|
    [fn] ask_granularity(props: &AllocationProps, kind: GranularityKind) -> u64 {
        let (props, mut bytes) = (MemAllocationProp::from(props), 0);
        @here() mem_get_allocation_granularity(&mut bytes, &props, kind as u32) => bytes as u64
    }
    [fn] create_memory(size: u64, props: &AllocationProps) -> PhysicalHandle {
        let (props, mut handle) = (MemAllocationProp::from(props), 0);
        // The flags must be 0, here and in `mem_map` and `mem_address_reserve`.
        @here() mem_create(&mut handle, size as usize, &props, 0) => PhysicalHandle(handle)
    }
    }
}

// SAFETY: each method makes the call that it is named after and reports its result.
unsafe impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn has_context(&self, device: i32) -> Option<bool> {
        self.core.is_active(device)
    }

    fn active_device(&self) -> Option<i32> {
        self.core.active_device()
    }

    fn driver_pools(&self) -> &dyn PoolCalls {
        &self.pools
    }

    fn runtime_pools(&self) -> Result<&dyn PoolCalls> {
        if let Some(runtime) = self.runtime.get() {
            return Ok(runtime);
        }
        let runtime = Pools::of_runtime(&self.core)?;
        Ok(self.runtime.get_or_init(|| runtime))
    }

    fn mem_granularity(&self, props: &AllocationProps, kind: GranularityKind) -> Result<u64> {
        let is_it = |(of, by, _): &&(AllocationProps, _, _)| of == props && *by == kind;
        if let Some((.., bytes)) = lock(&self.granularities).iter().find(is_it) {
            return Ok(*bytes);
        }
        let bytes = self.ask_granularity(props, kind)?;
        lock(&self.granularities).push((*props, kind, bytes));
        Ok(bytes)
    }

    fn mem_create(&self, size: u64, props: &AllocationProps) -> Result<PhysicalHandle> {
        self.create_memory(size, props)
            .map_err(|error| self.age(error, props.location, props.handle_types))
    }

    unsafe fn mem_export(
        &self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Result<ShareableHandle> {
        export(Call::MemExportToShareableHandle, kind, |out, bits| {
            // SAFETY: `out` is to an int or to 64 bytes, as `bits` says; the flags must be 0.
            unsafe { self.api.mem_export(out, handle.0, bits, 0) }
        })
    }

    fn mem_import(&self, handle: &ShareableHandle) -> Result<PhysicalHandle> {
        let mut imported = 0;
        import(handle, |os_handle, bits| {
            // SAFETY: `os_handle` is an open fd's number or to 64 bytes, as `bits` says; the driver
            // checks that they name memory.
            unsafe { self.api.mem_import(&mut imported, os_handle, bits) }
        })?;
        Ok(PhysicalHandle(imported))
    }

    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: the caller guarantees that the stream lives.
        let mut query = || unsafe { self.api.stream_query(opaque(stream.raw)) };
        done(self.on(stream.device, &mut query))
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the caller guarantees that the event lives.
        let mut query = || unsafe { self.api.event_query(opaque(event.raw)) };
        done(self.on(event.device, &mut query))
    }

    methods! { |this|
    [fn] driver_version() -> CudaVersion {
        let mut version = 0;
        @here() driver_get_version(&mut version) => CudaVersion(version)
    }
    [fn] device_count() -> i32 {
        let mut count = 0;
        @here() device_get_count(&mut count) => count
    }
    [fn] device_name(device: i32) -> String {
        let (device, mut name) = (this.device(device)?, TEXT);
        @here() device_get_name(name.as_mut_ptr().cast(), TEXT_LEN, device) => text(&name)
    }
    [fn] device_uuid(device: i32) -> [u8; 16] {
        let (device, mut uuid) = (this.device(device)?, [0; 16]);
        @here() device_get_uuid(&mut uuid, device) => uuid
    }
    [fn] device_pci_bus_id(device: i32) -> String {
        let (device, mut id) = (this.device(device)?, TEXT);
        @here() device_get_pci_bus_id(id.as_mut_ptr().cast(), TEXT_LEN, device) => text(&id)
    }
    [fn] device_total_mem(device: i32) -> u64 {
        let (device, mut bytes) = (this.device(device)?, 0);
        @here() device_total_mem(&mut bytes, device) => bytes as u64
    }
    [fn] device_attribute(device: i32, attribute: DeviceAttribute) -> i32 {
        let (device, mut value) = (this.device(device)?, 0);
        @here() device_get_attribute(&mut value, attribute.0, device) => value
    }
    [fn] device_can_access_peer(device: i32, peer: i32) -> bool {
        let (device, peer, mut can) = (this.device(device)?, this.device(peer)?, 0);
        @here() device_can_access_peer(&mut can, device, peer) => can != 0
    }
    [fn] device_p2p_attribute(device: i32, peer: i32, attribute: P2pAttribute) -> i32 {
        let (device, peer, mut value) = (this.device(device)?, this.device(peer)?, 0);
        @here() device_get_p2p_attribute(&mut value, attribute.0, device, peer) => value
    }
    [fn] mem_info(device: i32) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        @on(device) mem_get_info(&mut free, &mut total) => (free as u64, total as u64)
    }

    [unsafe fn] mem_release(handle: PhysicalHandle) -> () {
        @here() mem_release(handle.0) => ()
    }
    [fn] mem_address_reserve(size: u64, alignment: u64, hint: u64) -> DevicePtr {
        let mut ptr = 0;
        // The driver may place the range elsewhere than at the hint.
        @here() mem_address_reserve(&mut ptr, size as usize, alignment as usize, hint, 0) => DevicePtr(ptr)
    }
    [unsafe fn] mem_address_free(ptr: DevicePtr, size: u64) -> () {
        @here() mem_address_free(ptr.0, size as usize) => ()
    }
    [unsafe fn] mem_map(ptr: DevicePtr, size: u64, offset: u64, handle: PhysicalHandle) -> () {
        @here() mem_map(ptr.0, size as usize, offset as usize, handle.0, 0) => ()
    }
    [unsafe fn] mem_unmap(ptr: DevicePtr, size: u64) -> () {
        @here() mem_unmap(ptr.0, size as usize) => ()
    }
    [unsafe fn] mem_set_access(ptr: DevicePtr, size: u64, access: &[AccessDesc]) -> () {
        let descs = descs(access);
        @here() mem_set_access(ptr.0, size as usize, descs.as_ptr(), descs.len()) => ()
    }
    [fn] mem_get_access(location: Location, ptr: DevicePtr) -> u64 {
        let (location, mut flags) = (MemLocation::from(location), 0);
        @here() mem_get_access(&mut flags, &location, ptr.0) => flags
    }
    [unsafe fn] mem_properties(handle: PhysicalHandle) -> AllocationProps {
        let mut props = MemAllocationProp::ZERO;
        @here() mem_get_properties(&mut props, handle.0)
            => props.to_props(Call::MemGetAllocationPropertiesFromHandle)?
    }
    [fn] mem_retain(ptr: DevicePtr) -> PhysicalHandle {
        let mut handle = 0;
        @here() mem_retain(&mut handle, opaque(ptr.0)) => PhysicalHandle(handle)
    }
    [fn] pointer_attribute(ptr: DevicePtr, attribute: PointerAttribute) -> u64 {
        // 8 bytes hold each attribute of the enum; narrower ones leave the rest as it is.
        let mut value = 0_u64;
        @anywhere() pointer_get_attribute((&raw mut value).cast(), attribute as i32, ptr.0)
            => if attribute == PointerAttribute::DeviceOrdinal { widened(value) } else { value }
    }
    [fn] mem_address_range(ptr: DevicePtr) -> (DevicePtr, u64) {
        let (mut base, mut size) = (0, 0);
        @anywhere() mem_get_address_range(&mut base, &mut size, ptr.0) => (DevicePtr(base), size as u64)
    }
    [unsafe fn] mem_dma_buf(ptr: DevicePtr, size: u64) -> OwnedFd {
        let mut fd = -1_i32; // this handle type is an int
        @anywhere() mem_get_handle_for_address_range(
            (&raw mut fd).cast(), ptr.0, size as usize, abi::DMA_BUF_FD, 0
        ) =>
            // SAFETY: the driver has just created the fd for this call and written it.
            unsafe { take(Call::MemGetHandleForAddressRange, fd)? }
    }

    [fn] mem_alloc(device: i32, size: u64) -> DevicePtr {
        let mut ptr = 0;
        @on(device) mem_alloc(&mut ptr, size as usize) => DevicePtr(ptr)
    }
    [unsafe fn] mem_free(device: i32, ptr: DevicePtr) -> () {
        @on(device) mem_free(ptr.0) => ()
    }
    [fn] mem_host_alloc(device: i32, size: u64) -> DevicePtr {
        let mut ptr = ptr::null_mut();
        @on(device) mem_host_alloc(&mut ptr, size as usize, abi::HOST_ALLOC_PORTABLE_DEVICEMAP)
            => DevicePtr(ptr as u64)
    }
    [unsafe fn] mem_free_host(device: i32, ptr: DevicePtr) -> () {
        @on(device) mem_free_host(opaque(ptr.0)) => ()
    }
    [unsafe fn] mem_host_register
        (device: i32, ptr: DevicePtr, size: u64, read_only: bool, _node: Option<NodeId>) -> () {
        let flags = abi::HOST_REGISTER_PORTABLE_DEVICEMAP
            | if read_only { abi::HOST_REGISTER_READ_ONLY } else { 0 };
        @on(device) mem_host_register(opaque(ptr.0), size as usize, flags) => ()
    }
    [unsafe fn] mem_host_unregister(device: i32, ptr: DevicePtr) -> () {
        @on(device) mem_host_unregister(opaque(ptr.0)) => ()
    }
    [fn] mem_host_device_pointer(device: i32, ptr: DevicePtr) -> DevicePtr {
        let mut address = 0;
        @on(device) mem_host_get_device_pointer(&mut address, opaque(ptr.0), 0) => DevicePtr(address)
    }
    [fn] mem_alloc_managed(device: i32, size: u64) -> DevicePtr {
        let mut ptr = 0;
        @on(device) mem_alloc_managed(&mut ptr, size as usize, abi::MEM_ATTACH_GLOBAL) => DevicePtr(ptr)
    }

    [fn] stream_create(device: i32) -> StreamHandle {
        let mut stream = ptr::null_mut();
        @on(device) stream_create(&mut stream, abi::STREAM_NON_BLOCKING)
            => StreamHandle { device, raw: stream as u64 }
    }
    [unsafe fn] stream_destroy(stream: StreamHandle) -> () {
        @on(stream.device) stream_destroy(opaque(stream.raw)) => ()
    }
    [unsafe fn] stream_synchronize(stream: StreamHandle) -> () {
        @on(stream.device) stream_synchronize(opaque(stream.raw)) => ()
    }
    [unsafe fn] stream_wait_event(stream: StreamHandle, event: EventHandle) -> () {
        @on(stream.device) stream_wait_event(opaque(stream.raw), opaque(event.raw), 0) => ()
    }
    [unsafe fn] stream_is_capturing(stream: StreamHandle) -> bool {
        let mut status = abi::STREAM_CAPTURE_STATUS_NONE;
        @at(stream) stream_is_capturing(opaque(stream.raw), &mut status)
            => status != abi::STREAM_CAPTURE_STATUS_NONE
    }
    [fn] thread_exchange_capture_mode(mode: CaptureMode) -> CaptureMode {
        let mut mode = mode.0;
        @here() thread_exchange_capture_mode(&mut mode) => CaptureMode(mode)
    }
    [fn] ctx_synchronize(device: i32) -> () {
        @on(device) ctx_synchronize() => ()
    }
    [fn] event_create(device: i32, timing: bool) -> EventHandle {
        let flags = if timing { abi::EVENT_DEFAULT } else { abi::EVENT_DISABLE_TIMING };
        let mut event = ptr::null_mut();
        @on(device) event_create(&mut event, flags) => EventHandle { device, raw: event as u64 }
    }
    [fn] event_create_interprocess(device: i32) -> EventHandle {
        let flags = abi::EVENT_DISABLE_TIMING | abi::EVENT_INTERPROCESS;
        let mut event = ptr::null_mut();
        @on(device) event_create(&mut event, flags) => EventHandle { device, raw: event as u64 }
    }
    [unsafe fn] ipc_event_handle(event: EventHandle) -> IpcEventHandle {
        let mut bytes = [0; 64];
        @on(event.device) ipc_get_event_handle(&mut bytes, opaque(event.raw))
            => take_event_handle(&mut bytes)
    }
    [unsafe fn] ipc_open_event(device: i32, handle: &IpcEventHandle) -> EventHandle {
        let mut event = ptr::null_mut();
        @on(device) ipc_open_event_handle(&mut event, abi::IpcEventBytes(*handle.expose_bytes()))
            => EventHandle { device, raw: event as u64 }
    }
    [unsafe fn] event_destroy(event: EventHandle) -> () {
        @on(event.device) event_destroy(opaque(event.raw)) => ()
    }
    [unsafe fn] event_record(event: EventHandle, stream: StreamHandle) -> () {
        @on(stream.device) event_record(opaque(event.raw), opaque(stream.raw)) => ()
    }
    [unsafe fn] event_synchronize(event: EventHandle) -> () {
        @on(event.device) event_synchronize(opaque(event.raw)) => ()
    }
    [unsafe fn] event_elapsed_ms(start: EventHandle, end: EventHandle) -> f32 {
        let mut milliseconds = 0.0;
        @on(end.device)
            event_elapsed_time(&mut milliseconds, opaque(start.raw), opaque(end.raw)) => milliseconds
    }
    [unsafe fn] memcpy_async
        (dst: DevicePtr, src: DevicePtr, bytes: u64, stream: StreamHandle) -> () {
        @on(stream.device) memcpy_async(dst.0, src.0, bytes as usize, opaque(stream.raw)) => ()
    }
    [unsafe fn] memcpy_batch_async(copies: &[MemcpyDesc], stream: StreamHandle) -> () {
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
    [unsafe fn] memset_d8_async
        (dst: DevicePtr, value: u8, bytes: u64, stream: StreamHandle) -> () {
        @on(stream.device) memset_d8_async(dst.0, value, bytes as usize, opaque(stream.raw)) => ()
    }
    [unsafe fn] module_load(device: i32, ptx: &CStr) -> ModuleHandle {
        let mut module = ptr::null_mut();
        @on(device) module_load_data(&mut module, ptx.as_ptr()) => ModuleHandle(module as u64)
    }
    [unsafe fn] module_unload(device: i32, module: ModuleHandle) -> () {
        @on(device) module_unload(opaque(module.0)) => ()
    }
    [unsafe fn] module_function(device: i32, module: ModuleHandle, name: &CStr) -> FunctionHandle {
        let mut function = ptr::null_mut();
        @on(device) module_get_function(&mut function, opaque(module.0), name.as_ptr())
            => FunctionHandle(function as u64)
    }
    [unsafe fn] launch_kernel
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

/// The buffer of a text. The driver gets one byte less, so the text always ends with a NUL.
const TEXT: [u8; 256] = [0; 256];
const TEXT_LEN: i32 = TEXT.len() as i32 - 1;

fn text(buffer: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(buffer).unwrap_or_default();
    text.to_string_lossy().into_owned()
}
