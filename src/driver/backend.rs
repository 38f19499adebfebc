//! The seam: one object-safe trait, one method per driver call.

use std::any::Any;
use std::ffi::CStr;
use std::fmt::Debug;

use super::attributes::*;
use super::types::*;
use super::{Call, CaptureMode, Code, SimulatedHost};
use crate::{Error, Result};

fn absent<T>(call: Call) -> Result<T> {
    Err(Error::driver(call, Code::NOT_SUPPORTED))
}

/// A driver: CUDA, the simulator, or one of your own (a null driver for benchmarks, a recorder).
///
/// Each method is one driver call, named after it; only the driver checks the arguments. The default of each
/// method returns `NOT_SUPPORTED`. Methods may be called from any thread, and leave the caller's current CUDA
/// context unchanged.
///
/// # Safety
/// What a method reports as success must have happened: safe code dereferences memory that is reported as
/// mapped and granted to the host.
///
/// The methods that are `unsafe` here use a handle, or can remove memory that is in use. Their callers must
/// ensure that each handle belongs to this driver and was not destroyed, that nothing uses what is destroyed,
/// freed, unmapped or revoked, and that the work is in bounds; for [`module_load`](Self::module_load), that
/// the text is PTX, because a driver takes binaries there too; for [`mem_dma_buf`](Self::mem_dma_buf), that
/// nothing written through the fd lies in memory that safe code holds references to. The driver looks
/// addresses up, so the methods that only query one are safe.
#[allow(unused_variables, clippy::missing_safety_doc)] // One contract for all, above.
pub unsafe trait Backend: Any + Debug + Send + Sync {
    /// Returns `"cuda"`, `"simulated"`, or the name of your own.
    fn name(&self) -> &'static str;

    /// Returns the simulated machine's host. `None`: the driver drives this machine, whose kernel describes
    /// the host.
    fn simulated_host(&self) -> Option<SimulatedHost> {
        None
    }

    /// Returns the pool calls of the runtime API.
    ///
    /// # Errors
    /// [`Error::MissingLibrary`] or [`Error::PlatformUnsupported`] if there is none.
    fn runtime_pools(&self) -> Result<&dyn PoolCalls> {
        Err(Error::PlatformUnsupported {
            what: "the CUDA runtime API",
            source: None,
        })
    }

    /// Returns the pool calls of the driver API.
    fn driver_pools(&self) -> &dyn PoolCalls;

    // Devices.

    /// `cuDriverGetVersion`
    fn driver_version(&self) -> Result<CudaVersion> {
        absent(Call::DriverGetVersion)
    }
    /// `cuDeviceGetCount`
    fn device_count(&self) -> Result<i32> {
        absent(Call::DeviceGetCount)
    }
    /// `cuDeviceGetName`
    fn device_name(&self, device: i32) -> Result<String> {
        absent(Call::DeviceGetName)
    }
    /// `cuDeviceGetUuid_v2`
    fn device_uuid(&self, device: i32) -> Result<[u8; 16]> {
        absent(Call::DeviceGetUuid)
    }
    /// `cuDeviceGetPCIBusId`: `0000:01:00.0`.
    fn device_pci_bus_id(&self, device: i32) -> Result<String> {
        absent(Call::DeviceGetPciBusId)
    }
    /// `cuDeviceTotalMem`, in bytes.
    fn device_total_mem(&self, device: i32) -> Result<u64> {
        absent(Call::DeviceTotalMem)
    }
    /// `cuDeviceGetAttribute`
    fn device_attribute(&self, device: i32, attribute: DeviceAttribute) -> Result<i32> {
        absent(Call::DeviceGetAttribute)
    }
    /// `cuDeviceCanAccessPeer`
    fn device_can_access_peer(&self, device: i32, peer: i32) -> Result<bool> {
        absent(Call::DeviceCanAccessPeer)
    }
    /// `cuDeviceGetP2PAttribute`, of the link by which `device` accesses the memory of `peer`.
    fn device_p2p_attribute(&self, device: i32, peer: i32, attribute: P2pAttribute) -> Result<i32> {
        absent(Call::DeviceGetP2PAttribute)
    }
    /// `cuMemGetInfo`: free and total bytes of the device's memory.
    fn mem_info(&self, device: i32) -> Result<(u64, u64)> {
        absent(Call::MemGetInfo)
    }

    // Virtual memory management.

    /// `cuMemGetAllocationGranularity`, in bytes.
    fn mem_granularity(&self, props: &AllocationProps, kind: GranularityKind) -> Result<u64> {
        absent(Call::MemGetAllocationGranularity)
    }
    /// `cuMemCreate`
    fn mem_create(&self, size: u64, props: &AllocationProps) -> Result<PhysicalHandle> {
        absent(Call::MemCreate)
    }
    /// `cuMemRelease`
    unsafe fn mem_release(&self, handle: PhysicalHandle) -> Result<()> {
        absent(Call::MemRelease)
    }
    /// `cuMemAddressReserve`; `alignment` 0 and `hint` 0 leave the choice to the driver.
    fn mem_address_reserve(&self, size: u64, alignment: u64, hint: u64) -> Result<DevicePtr> {
        absent(Call::MemAddressReserve)
    }
    /// `cuMemAddressFree`
    unsafe fn mem_address_free(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        absent(Call::MemAddressFree)
    }
    /// `cuMemMap`
    unsafe fn mem_map(
        &self,
        ptr: DevicePtr,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
    ) -> Result<()> {
        absent(Call::MemMap)
    }
    /// `cuMemUnmap`
    unsafe fn mem_unmap(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        absent(Call::MemUnmap)
    }
    /// `cuMemSetAccess`
    unsafe fn mem_set_access(
        &self,
        ptr: DevicePtr,
        size: u64,
        access: &[AccessDesc],
    ) -> Result<()> {
        absent(Call::MemSetAccess)
    }
    /// `cuMemGetAccess`: the driver's flags (0, 1 or 3).
    fn mem_get_access(&self, location: Location, ptr: DevicePtr) -> Result<u64> {
        absent(Call::MemGetAccess)
    }
    /// `cuMemExportToShareableHandle`
    unsafe fn mem_export(
        &self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Result<ShareableHandle> {
        absent(Call::MemExportToShareableHandle)
    }
    /// `cuMemImportFromShareableHandle`; the caller keeps the shareable handle.
    fn mem_import(&self, handle: &ShareableHandle) -> Result<PhysicalHandle> {
        absent(Call::MemImportFromShareableHandle)
    }
    /// `cuMemGetAllocationPropertiesFromHandle`
    unsafe fn mem_properties(&self, handle: PhysicalHandle) -> Result<AllocationProps> {
        absent(Call::MemGetAllocationPropertiesFromHandle)
    }
    /// `cuMemRetainAllocationHandle`
    fn mem_retain(&self, ptr: DevicePtr) -> Result<PhysicalHandle> {
        absent(Call::MemRetainAllocationHandle)
    }
    /// `cuPointerGetAttribute`, its value widened to 64 bits.
    fn pointer_attribute(&self, ptr: DevicePtr, attribute: PointerAttribute) -> Result<u64> {
        absent(Call::PointerGetAttribute)
    }
    /// `cuMemGetAddressRange`: base and size.
    fn mem_address_range(&self, ptr: DevicePtr) -> Result<(DevicePtr, u64)> {
        absent(Call::MemGetAddressRange)
    }
    /// `cuMemGetHandleForAddressRange` for a DMA-BUF fd: another way to the bytes, past every borrow of them.
    unsafe fn mem_dma_buf(&self, ptr: DevicePtr, size: u64) -> Result<std::os::fd::OwnedFd> {
        absent(Call::MemGetHandleForAddressRange)
    }

    // The older allocators, for comparison and as the other end of copies.

    /// `cuMemAlloc`
    fn mem_alloc(&self, device: i32, size: u64) -> Result<DevicePtr> {
        absent(Call::MemAlloc)
    }
    /// `cuMemFree`
    unsafe fn mem_free(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        absent(Call::MemFree)
    }
    /// `cuMemHostAlloc` with PORTABLE and DEVICEMAP, which is `cudaHostAlloc`.
    fn mem_host_alloc(&self, device: i32, size: u64) -> Result<DevicePtr> {
        absent(Call::MemHostAlloc)
    }
    /// `cuMemFreeHost`
    unsafe fn mem_free_host(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        absent(Call::MemFreeHost)
    }

    // Streams, events, work.

    /// `cuStreamCreate`, NON_BLOCKING.
    fn stream_create(&self, device: i32) -> Result<StreamHandle> {
        absent(Call::StreamCreate)
    }
    /// `cuStreamDestroy`
    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()> {
        absent(Call::StreamDestroy)
    }
    /// `cuStreamSynchronize`
    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        absent(Call::StreamSynchronize)
    }
    /// `cuStreamQuery`: whether all work is done.
    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        absent(Call::StreamQuery)
    }
    /// `cuStreamWaitEvent`
    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        absent(Call::StreamWaitEvent)
    }
    /// `cuStreamIsCapturing`: whether work submitted to the stream goes into a graph instead of running. An
    /// invalidated capture counts too, until it is ended.
    unsafe fn stream_is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        absent(Call::StreamIsCapturing)
    }
    /// `cuThreadExchangeStreamCaptureMode`: sets the calling thread's mode; returns the previous one.
    fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        absent(Call::ThreadExchangeStreamCaptureMode)
    }
    /// `cuCtxSynchronize`: waits until all work of the device's primary context is done.
    fn ctx_synchronize(&self, device: i32) -> Result<()> {
        absent(Call::CtxSynchronize)
    }
    /// `cuEventCreate`; without timing it is cheaper to record.
    fn event_create(&self, device: i32, timing: bool) -> Result<EventHandle> {
        absent(Call::EventCreate)
    }
    /// `cuEventDestroy`
    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()> {
        absent(Call::EventDestroy)
    }
    /// `cuEventRecord`
    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        absent(Call::EventRecord)
    }
    /// `cuEventSynchronize`
    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        absent(Call::EventSynchronize)
    }
    /// `cuEventQuery`: whether the recorded work is done.
    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        absent(Call::EventQuery)
    }
    /// `cuEventElapsedTime`, in milliseconds.
    unsafe fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> Result<f32> {
        absent(Call::EventElapsedTime)
    }
    /// `cuMemcpyAsync`, the direction inferred from the addresses.
    unsafe fn memcpy_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        absent(Call::MemcpyAsync)
    }
    /// `cuMemsetD8Async`
    unsafe fn memset_d8_async(
        &self,
        dst: DevicePtr,
        value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        absent(Call::MemsetD8Async)
    }
    /// `cuModuleLoadData` of PTX, into the device's primary context. The simulator knows only this crate's
    /// own kernels.
    unsafe fn module_load(&self, device: i32, ptx: &CStr) -> Result<ModuleHandle> {
        absent(Call::ModuleLoadData)
    }
    /// `cuModuleUnload`
    unsafe fn module_unload(&self, device: i32, module: ModuleHandle) -> Result<()> {
        absent(Call::ModuleUnload)
    }
    /// `cuModuleGetFunction`
    unsafe fn module_function(
        &self,
        device: i32,
        module: ModuleHandle,
        name: &CStr,
    ) -> Result<FunctionHandle> {
        absent(Call::ModuleGetFunction)
    }
    /// `cuLaunchKernel` with arguments of 64 bits each.
    unsafe fn launch_kernel(
        &self,
        function: FunctionHandle,
        dims: LaunchDims,
        args: &[u64],
        stream: StreamHandle,
    ) -> Result<()> {
        absent(Call::LaunchKernel)
    }
}

/// The pool calls, which the driver API and the runtime API both have. They share their objects: a pool or an
/// allocation made through one can be used through the other.
///
/// # Safety
/// As for [`Backend`].
#[allow(unused_variables, clippy::missing_safety_doc)] // As above.
pub unsafe trait PoolCalls: Send + Sync {
    /// Which API: `"driver"` or `"runtime"`.
    fn api(&self) -> &'static str;

    /// `cuMemPoolCreate`, `cudaMemPoolCreate`
    fn pool_create(&self, props: &PoolProps) -> Result<PoolHandle> {
        absent(Call::MemPoolCreate)
    }
    /// `cuMemPoolDestroy`, `cudaMemPoolDestroy`
    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()> {
        absent(Call::MemPoolDestroy)
    }
    /// `cuMemPoolSetAttribute`, `cudaMemPoolSetAttribute`
    unsafe fn pool_set_attribute(
        &self,
        pool: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Result<()> {
        absent(Call::MemPoolSetAttribute)
    }
    /// `cuMemPoolGetAttribute`, `cudaMemPoolGetAttribute`
    unsafe fn pool_get_attribute(&self, pool: PoolHandle, attribute: PoolAttribute) -> Result<u64> {
        absent(Call::MemPoolGetAttribute)
    }
    /// `cuMemPoolTrimTo`, `cudaMemPoolTrimTo`
    unsafe fn pool_trim_to(&self, pool: PoolHandle, keep: u64) -> Result<()> {
        absent(Call::MemPoolTrimTo)
    }
    /// `cuMemPoolSetAccess`, `cudaMemPoolSetAccess`
    unsafe fn pool_set_access(&self, pool: PoolHandle, access: &[AccessDesc]) -> Result<()> {
        absent(Call::MemPoolSetAccess)
    }
    /// `cuMemPoolGetAccess`, `cudaMemPoolGetAccess`: the driver's flags (0, 1 or 3).
    unsafe fn pool_get_access(&self, pool: PoolHandle, location: Location) -> Result<u64> {
        absent(Call::MemPoolGetAccess)
    }
    /// `cuMemPoolExportToShareableHandle`
    ///
    /// Export as fabric only after a `cuMemCreate` with that handle type has succeeded on this machine: on
    /// others the refused call has been seen to corrupt the process's heap.
    unsafe fn pool_export(&self, pool: PoolHandle, kind: HandleType) -> Result<ShareableHandle> {
        absent(Call::MemPoolExportToShareableHandle)
    }
    /// `cuMemPoolImportFromShareableHandle`; the caller keeps the shareable handle.
    fn pool_import(&self, handle: &ShareableHandle) -> Result<PoolHandle> {
        absent(Call::MemPoolImportFromShareableHandle)
    }
    /// `cuMemPoolExportPointer`
    fn pool_export_pointer(&self, ptr: DevicePtr) -> Result<PoolPtrExport> {
        absent(Call::MemPoolExportPointer)
    }
    /// `cuMemPoolImportPointer`
    unsafe fn pool_import_pointer(
        &self,
        pool: PoolHandle,
        export: &PoolPtrExport,
    ) -> Result<DevicePtr> {
        absent(Call::MemPoolImportPointer)
    }
    /// `cuMemAllocFromPoolAsync`, `cudaMallocFromPoolAsync`
    unsafe fn alloc_from_pool_async(
        &self,
        pool: PoolHandle,
        size: u64,
        stream: StreamHandle,
    ) -> Result<DevicePtr> {
        absent(Call::MemAllocFromPoolAsync)
    }
    /// `cuMemAllocAsync`, `cudaMallocAsync`: from the device's current pool.
    unsafe fn alloc_async(&self, size: u64, stream: StreamHandle) -> Result<DevicePtr> {
        absent(Call::MemAllocAsync)
    }
    /// `cuMemFreeAsync`, `cudaFreeAsync`
    unsafe fn free_async(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        absent(Call::MemFreeAsync)
    }
    /// `cuDeviceGetDefaultMemPool`, `cudaDeviceGetDefaultMemPool`
    fn device_default_pool(&self, device: i32) -> Result<PoolHandle> {
        absent(Call::DeviceGetDefaultMemPool)
    }
    /// `cuDeviceGetMemPool`, `cudaDeviceGetMemPool`
    fn device_pool(&self, device: i32) -> Result<PoolHandle> {
        absent(Call::DeviceGetMemPool)
    }
    /// `cuDeviceSetMemPool`, `cudaDeviceSetMemPool`
    unsafe fn device_set_pool(&self, device: i32, pool: PoolHandle) -> Result<()> {
        absent(Call::DeviceSetMemPool)
    }
}
