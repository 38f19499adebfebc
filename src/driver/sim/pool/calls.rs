//! The pool calls of either API: the same pools, under that API's call names.

use std::sync::Arc;

use super::super::shared::Shared;
use crate::Result;
use crate::{
    AccessDesc, Call, DevicePtr, HandleType, Location, PoolApi, PoolAttribute, PoolCalls,
    PoolHandle, PoolProps, PoolPtrExport, ShareableHandle, StreamHandle,
};

/// The pools as seen through one API.
#[derive(Debug)]
pub(in crate::sim) struct Face {
    shared: Arc<Shared>,
    api: PoolApi,
}

impl Face {
    pub(in crate::sim) fn new(shared: Arc<Shared>, api: PoolApi) -> Self {
        Self { shared, api }
    }

    fn named(&self, driver: Call, runtime: Call) -> Call {
        match self.api {
            PoolApi::Driver => driver,
            PoolApi::Runtime => runtime,
        }
    }
}

// SAFETY: as for the simulator's `Backend`: chunks are mapped, with the host's protection, before
// an allocation in them is reported.
unsafe impl PoolCalls for Face {
    fn api(&self) -> &'static str {
        match self.api {
            PoolApi::Driver => "driver",
            PoolApi::Runtime => "runtime",
        }
    }

    fn pool_create(&self, props: &PoolProps) -> Result<PoolHandle> {
        let call = self.named(Call::MemPoolCreate, Call::RtMemPoolCreate);
        self.shared.call(call, |state| state.pool_create(props))
    }

    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()> {
        let call = self.named(Call::MemPoolDestroy, Call::RtMemPoolDestroy);
        self.shared.call(call, |state| state.pool_destroy(pool))
    }

    unsafe fn pool_set_attribute(
        &self,
        pool: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Result<()> {
        let call = self.named(Call::MemPoolSetAttribute, Call::RtMemPoolSetAttribute);
        self.shared.call(call, |state| {
            state.pool_set_attribute(pool, attribute, value)
        })
    }

    unsafe fn pool_get_attribute(&self, pool: PoolHandle, attribute: PoolAttribute) -> Result<u64> {
        let call = self.named(Call::MemPoolGetAttribute, Call::RtMemPoolGetAttribute);
        self.shared
            .call(call, |state| state.pool_get_attribute(pool, attribute))
    }

    unsafe fn pool_trim_to(&self, pool: PoolHandle, keep: u64) -> Result<()> {
        let call = self.named(Call::MemPoolTrimTo, Call::RtMemPoolTrimTo);
        self.shared
            .call(call, |state| state.pool_trim_to(pool, keep))
    }

    unsafe fn pool_set_access(&self, pool: PoolHandle, access: &[AccessDesc]) -> Result<()> {
        let call = self.named(Call::MemPoolSetAccess, Call::RtMemPoolSetAccess);
        self.shared
            .call(call, |state| state.pool_set_access(pool, access))
    }

    unsafe fn pool_get_access(&self, pool: PoolHandle, location: Location) -> Result<u64> {
        let call = self.named(Call::MemPoolGetAccess, Call::RtMemPoolGetAccess);
        self.shared
            .call(call, |state| state.pool_get_access(pool, location))
    }

    unsafe fn pool_export(&self, pool: PoolHandle, kind: HandleType) -> Result<ShareableHandle> {
        self.shared
            .call(Call::MemPoolExportToShareableHandle, |state| {
                state.pool_export(pool, kind)
            })
    }

    fn pool_import(&self, handle: &ShareableHandle) -> Result<PoolHandle> {
        self.shared
            .call(Call::MemPoolImportFromShareableHandle, |state| {
                state.pool_import(handle)
            })
    }

    fn pool_export_pointer(&self, ptr: DevicePtr) -> Result<PoolPtrExport> {
        self.shared.call(Call::MemPoolExportPointer, |state| {
            state.pool_export_pointer(ptr)
        })
    }

    unsafe fn pool_import_pointer(
        &self,
        pool: PoolHandle,
        export: &PoolPtrExport,
    ) -> Result<DevicePtr> {
        self.shared.call(Call::MemPoolImportPointer, |state| {
            state.pool_import_pointer(pool, export)
        })
    }

    unsafe fn alloc_from_pool_async(
        &self,
        pool: PoolHandle,
        size: u64,
        stream: StreamHandle,
    ) -> Result<DevicePtr> {
        let call = self.named(Call::MemAllocFromPoolAsync, Call::RtMallocFromPoolAsync);
        self.shared
            .call(call, |state| state.alloc_from_pool(pool, size, stream))
    }

    unsafe fn alloc_async(&self, size: u64, stream: StreamHandle) -> Result<DevicePtr> {
        let call = self.named(Call::MemAllocAsync, Call::RtMallocAsync);
        self.shared
            .call(call, |state| state.alloc_async(size, stream))
    }

    unsafe fn free_async(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let call = self.named(Call::MemFreeAsync, Call::RtFreeAsync);
        self.shared
            .call(call, |state| state.free_async(ptr, stream))
    }

    fn device_default_pool(&self, device: i32) -> Result<PoolHandle> {
        let call = self.named(
            Call::DeviceGetDefaultMemPool,
            Call::RtDeviceGetDefaultMemPool,
        );
        self.shared
            .call(call, |state| state.device_default_pool(device))
    }

    fn device_pool(&self, device: i32) -> Result<PoolHandle> {
        let call = self.named(Call::DeviceGetMemPool, Call::RtDeviceGetMemPool);
        self.shared.call(call, |state| state.device_pool(device))
    }

    unsafe fn device_set_pool(&self, device: i32, pool: PoolHandle) -> Result<()> {
        let call = self.named(Call::DeviceSetMemPool, Call::RtDeviceSetMemPool);
        self.shared
            .call(call, |state| state.device_set_pool(device, pool))
    }
}
