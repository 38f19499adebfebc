//! The calls about memory: addresses, physical memory, the older allocators.

use std::os::fd::OwnedFd;
use std::ptr;

use super::abi::{self, MemAllocationProp, MemLocation};
use super::core::{Core, methods};
use super::handles::{export, import, opaque, take};
use crate::*;

impl Core {
    pub(super) fn mem_granularity(
        &self,
        props: &AllocationProps,
        kind: GranularityKind,
    ) -> Result<u64> {
        let key = (*props, kind);
        if let Some(bytes) = self.granularities().get(&key) {
            return Ok(*bytes);
        }
        let bytes = self.ask_granularity(props, kind)?;
        self.granularities().insert(key, bytes);
        Ok(bytes)
    }

    pub(super) fn mem_create(&self, size: u64, props: &AllocationProps) -> Result<PhysicalHandle> {
        self.create_memory(size, props)
            .map_err(|error| self.age(error, props.location, props.handle_types))
    }

    pub(super) unsafe fn mem_export(
        &self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Result<ShareableHandle> {
        export(Call::MemExportToShareableHandle, kind, |out, bits| {
            // SAFETY: `out` is to an int or to 64 bytes, as `bits` says; the flags must be 0.
            unsafe { self.api.mem_export(out, handle.0, bits, 0) }
        })
    }

    pub(super) fn mem_import(&self, handle: &ShareableHandle) -> Result<PhysicalHandle> {
        let mut imported = 0;
        import(handle, |os_handle, bits| {
            // SAFETY: `os_handle` is an open fd's number or to 64 bytes, as `bits` says; the driver
            // checks that they name memory.
            unsafe { self.api.mem_import(&mut imported, os_handle, bits) }
        })?;
        Ok(PhysicalHandle(imported))
    }

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
    [pub(super) unsafe fn] mem_release(handle: PhysicalHandle) -> () {
        @here() mem_release(handle.0) => ()
    }
    [pub(super) fn] mem_address_reserve(size: u64, alignment: u64, hint: u64) -> DevicePtr {
        let mut ptr = 0;
        // The driver may place the range elsewhere than at the hint.
        @here() mem_address_reserve(&mut ptr, size as usize, alignment as usize, hint, 0) => DevicePtr(ptr)
    }
    [pub(super) unsafe fn] mem_address_free(ptr: DevicePtr, size: u64) -> () {
        @here() mem_address_free(ptr.0, size as usize) => ()
    }
    [pub(super) unsafe fn] mem_map(ptr: DevicePtr, size: u64, offset: u64, handle: PhysicalHandle) -> () {
        @here() mem_map(ptr.0, size as usize, offset as usize, handle.0, 0) => ()
    }
    [pub(super) unsafe fn] mem_unmap(ptr: DevicePtr, size: u64) -> () {
        @here() mem_unmap(ptr.0, size as usize) => ()
    }
    [pub(super) unsafe fn] mem_set_access(ptr: DevicePtr, size: u64, access: &[AccessDesc]) -> () {
        let descs = abi::descs(access);
        @here() mem_set_access(ptr.0, size as usize, descs.as_ptr(), descs.len()) => ()
    }
    [pub(super) fn] mem_get_access(location: Location, ptr: DevicePtr) -> u64 {
        let (location, mut flags) = (MemLocation::from(location), 0);
        @here() mem_get_access(&mut flags, &location, ptr.0) => flags
    }
    [pub(super) unsafe fn] mem_properties(handle: PhysicalHandle) -> AllocationProps {
        let mut props = MemAllocationProp::ZERO;
        @here() mem_get_properties(&mut props, handle.0)
            => props.to_props(Call::MemGetAllocationPropertiesFromHandle)?
    }
    [pub(super) fn] mem_retain(ptr: DevicePtr) -> PhysicalHandle {
        let mut handle = 0;
        @here() mem_retain(&mut handle, opaque(ptr.0)) => PhysicalHandle(handle)
    }
    [pub(super) fn] pointer_attribute(ptr: DevicePtr, attribute: PointerAttribute) -> u64 {
        // 8 bytes hold each attribute of the enum; narrower ones leave the rest as it is.
        let mut value = 0_u64;
        @anywhere() pointer_get_attribute((&raw mut value).cast(), attribute as i32, ptr.0)
            => match attribute {
                PointerAttribute::DeviceOrdinal => i64::from(value as u32 as i32) as u64,
                _ => value,
            }
    }
    [pub(super) fn] mem_address_range(ptr: DevicePtr) -> (DevicePtr, u64) {
        let (mut base, mut size) = (0, 0);
        @anywhere() mem_get_address_range(&mut base, &mut size, ptr.0) => (DevicePtr(base), size as u64)
    }
    [pub(super) unsafe fn] mem_dma_buf(ptr: DevicePtr, size: u64) -> OwnedFd {
        let mut fd = -1_i32; // this handle type is an int
        @anywhere() mem_get_handle_for_address_range(
            (&raw mut fd).cast(), ptr.0, size as usize, abi::DMA_BUF_FD, 0
        ) =>
            // SAFETY: the driver has just created the fd for this call and written it.
            unsafe { take(Call::MemGetHandleForAddressRange, fd)? }
    }

    [pub(super) fn] mem_alloc(device: i32, size: u64) -> DevicePtr {
        let mut ptr = 0;
        @on(device) mem_alloc(&mut ptr, size as usize) => DevicePtr(ptr)
    }
    [pub(super) unsafe fn] mem_free(device: i32, ptr: DevicePtr) -> () {
        @on(device) mem_free(ptr.0) => ()
    }
    [pub(super) fn] mem_host_alloc(device: i32, size: u64) -> DevicePtr {
        let mut ptr = ptr::null_mut();
        @on(device) mem_host_alloc(&mut ptr, size as usize, abi::HOST_ALLOC_PORTABLE_DEVICEMAP)
            => DevicePtr(ptr as u64)
    }
    [pub(super) unsafe fn] mem_free_host(device: i32, ptr: DevicePtr) -> () {
        @on(device) mem_free_host(opaque(ptr.0)) => ()
    }
    [pub(super) unsafe fn] mem_host_register
        (device: i32, ptr: DevicePtr, size: u64, read_only: bool, _node: Option<NodeId>) -> () {
        let flags = abi::HOST_REGISTER_PORTABLE_DEVICEMAP
            | if read_only { abi::HOST_REGISTER_READ_ONLY } else { 0 };
        @on(device) mem_host_register(opaque(ptr.0), size as usize, flags) => ()
    }
    [pub(super) unsafe fn] mem_host_unregister(device: i32, ptr: DevicePtr) -> () {
        @on(device) mem_host_unregister(opaque(ptr.0)) => ()
    }
    [pub(super) fn] mem_host_device_pointer(device: i32, ptr: DevicePtr) -> DevicePtr {
        let mut address = 0;
        @on(device) mem_host_get_device_pointer(&mut address, opaque(ptr.0), 0) => DevicePtr(address)
    }
    [pub(super) fn] mem_alloc_managed(device: i32, size: u64) -> DevicePtr {
        let mut ptr = 0;
        @on(device) mem_alloc_managed(&mut ptr, size as usize, abi::MEM_ATTACH_GLOBAL) => DevicePtr(ptr)
    }
    }
}
