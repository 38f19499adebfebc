//! The seam's methods; each forwards to the part that implements it.

use std::cell::Cell;
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::answer::fail;
use super::controls::Sim;
use super::granularity::GRANULARITY;
use super::pool::Face;
use super::shared::Shared;
use crate::Result;
use crate::{
    AccessDesc, AllocationProps, Backend, Call, CaptureMode, Code, CudaVersion, DeviceAttribute,
    DevicePtr, EventHandle, FunctionHandle, GranularityKind, HandleType, LaunchDims, Location,
    ModuleHandle, P2pAttribute, PhysicalHandle, PointerAttribute, PoolApi, PoolCalls,
    ShareableHandle, SimulatedHost, StreamHandle,
};

/// The simulated driver.
#[derive(Debug)]
pub(super) struct Simulator {
    pub(super) sim: Sim,
    driver_pools: Face,
    runtime_pools: Face,
}

impl Simulator {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            driver_pools: Face::new(Arc::clone(&shared), PoolApi::Driver),
            runtime_pools: Face::new(Arc::clone(&shared), PoolApi::Runtime),
            sim: Sim { shared },
        }
    }

    fn shared(&self) -> &Shared {
        &self.sim.shared
    }
}

// SAFETY: memory reported as mapped is mapped with `mmap` over a reservation that stays ours until it is
// freed, and memory reported as granted to the host has been given that protection.
unsafe impl Backend for Simulator {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn simulated_host(&self) -> Option<SimulatedHost> {
        let shared = self.shared();
        let mut host = shared.machine.host();
        let state = shared.lock();
        for node in &mut host.nodes {
            node.free = state.capacity.free(node.id.into());
        }
        Some(host)
    }

    fn runtime_pools(&self) -> Result<&dyn PoolCalls> {
        Ok(&self.runtime_pools)
    }

    fn driver_pools(&self) -> &dyn PoolCalls {
        &self.driver_pools
    }

    fn driver_version(&self) -> Result<CudaVersion> {
        self.shared()
            .ask(Call::DriverGetVersion, |machine| Ok(machine.driver_version))
    }

    fn device_count(&self) -> Result<i32> {
        self.shared().ask(
            Call::DeviceGetCount,
            |machine| Ok(machine.gpus.len() as i32),
        )
    }

    fn device_name(&self, device: i32) -> Result<String> {
        self.shared().ask(Call::DeviceGetName, |machine| {
            let gpu = machine.gpu(device).ok_or(Code::INVALID_DEVICE)?;
            Ok(gpu.name.clone())
        })
    }

    fn device_uuid(&self, device: i32) -> Result<[u8; 16]> {
        self.shared().ask(Call::DeviceGetUuid, |machine| {
            Ok(machine.uuid(device).ok_or(Code::INVALID_DEVICE)?)
        })
    }

    fn device_pci_bus_id(&self, device: i32) -> Result<String> {
        self.shared().ask(Call::DeviceGetPciBusId, |machine| {
            Ok(machine.pci_bus_id(device).ok_or(Code::INVALID_DEVICE)?)
        })
    }

    fn device_total_mem(&self, device: i32) -> Result<u64> {
        self.shared().ask(Call::DeviceTotalMem, |machine| {
            Ok(machine.gpu(device).ok_or(Code::INVALID_DEVICE)?.memory)
        })
    }

    fn device_attribute(&self, device: i32, attribute: DeviceAttribute) -> Result<i32> {
        self.shared().ask(Call::DeviceGetAttribute, |machine| {
            machine.device_attribute(device, attribute)
        })
    }

    fn device_can_access_peer(&self, device: i32, peer: i32) -> Result<bool> {
        self.shared().ask(Call::DeviceCanAccessPeer, |machine| {
            match (machine.gpu(device), machine.gpu(peer)) {
                (Some(_), Some(_)) => Ok(machine.peers(device, peer)),
                _ => fail(Code::INVALID_DEVICE),
            }
        })
    }

    fn device_p2p_attribute(&self, device: i32, peer: i32, attribute: P2pAttribute) -> Result<i32> {
        self.shared().ask(Call::DeviceGetP2PAttribute, |machine| {
            machine.p2p_attribute(device, peer, attribute)
        })
    }

    fn mem_info(&self, device: i32) -> Result<(u64, u64)> {
        self.shared()
            .call(Call::MemGetInfo, |state| state.mem_info(device))
    }

    fn mem_granularity(&self, _: &AllocationProps, _: GranularityKind) -> Result<u64> {
        // Measured: the same for every location, even those that do not exist.
        self.shared()
            .ask(Call::MemGetAllocationGranularity, |_| Ok(GRANULARITY))
    }

    fn mem_create(&self, size: u64, props: &AllocationProps) -> Result<PhysicalHandle> {
        self.shared()
            .call(Call::MemCreate, |state| state.mem_create(size, props))
    }

    unsafe fn mem_release(&self, handle: PhysicalHandle) -> Result<()> {
        self.shared()
            .call(Call::MemRelease, |state| state.mem_release(handle))
    }

    fn mem_address_reserve(&self, size: u64, alignment: u64, hint: u64) -> Result<DevicePtr> {
        self.shared().call(Call::MemAddressReserve, |state| {
            state.mem_address_reserve(size, alignment, hint)
        })
    }

    unsafe fn mem_address_free(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        self.shared().call(Call::MemAddressFree, |state| {
            state.mem_address_free(ptr, size)
        })
    }

    unsafe fn mem_map(
        &self,
        ptr: DevicePtr,
        size: u64,
        offset: u64,
        handle: PhysicalHandle,
    ) -> Result<()> {
        self.shared().call(Call::MemMap, |state| {
            state.mem_map(ptr, size, offset, handle)
        })
    }

    unsafe fn mem_unmap(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        self.shared()
            .call(Call::MemUnmap, |state| state.mem_unmap(ptr, size))
    }

    unsafe fn mem_set_access(
        &self,
        ptr: DevicePtr,
        size: u64,
        access: &[AccessDesc],
    ) -> Result<()> {
        self.shared().call(Call::MemSetAccess, |state| {
            state.mem_set_access(ptr, size, access)
        })
    }

    fn mem_get_access(&self, location: Location, ptr: DevicePtr) -> Result<u64> {
        self.shared().call(Call::MemGetAccess, |state| {
            state.mem_get_access(location, ptr)
        })
    }

    unsafe fn mem_export(
        &self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Result<ShareableHandle> {
        self.shared()
            .call(Call::MemExportToShareableHandle, |state| {
                state.mem_export(handle, kind)
            })
    }

    fn mem_import(&self, handle: &ShareableHandle) -> Result<PhysicalHandle> {
        self.shared()
            .call(Call::MemImportFromShareableHandle, |state| {
                state.mem_import(handle)
            })
    }

    unsafe fn mem_properties(&self, handle: PhysicalHandle) -> Result<AllocationProps> {
        self.shared()
            .call(Call::MemGetAllocationPropertiesFromHandle, |state| {
                state.mem_properties(handle)
            })
    }

    fn mem_retain(&self, ptr: DevicePtr) -> Result<PhysicalHandle> {
        self.shared()
            .call(Call::MemRetainAllocationHandle, |state| {
                state.mem_retain(ptr)
            })
    }

    fn pointer_attribute(&self, ptr: DevicePtr, attribute: PointerAttribute) -> Result<u64> {
        self.shared().call(Call::PointerGetAttribute, |state| {
            state.pointer_attribute(ptr, attribute)
        })
    }

    fn mem_address_range(&self, ptr: DevicePtr) -> Result<(DevicePtr, u64)> {
        self.shared().call(Call::MemGetAddressRange, |state| {
            state.mem_address_range(ptr)
        })
    }

    unsafe fn mem_dma_buf(&self, ptr: DevicePtr, size: u64) -> Result<OwnedFd> {
        self.shared()
            .call(Call::MemGetHandleForAddressRange, |state| {
                state.mem_dma_buf(ptr, size)
            })
    }

    fn mem_alloc(&self, device: i32, size: u64) -> Result<DevicePtr> {
        self.shared()
            .call(Call::MemAlloc, |state| state.mem_alloc(device, size))
    }

    unsafe fn mem_free(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        self.shared()
            .call(Call::MemFree, |state| state.mem_free(device, ptr))
    }

    fn mem_host_alloc(&self, device: i32, size: u64) -> Result<DevicePtr> {
        self.shared().call(Call::MemHostAlloc, |state| {
            state.mem_host_alloc(device, size)
        })
    }

    unsafe fn mem_free_host(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        self.shared()
            .call(Call::MemFreeHost, |state| state.mem_free_host(device, ptr))
    }

    fn stream_create(&self, device: i32) -> Result<StreamHandle> {
        self.shared()
            .call(Call::StreamCreate, |state| state.stream_create(device))
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<()> {
        self.shared()
            .call(Call::StreamDestroy, |state| state.stream_destroy(stream))
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        self.shared().call(Call::StreamSynchronize, |state| {
            state.stream_synchronize(stream)
        })
    }

    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        let shared = self.shared();
        done(shared.call(Call::StreamQuery, |state| state.stream_query(stream)))
    }

    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.shared().call(Call::StreamWaitEvent, |state| {
            state.stream_wait_event(stream, event)
        })
    }

    unsafe fn stream_is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        // The simulator has no captures.
        self.shared().call(Call::StreamIsCapturing, |state| {
            state.stream(stream).map(|_| false)
        })
    }

    fn thread_exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        thread_local! {
            static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::GLOBAL) };
        }
        self.shared().enter(Call::ThreadExchangeStreamCaptureMode)?;
        Ok(MODE.replace(mode))
    }

    fn ctx_synchronize(&self, device: i32) -> Result<()> {
        self.shared().call(Call::CtxSynchronize, |state| {
            state.context(device)?;
            state.synchronize_device(device);
            state.context(device).map(drop)
        })
    }

    fn event_create(&self, device: i32, timing: bool) -> Result<EventHandle> {
        self.shared().call(Call::EventCreate, |state| {
            state.event_create(device, timing)
        })
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> Result<()> {
        self.shared()
            .call(Call::EventDestroy, |state| state.event_destroy(event))
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.shared()
            .call(Call::EventRecord, |state| state.event_record(event, stream))
    }

    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        self.shared().call(Call::EventSynchronize, |state| {
            state.event_synchronize(event)
        })
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        let shared = self.shared();
        done(shared.call(Call::EventQuery, |state| state.event_query(event)))
    }

    unsafe fn event_elapsed_ms(&self, start: EventHandle, end: EventHandle) -> Result<f32> {
        self.shared().call(Call::EventElapsedTime, |state| {
            state.event_elapsed(start, end)
        })
    }

    unsafe fn memcpy_async(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.shared().call(Call::MemcpyAsync, |state| {
            state.memcpy(dst.0, src.0, bytes, stream)
        })
    }

    unsafe fn memset_d8_async(
        &self,
        dst: DevicePtr,
        value: u8,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        self.shared().call(Call::MemsetD8Async, |state| {
            state.memset(dst.0, value, bytes, stream)
        })
    }

    unsafe fn module_load(&self, device: i32, ptx: &CStr) -> Result<ModuleHandle> {
        self.shared()
            .call(Call::ModuleLoadData, |state| state.module_load(device, ptx))
    }

    unsafe fn module_unload(&self, device: i32, module: ModuleHandle) -> Result<()> {
        self.shared().call(Call::ModuleUnload, |state| {
            state.module_unload(device, module)
        })
    }

    unsafe fn module_function(
        &self,
        device: i32,
        module: ModuleHandle,
        name: &CStr,
    ) -> Result<FunctionHandle> {
        self.shared().call(Call::ModuleGetFunction, |state| {
            state.module_function(device, module, name)
        })
    }

    unsafe fn launch_kernel(
        &self,
        function: FunctionHandle,
        dims: LaunchDims,
        args: &[u64],
        stream: StreamHandle,
    ) -> Result<()> {
        self.shared().call(Call::LaunchKernel, |state| {
            state.launch(function, dims, args, stream)
        })
    }
}

/// Returns whether work is done: an injected NOT_READY is an answer, as in the real driver.
fn done(answer: Result<bool>) -> Result<bool> {
    match answer {
        Err(error) if error.code() == Some(Code::NOT_READY) => Ok(false),
        answer => answer,
    }
}
