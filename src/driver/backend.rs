//! The driver trait: object-safe, one method per driver call.

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use super::attributes::*;
use super::handles::*;
use super::types::*;
use super::{Call, CaptureMode, Code};
use crate::{Error, Result};

fn absent<T>(call: Call) -> Result<T> {
    Err(Error::driver(call, Code::NOT_SUPPORTED))
}

/// Returns whether work is done: `NOT_READY` is an answer, not a failure.
pub(crate) fn done(query: Result<()>) -> Result<bool> {
    match query {
        Err(error) if error.code() == Some(Code::NOT_READY) => Ok(false),
        query => query.map(|()| true),
    }
}

/// Gives the driver's calls to `$with`: `[kind] method(arguments) -> result = Call;`. The two queries of finished
/// work are not among them, because backends answer them in their own way.
macro_rules! driver_calls {
    ($with:ident) => { $with! {
    // Devices.

    /// `cuDriverGetVersion`
    [fn] driver_version() -> CudaVersion = DriverGetVersion;
    /// `cuDeviceGetCount`
    [fn] device_count() -> i32 = DeviceGetCount;
    /// `cuDeviceGetName`
    [fn] device_name(device: i32) -> String = DeviceGetName;
    /// `cuDeviceGetUuid_v2`
    [fn] device_uuid(device: i32) -> [u8; 16] = DeviceGetUuid;
    /// `cuDeviceGetPCIBusId`: `0000:01:00.0`.
    [fn] device_pci_bus_id(device: i32) -> String = DeviceGetPciBusId;
    /// `cuDeviceTotalMem`, in bytes.
    [fn] device_total_mem(device: i32) -> u64 = DeviceTotalMem;
    /// `cuDeviceGetAttribute`
    [fn] device_attribute(device: i32, attribute: DeviceAttribute) -> i32 = DeviceGetAttribute;
    /// `cuDeviceCanAccessPeer`
    [fn] device_can_access_peer(device: i32, peer: i32) -> bool = DeviceCanAccessPeer;
    /// `cuDeviceGetP2PAttribute`, of the link by which `device` accesses the memory of `peer`.
    [fn] device_p2p_attribute(device: i32, peer: i32, attribute: P2pAttribute)
        -> i32 = DeviceGetP2PAttribute;
    /// `cuMemGetInfo`: free and total bytes of the device's memory.
    [fn] mem_info(device: i32) -> (u64, u64) = MemGetInfo;

    // Virtual memory management.

    /// `cuMemGetAllocationGranularity`, in bytes.
    [fn] mem_granularity(props: &AllocationProps, kind: GranularityKind)
        -> u64 = MemGetAllocationGranularity;
    /// `cuMemCreate`
    [fn] mem_create(size: u64, props: &AllocationProps) -> PhysicalHandle = MemCreate;
    /// `cuMemRelease`
    [unsafe fn] mem_release(handle: PhysicalHandle) -> () = MemRelease;
    /// `cuMemAddressReserve`; `alignment` 0 and `hint` 0 leave the choice to the driver.
    [fn] mem_address_reserve(size: u64, alignment: u64, hint: u64) -> DevicePtr = MemAddressReserve;
    /// `cuMemAddressFree`
    [unsafe fn] mem_address_free(ptr: DevicePtr, size: u64) -> () = MemAddressFree;
    /// `cuMemMap`
    [unsafe fn] mem_map(ptr: DevicePtr, size: u64, offset: u64, handle: PhysicalHandle)
        -> () = MemMap;
    /// `cuMemUnmap`
    [unsafe fn] mem_unmap(ptr: DevicePtr, size: u64) -> () = MemUnmap;
    /// `cuMemSetAccess`
    [unsafe fn] mem_set_access(ptr: DevicePtr, size: u64, access: &[AccessDesc])
        -> () = MemSetAccess;
    /// `cuMemGetAccess`: the driver's flags (0, 1 or 3).
    [fn] mem_get_access(location: Location, ptr: DevicePtr) -> u64 = MemGetAccess;
    /// `cuMemExportToShareableHandle`
    [unsafe fn] mem_export(handle: PhysicalHandle, kind: HandleType)
        -> ShareableHandle = MemExportToShareableHandle;
    /// `cuMemImportFromShareableHandle`; the caller keeps the shareable handle.
    [fn] mem_import(handle: &ShareableHandle) -> PhysicalHandle = MemImportFromShareableHandle;
    /// `cuMemGetAllocationPropertiesFromHandle`
    [unsafe fn] mem_properties(handle: PhysicalHandle)
        -> AllocationProps = MemGetAllocationPropertiesFromHandle;
    /// `cuMemRetainAllocationHandle`
    [fn] mem_retain(ptr: DevicePtr) -> PhysicalHandle = MemRetainAllocationHandle;
    /// `cuPointerGetAttribute`, its value widened to 64 bits.
    [fn] pointer_attribute(ptr: DevicePtr, attribute: PointerAttribute)
        -> u64 = PointerGetAttribute;
    /// `cuMemGetAddressRange`: base and size.
    [fn] mem_address_range(ptr: DevicePtr) -> (DevicePtr, u64) = MemGetAddressRange;
    /// `cuMemGetHandleForAddressRange` for a DMA-BUF fd: another way to the bytes, which borrows of them do not
    /// prevent.
    [unsafe fn] mem_dma_buf(ptr: DevicePtr, size: u64)
        -> OwnedFd = MemGetHandleForAddressRange;

    // The older allocators, for comparison and as the other end of copies.

    /// `cuMemAlloc`
    [fn] mem_alloc(device: i32, size: u64) -> DevicePtr = MemAlloc;
    /// `cuMemFree`
    [unsafe fn] mem_free(device: i32, ptr: DevicePtr) -> () = MemFree;
    /// `cuMemHostAlloc` with PORTABLE and DEVICEMAP, which is `cudaHostAlloc`.
    [fn] mem_host_alloc(device: i32, size: u64) -> DevicePtr = MemHostAlloc;
    /// `cuMemFreeHost`
    [unsafe fn] mem_free_host(device: i32, ptr: DevicePtr) -> () = MemFreeHost;
    /// `cuMemHostRegister_v2` with PORTABLE and DEVICEMAP, and READ_ONLY if `read_only`. The range is mapped by this
    /// process and stays so until it is unregistered. `node` is where the caller bound its pages: the simulator takes them
    /// from that node.
    [unsafe fn] mem_host_register
        (device: i32, ptr: DevicePtr, size: u64, read_only: bool, node: Option<NodeId>)
        -> () = MemHostRegister;
    /// `cuMemHostUnregister`
    [unsafe fn] mem_host_unregister(device: i32, ptr: DevicePtr) -> () = MemHostUnregister;
    /// `cuMemHostGetDevicePointer_v2`: a GPU's address of pinned or registered memory.
    [fn] mem_host_device_pointer(device: i32, ptr: DevicePtr)
        -> DevicePtr = MemHostGetDevicePointer;
    /// `cuMemAllocManaged` with ATTACH_GLOBAL; `cuMemFree` frees it.
    [fn] mem_alloc_managed(device: i32, size: u64) -> DevicePtr = MemAllocManaged;

    // Streams, events, work.

    /// `cuStreamCreate`, NON_BLOCKING.
    [fn] stream_create(device: i32) -> StreamHandle = StreamCreate;
    /// `cuStreamDestroy`
    [unsafe fn] stream_destroy(stream: StreamHandle) -> () = StreamDestroy;
    /// `cuStreamSynchronize`
    [unsafe fn] stream_synchronize(stream: StreamHandle) -> () = StreamSynchronize;
    /// `cuStreamWaitEvent`
    [unsafe fn] stream_wait_event(stream: StreamHandle, event: EventHandle) -> () = StreamWaitEvent;
    /// `cuStreamIsCapturing`: whether work submitted to the stream goes into a graph instead of running. An
    /// invalidated capture counts too, until it is ended.
    [unsafe fn] stream_is_capturing(stream: StreamHandle) -> bool = StreamIsCapturing;
    /// `cuThreadExchangeStreamCaptureMode`: sets the calling thread's mode; returns the previous one.
    [fn] thread_exchange_capture_mode(mode: CaptureMode)
        -> CaptureMode = ThreadExchangeStreamCaptureMode;
    /// `cuCtxSynchronize`: waits until all work of the device's primary context is done.
    [fn] ctx_synchronize(device: i32) -> () = CtxSynchronize;
    /// `cuEventCreate`; without timing it is cheaper to record.
    [fn] event_create(device: i32, timing: bool) -> EventHandle = EventCreate;
    /// `cuEventCreate` with INTERPROCESS and DISABLE_TIMING: other processes can open the event.
    [fn] event_create_interprocess(device: i32) -> EventHandle = EventCreate;
    /// `cuIpcGetEventHandle`. Other processes may use the event until it is destroyed; what their calls do afterwards is
    /// undefined.
    [unsafe fn] ipc_event_handle(event: EventHandle) -> IpcEventHandle = IpcGetEventHandle;
    /// `cuIpcOpenEventHandle`: another process's event, for the streams of `device`. The exporting process keeps its event
    /// for as long as this one is used.
    [unsafe fn] ipc_open_event(device: i32, handle: &IpcEventHandle)
        -> EventHandle = IpcOpenEventHandle;
    /// `cuEventDestroy`
    [unsafe fn] event_destroy(event: EventHandle) -> () = EventDestroy;
    /// `cuEventRecord`
    [unsafe fn] event_record(event: EventHandle, stream: StreamHandle) -> () = EventRecord;
    /// `cuEventSynchronize`
    [unsafe fn] event_synchronize(event: EventHandle) -> () = EventSynchronize;
    /// `cuEventElapsedTime`, in milliseconds.
    [unsafe fn] event_elapsed_ms(start: EventHandle, end: EventHandle) -> f32 = EventElapsedTime;
    /// `cuMemcpyAsync`, the direction inferred from the addresses.
    [unsafe fn] memcpy_async(dst: DevicePtr, src: DevicePtr, bytes: u64, stream: StreamHandle)
        -> () = MemcpyAsync;
    /// `cuMemcpyBatchAsync`: copies in any order among themselves, each after the stream's earlier work; from CUDA
    /// 12.8 on. The driver refuses an empty batch, copies of 0 bytes and the legacy default stream. If it refuses a
    /// batch, some of the copies may have been submitted.
    [unsafe fn] memcpy_batch_async(copies: &[MemcpyDesc], stream: StreamHandle)
        -> () = MemcpyBatchAsync;
    /// `cuMemsetD8Async`
    [unsafe fn] memset_d8_async(dst: DevicePtr, value: u8, bytes: u64, stream: StreamHandle)
        -> () = MemsetD8Async;
    /// `cuModuleLoadData` of PTX, into the device's primary context. The simulator knows only this crate's
    /// own kernels.
    [unsafe fn] module_load(device: i32, ptx: &CStr) -> ModuleHandle = ModuleLoadData;
    /// `cuModuleUnload`
    [unsafe fn] module_unload(device: i32, module: ModuleHandle) -> () = ModuleUnload;
    /// `cuModuleGetFunction`
    [unsafe fn] module_function(device: i32, module: ModuleHandle, name: &CStr)
        -> FunctionHandle = ModuleGetFunction;
    /// `cuLaunchKernel` with arguments of 64 bits each.
    [unsafe fn] launch_kernel
        (function: FunctionHandle, dims: LaunchDims, args: &[u64], stream: StreamHandle)
        -> () = LaunchKernel;
    }};
}

/// As [`driver_calls`], the pool calls: `= Call of the driver API, of the runtime API;`.
macro_rules! pool_calls {
    ($with:ident) => { $with! {
    /// `cuMemPoolCreate`, `cudaMemPoolCreate`
    [fn] pool_create(props: &PoolProps) -> PoolHandle = MemPoolCreate, RtMemPoolCreate;
    /// `cuMemPoolDestroy`, `cudaMemPoolDestroy`
    [unsafe fn] pool_destroy(pool: PoolHandle) -> () = MemPoolDestroy, RtMemPoolDestroy;
    /// `cuMemPoolSetAttribute`, `cudaMemPoolSetAttribute`
    [unsafe fn] pool_set_attribute(pool: PoolHandle, attribute: PoolAttribute, value: u64)
        -> () = MemPoolSetAttribute, RtMemPoolSetAttribute;
    /// `cuMemPoolGetAttribute`, `cudaMemPoolGetAttribute`
    [unsafe fn] pool_get_attribute(pool: PoolHandle, attribute: PoolAttribute)
        -> u64 = MemPoolGetAttribute, RtMemPoolGetAttribute;
    /// `cuMemPoolTrimTo`, `cudaMemPoolTrimTo`
    [unsafe fn] pool_trim_to(pool: PoolHandle, keep: u64) -> () = MemPoolTrimTo, RtMemPoolTrimTo;
    /// `cuMemPoolSetAccess`, `cudaMemPoolSetAccess`
    [unsafe fn] pool_set_access(pool: PoolHandle, access: &[AccessDesc])
        -> () = MemPoolSetAccess, RtMemPoolSetAccess;
    /// `cuMemPoolGetAccess`, `cudaMemPoolGetAccess`: the driver's flags (0, 1 or 3).
    [unsafe fn] pool_get_access(pool: PoolHandle, location: Location)
        -> u64 = MemPoolGetAccess, RtMemPoolGetAccess;
    /// `cuMemPoolExportToShareableHandle`
    ///
    /// Export as fabric only after a `cuMemCreate` with that handle type has succeeded on this machine: on
    /// others the refused call has been seen to corrupt the process's heap.
    [unsafe fn] pool_export(pool: PoolHandle, kind: HandleType)
        -> ShareableHandle = MemPoolExportToShareableHandle, RtMemPoolExportToShareableHandle;
    /// `cuMemPoolImportFromShareableHandle`; the caller keeps the shareable handle.
    [fn] pool_import(handle: &ShareableHandle)
        -> PoolHandle = MemPoolImportFromShareableHandle, RtMemPoolImportFromShareableHandle;
    /// `cuMemPoolExportPointer`
    [fn] pool_export_pointer(ptr: DevicePtr)
        -> PoolPtrExport = MemPoolExportPointer, RtMemPoolExportPointer;
    /// `cuMemPoolImportPointer`
    [unsafe fn] pool_import_pointer(pool: PoolHandle, export: &PoolPtrExport)
        -> DevicePtr = MemPoolImportPointer, RtMemPoolImportPointer;
    /// `cuMemAllocFromPoolAsync`, `cudaMallocFromPoolAsync`
    [unsafe fn] alloc_from_pool_async(pool: PoolHandle, size: u64, stream: StreamHandle)
        -> DevicePtr = MemAllocFromPoolAsync, RtMallocFromPoolAsync;
    /// `cuMemAllocAsync`, `cudaMallocAsync`: from the device's current pool.
    [unsafe fn] alloc_async(size: u64, stream: StreamHandle)
        -> DevicePtr = MemAllocAsync, RtMallocAsync;
    /// `cuMemFreeAsync`, `cudaFreeAsync`
    [unsafe fn] free_async(ptr: DevicePtr, stream: StreamHandle) -> () = MemFreeAsync, RtFreeAsync;
    /// `cuDeviceGetDefaultMemPool`, `cudaDeviceGetDefaultMemPool`
    [fn] device_default_pool(device: i32)
        -> PoolHandle = DeviceGetDefaultMemPool, RtDeviceGetDefaultMemPool;
    /// `cuDeviceGetMemPool`, `cudaDeviceGetMemPool`
    [fn] device_pool(device: i32) -> PoolHandle = DeviceGetMemPool, RtDeviceGetMemPool;
    /// `cuDeviceSetMemPool`, `cudaDeviceSetMemPool`
    [unsafe fn] device_set_pool(device: i32, pool: PoolHandle)
        -> () = DeviceSetMemPool, RtDeviceSetMemPool;
    }};
}

/// Declares calls with the answer `NOT_SUPPORTED`.
macro_rules! declare {
    ($($(#[$doc:meta])* [$($kind:tt)+] $method:ident($($arg:ident: $ty:ty),*) -> $out:ty
        = $call:ident $(, $runtime:ident)?;)*) => {$(
        $(#[$doc])*
        $($kind)+ $method(&self, $($arg: $ty),*) -> Result<$out> {
            absent(Call::$call)
        }
    )*};
}

/// A driver: CUDA, the simulator, or one of your own (a null driver for benchmarks, a recorder).
///
/// Each method is one driver call, named after it; only the driver checks the arguments. The default of each
/// method returns `NOT_SUPPORTED`. Methods may be called from any thread, and leave the caller's current CUDA
/// context unchanged.
///
/// # Safety
/// A method that reports success must have had its effect: safe code dereferences memory that is reported as
/// mapped and granted to the host.
///
/// The methods that are `unsafe` here use a handle, or can remove memory that is in use. Their callers must
/// ensure that each handle belongs to this driver and was not destroyed, that nothing uses memory or handles that are
/// destroyed, freed, unmapped or revoked, and that the work is in bounds; for [`module_load`](Self::module_load),
/// that the text is PTX, because a driver takes binaries there too; for [`mem_dma_buf`](Self::mem_dma_buf), that
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

    /// Returns whether this process uses a GPU's primary context already; `None` if the driver does not tell.
    fn has_context(&self, device: i32) -> Option<bool> {
        None
    }

    /// Returns the first GPU whose primary context this process uses already and that was not seen lost; `None` if there is none, or
    /// if the driver does not tell. A call that needs any context is made there, so that it creates none.
    fn active_device(&self) -> Option<i32> {
        None
    }

    /// Returns the pool calls of the runtime API.
    ///
    /// # Errors
    /// [`Error::MissingLibrary`] or [`Error::PlatformUnsupported`] if there is none.
    fn runtime_pools(&self) -> Result<&dyn PoolCalls> {
        Err(Error::unsupported("the CUDA runtime API", None))
    }

    /// Returns the pool calls of the driver API.
    fn driver_pools(&self) -> &dyn PoolCalls;

    /// `cuStreamQuery`: whether all work is done.
    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        absent(Call::StreamQuery)
    }

    /// `cuEventQuery`: whether the recorded work is done.
    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        absent(Call::EventQuery)
    }

    driver_calls!(declare);
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

    pool_calls!(declare);
}

/// The host of a simulated machine: the same facts as the kernel reports of this machine, as of one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedHost {
    /// The machine's name.
    pub machine: String,
    /// Its host NUMA nodes.
    pub nodes: Vec<SimulatedNode>,
    /// Whether there is an IMEX channel.
    pub imex_channel: bool,
    /// The process's memory mappings.
    pub mappings: u64,
    /// The most that it may have; `None`: no limit.
    pub max_mappings: Option<u64>,
    /// An `lstopo` XML file of the machine, which stands for hwloc's answer.
    pub topology_xml: Option<PathBuf>,
}

/// A host NUMA node of a simulated machine.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedNode {
    /// The operating system's id.
    pub id: NodeId,
    /// Its CPUs as a list, such as `0-71`; may be empty.
    pub cpus: String,
    /// Its memory in bytes.
    pub memory: u64,
    /// The bytes of it that an allocation could get.
    pub free: u64,
    /// The distances to other NUMA nodes, including GPU memories: 10 is the node itself. Empty: unknown.
    pub distances: BTreeMap<i32, u32>,
}
