//! The functions of libcuda and libcudart that this crate uses, under the names that CUDA's headers map them to.
//!
//! A suffix (`_v2`) is the version of a function's signature. The numbers are the CUDA versions that first
//! had the symbol; docs/driver-versions.md contains the same table.

use std::ffi::{c_char, c_void};

use super::abi::{
    IpcEventBytes, MemAccessDesc, MemAllocationProp, MemLocation, MemPoolProps, MemcpyAttributes,
    Opaque, Opaque64,
};
use super::library::functions;
use crate::{CudaVersion, PoolApi, Result};

functions! {
    /// libcuda.
    DriverApi;

    init = Init since 2000 (flags: u32);
    driver_get_version = DriverGetVersion since 2020 (version: *mut i32);

    device_get_count = DeviceGetCount since 2000 (count: *mut i32);
    device_get = DeviceGet since 2000 (device: *mut i32, ordinal: i32);
    device_get_name = DeviceGetName since 2000 (name: *mut c_char, len: i32, device: i32);
    device_get_uuid = DeviceGetUuid ["cuDeviceGetUuid_v2", "cuDeviceGetUuid"] since 9020
        (uuid: *mut [u8; 16], device: i32);
    device_get_pci_bus_id = DeviceGetPciBusId since 4010 (id: *mut c_char, len: i32, device: i32);
    device_total_mem = DeviceTotalMem ["cuDeviceTotalMem_v2"] since 3020
        (bytes: *mut usize, device: i32);
    device_get_attribute = DeviceGetAttribute since 2000
        (value: *mut i32, attribute: i32, device: i32);
    device_can_access_peer = DeviceCanAccessPeer since 4000 (can: *mut i32, device: i32, peer: i32);
    device_get_p2p_attribute = DeviceGetP2PAttribute since 8000
        (value: *mut i32, attribute: i32, device: i32, peer: i32);

    device_primary_ctx_retain = DevicePrimaryCtxRetain since 7000
        (context: *mut Opaque, device: i32);
    device_primary_ctx_release = DevicePrimaryCtxRelease
        ["cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease"] since 7000 (device: i32);
    device_primary_ctx_get_state = DevicePrimaryCtxGetState since 7000
        (device: i32, flags: *mut u32, active: *mut i32);
    ctx_get_id = CtxGetId since 12000 (context: Opaque, id: *mut u64);
    ctx_push_current = CtxPushCurrent ["cuCtxPushCurrent_v2"] since 4000 (context: Opaque);
    ctx_pop_current = CtxPopCurrent ["cuCtxPopCurrent_v2"] since 4000 (context: *mut Opaque);
    ctx_get_current = CtxGetCurrent since 4000 (context: *mut Opaque);
    ctx_synchronize = CtxSynchronize since 2000 ();
    mem_get_info = MemGetInfo ["cuMemGetInfo_v2"] since 3020 (free: *mut usize, total: *mut usize);

    mem_get_allocation_granularity = MemGetAllocationGranularity since 10020
        (granularity: *mut usize, prop: *const MemAllocationProp, option: u32);
    mem_create = MemCreate since 10020
        (handle: *mut u64, size: usize, prop: *const MemAllocationProp, flags: u64);
    mem_release = MemRelease since 10020 (handle: u64);
    mem_address_reserve = MemAddressReserve since 10020
        (ptr: *mut u64, size: usize, alignment: usize, addr: u64, flags: u64);
    mem_address_free = MemAddressFree since 10020 (ptr: u64, size: usize);
    mem_map = MemMap since 10020 (ptr: u64, size: usize, offset: usize, handle: u64, flags: u64);
    mem_unmap = MemUnmap since 10020 (ptr: u64, size: usize);
    mem_set_access = MemSetAccess since 10020
        (ptr: u64, size: usize, desc: *const MemAccessDesc, count: usize);
    mem_get_access = MemGetAccess since 10020
        (flags: *mut u64, location: *const MemLocation, ptr: u64);
    mem_export = MemExportToShareableHandle since 10020
        (shareable: *mut c_void, handle: u64, kind: u32, flags: u64);
    mem_import = MemImportFromShareableHandle since 10020
        (handle: *mut u64, os_handle: *mut c_void, kind: u32);
    mem_get_properties = MemGetAllocationPropertiesFromHandle since 10020
        (prop: *mut MemAllocationProp, handle: u64);
    mem_retain = MemRetainAllocationHandle since 11000 (handle: *mut u64, addr: *mut c_void);
    pointer_get_attribute = PointerGetAttribute since 4000
        (data: *mut c_void, attribute: i32, ptr: u64);
    mem_get_address_range = MemGetAddressRange ["cuMemGetAddressRange_v2"] since 3020
        (base: *mut u64, size: *mut usize, ptr: u64);
    mem_get_handle_for_address_range = MemGetHandleForAddressRange since 11070
        (handle: *mut c_void, ptr: u64, size: usize, kind: u32, flags: u64);

    mem_alloc = MemAlloc ["cuMemAlloc_v2"] since 3020 (ptr: *mut u64, size: usize);
    mem_free = MemFree ["cuMemFree_v2"] since 3020 (ptr: u64);
    mem_host_alloc = MemHostAlloc since 2020 (ptr: *mut *mut c_void, size: usize, flags: u32);
    mem_free_host = MemFreeHost since 2000 (ptr: *mut c_void);
    mem_host_register = MemHostRegister ["cuMemHostRegister_v2"] since 6050
        (ptr: *mut c_void, size: usize, flags: u32);
    mem_host_unregister = MemHostUnregister since 4000 (ptr: *mut c_void);
    mem_host_get_device_pointer = MemHostGetDevicePointer ["cuMemHostGetDevicePointer_v2"] since 3020
        (device_ptr: *mut u64, ptr: *mut c_void, flags: u32);
    mem_alloc_managed = MemAllocManaged since 6000 (ptr: *mut u64, size: usize, flags: u32);

    stream_create = StreamCreate since 2000 (stream: *mut Opaque, flags: u32);
    stream_destroy = StreamDestroy ["cuStreamDestroy_v2"] since 4000 (stream: Opaque);
    stream_synchronize = StreamSynchronize since 2000 (stream: Opaque);
    stream_query = StreamQuery since 2000 (stream: Opaque);
    stream_wait_event = StreamWaitEvent since 3020 (stream: Opaque, event: Opaque, flags: u32);
    stream_is_capturing = StreamIsCapturing since 10000 (stream: Opaque, status: *mut u32);
    thread_exchange_capture_mode = ThreadExchangeStreamCaptureMode since 10010 (mode: *mut u32);
    event_create = EventCreate since 2000 (event: *mut Opaque, flags: u32);
    event_destroy = EventDestroy ["cuEventDestroy_v2"] since 4000 (event: Opaque);
    event_record = EventRecord since 2000 (event: Opaque, stream: Opaque);
    event_synchronize = EventSynchronize since 2000 (event: Opaque);
    event_query = EventQuery since 2000 (event: Opaque);
    // Only the plain symbol is in every driver; both return the same.
    event_elapsed_time = EventElapsedTime ["cuEventElapsedTime", "cuEventElapsedTime_v2"] since 2000
        (milliseconds: *mut f32, start: Opaque, end: Opaque);
    ipc_get_event_handle = IpcGetEventHandle since 4010 (handle: *mut Opaque64, event: Opaque);
    // A structure of 64 bytes, by value.
    ipc_open_event_handle = IpcOpenEventHandle since 4010
        (event: *mut Opaque, handle: IpcEventBytes);
    memcpy_async = MemcpyAsync since 4000 (dst: u64, src: u64, bytes: usize, stream: Opaque);
    // The signature of 12.8; 13.0 has another one under `_v2`.
    memcpy_batch_async = MemcpyBatchAsync since 12080
        (dsts: *mut u64, srcs: *mut u64, sizes: *mut usize, count: usize,
         attributes: *mut MemcpyAttributes, attribute_indices: *mut usize, attribute_count: usize,
         fail_index: *mut usize, stream: Opaque);
    memset_d8_async = MemsetD8Async since 3020 (dst: u64, value: u8, bytes: usize, stream: Opaque);
    module_load_data = ModuleLoadData since 2000 (module: *mut Opaque, image: *const c_char);
    module_unload = ModuleUnload since 2000 (module: Opaque);
    module_get_function = ModuleGetFunction since 2000
        (function: *mut Opaque, module: Opaque, name: *const c_char);
    launch_kernel = LaunchKernel since 4000
        (function: Opaque, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32,
         block_z: u32, shared_bytes: u32, stream: Opaque, params: *mut *mut c_void,
         extra: *mut *mut c_void);
}

functions! {
    /// The pool calls, of libcuda or of libcudart, whose structs, flags and attribute numbers are the same.
    ///
    /// The types are libcuda's. Where it has a 64-bit address, libcudart has a pointer, and where an export or import has 64 bits
    /// of flags, it has 32: on the platforms that CUDA supports these are passed in the same register.
    PoolFunctions;

    pool_create = MemPoolCreate | RtMemPoolCreate since 11020
        (pool: *mut Opaque, props: *const MemPoolProps);
    pool_destroy = MemPoolDestroy | RtMemPoolDestroy since 11020 (pool: Opaque);
    pool_set_attribute = MemPoolSetAttribute | RtMemPoolSetAttribute since 11020
        (pool: Opaque, attribute: i32, value: *mut c_void);
    pool_get_attribute = MemPoolGetAttribute | RtMemPoolGetAttribute since 11020
        (pool: Opaque, attribute: i32, value: *mut c_void);
    pool_trim_to = MemPoolTrimTo | RtMemPoolTrimTo since 11020 (pool: Opaque, keep: usize);
    pool_set_access = MemPoolSetAccess | RtMemPoolSetAccess since 11020
        (pool: Opaque, desc: *const MemAccessDesc, count: usize);
    pool_get_access = MemPoolGetAccess | RtMemPoolGetAccess since 11020
        (flags: *mut u32, pool: Opaque, location: *mut MemLocation);
    pool_export = MemPoolExportToShareableHandle | RtMemPoolExportToShareableHandle since 11020
        (shareable: *mut c_void, pool: Opaque, kind: u32, flags: u64);
    pool_import = MemPoolImportFromShareableHandle | RtMemPoolImportFromShareableHandle since 11020
        (pool: *mut Opaque, shareable: *mut c_void, kind: u32, flags: u64);
    pool_export_pointer = MemPoolExportPointer | RtMemPoolExportPointer since 11020
        (data: *mut Opaque64, ptr: u64);
    pool_import_pointer = MemPoolImportPointer | RtMemPoolImportPointer since 11020
        (ptr: *mut u64, pool: Opaque, data: *mut Opaque64);
    alloc_from_pool_async = MemAllocFromPoolAsync | RtMallocFromPoolAsync since 11020
        (ptr: *mut u64, size: usize, pool: Opaque, stream: Opaque);
    alloc_async = MemAllocAsync | RtMallocAsync since 11020
        (ptr: *mut u64, size: usize, stream: Opaque);
    free_async = MemFreeAsync | RtFreeAsync since 11020 (ptr: u64, stream: Opaque);
    device_get_default_pool = DeviceGetDefaultMemPool | RtDeviceGetDefaultMemPool since 11020
        (pool: *mut Opaque, device: i32);
    device_get_pool = DeviceGetMemPool | RtDeviceGetMemPool since 11020
        (pool: *mut Opaque, device: i32);
    device_set_pool = DeviceSetMemPool | RtDeviceSetMemPool since 11020 (device: i32, pool: Opaque);
    // Of libcudart alone.
    get_last_error = RtGetLastError since 2020 ();
    runtime_get_version = RtRuntimeGetVersion since 2020 (version: *mut i32);
}

impl PoolFunctions {
    /// Reads the version of libcudart.
    pub(super) fn learn_version(&mut self) -> Result<CudaVersion> {
        let mut version = 0;
        // SAFETY: `version` is a live integer.
        unsafe { self.runtime_get_version(&mut version)? };
        Ok(*self.version.insert(CudaVersion(version)))
    }

    /// Returns libcudart's version; the oldest driver's if it was not read.
    pub(super) fn version(&self) -> CudaVersion {
        self.version.unwrap_or(CudaVersion::OLDEST)
    }
}

impl DriverApi {
    /// Returns the pool calls of libcuda.
    pub(super) fn pools(&self) -> PoolFunctions {
        PoolFunctions::new(self.library, PoolApi::Driver, self.version)
    }

    /// Reads the driver's version, which decides whether a missing function is expected.
    pub(super) fn learn_version(&mut self) -> Result<CudaVersion> {
        let mut version = 0;
        // SAFETY: `version` is a live integer.
        unsafe { self.driver_get_version(&mut version)? };
        Ok(*self.version.insert(CudaVersion(version)))
    }

    /// Returns the driver's version; the oldest until it is known.
    pub(super) fn version(&self) -> CudaVersion {
        self.version.unwrap_or(CudaVersion::OLDEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_driver_that_is_accepted_has_every_function_but_one() {
        for (call, _, since) in DriverApi::TABLE.iter().chain(PoolFunctions::TABLE) {
            // Its callers have another way.
            if *call == crate::Call::MemcpyBatchAsync {
                continue;
            }
            assert!(
                CudaVersion(*since) <= CudaVersion::OLDEST,
                "{call} since {since}"
            );
        }
    }

    #[test]
    fn symbols_are_the_calls_names_with_at_most_a_version_behind() {
        for (call, symbols, _) in DriverApi::TABLE {
            for symbol in *symbols {
                let suffix = symbol.strip_prefix(call.name());
                assert!(matches!(suffix, Some("" | "_v2")), "{call}: {symbol}");
            }
        }
    }
}
