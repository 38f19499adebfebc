//! The calls about memory: addresses, physical memory, the older allocators.

use std::os::fd::OwnedFd;
use std::ptr;

use super::abi::{self, MemAccessDesc, MemAllocationProp, MemLocation};
use super::backend::Cuda;
use super::fd;
use super::handles::{export, import, opaque};
use crate::*;

// The SAFETY comments below refer to this: pointers are to live values of the types in CUDA's headers. The
// call fills or reads them before it returns and does not keep them. The driver checks numbers and handles.
// The caller guarantees, by the contract of `Backend`, that nothing uses memory that a call removes.

impl Cuda {
    pub(super) fn mem_granularity(
        &self,
        props: &AllocationProps,
        kind: GranularityKind,
    ) -> Result<u64> {
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

    pub(super) fn mem_create(&self, size: u64, props: &AllocationProps) -> Result<PhysicalHandle> {
        let (raw, mut handle) = (MemAllocationProp::from(props), 0);
        // SAFETY: as said above; the flags must be 0.
        let created = unsafe { self.api().mem_create(&mut handle, size as usize, &raw, 0) };
        match created {
            Ok(()) => Ok(PhysicalHandle(handle)),
            Err(error) => Err(self.core.age(error, props.location, props.handle_types)),
        }
    }

    pub(super) unsafe fn mem_release(&self, handle: PhysicalHandle) -> Result<()> {
        // SAFETY: as said above.
        unsafe { self.api().mem_release(handle.0) }
    }

    pub(super) fn mem_address_reserve(
        &self,
        size: u64,
        alignment: u64,
        hint: u64,
    ) -> Result<DevicePtr> {
        let mut ptr = 0;
        // SAFETY: as said above; the hint is not binding, the flags must be 0.
        unsafe {
            self.api()
                .mem_address_reserve(&mut ptr, size as usize, alignment as usize, hint, 0)?;
        }
        Ok(DevicePtr(ptr))
    }

    pub(super) unsafe fn mem_address_free(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        // SAFETY: as said above.
        unsafe { self.api().mem_address_free(ptr.0, size as usize) }
    }

    pub(super) unsafe fn mem_map(
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

    pub(super) unsafe fn mem_unmap(&self, ptr: DevicePtr, size: u64) -> Result<()> {
        // SAFETY: as said above.
        unsafe { self.api().mem_unmap(ptr.0, size as usize) }
    }

    pub(super) unsafe fn mem_set_access(
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

    pub(super) fn mem_get_access(&self, location: Location, ptr: DevicePtr) -> Result<u64> {
        let (location, mut flags) = (MemLocation::from(location), 0);
        // SAFETY: as said above.
        unsafe { self.api().mem_get_access(&mut flags, &location, ptr.0)? };
        Ok(flags)
    }

    pub(super) unsafe fn mem_export(
        &self,
        handle: PhysicalHandle,
        kind: HandleType,
    ) -> Result<ShareableHandle> {
        export(Call::MemExportToShareableHandle, kind, |out, bits| {
            // SAFETY: `out` is to an int or to 64 bytes, as `bits` says; the flags must be 0.
            unsafe { self.api().mem_export(out, handle.0, bits, 0) }
        })
    }

    pub(super) fn mem_import(&self, handle: &ShareableHandle) -> Result<PhysicalHandle> {
        let mut imported = 0;
        import(handle, |os_handle, bits| {
            // SAFETY: `os_handle` is an open fd's number or to 64 bytes, as `bits` says; the driver
            // checks that they name memory.
            unsafe { self.api().mem_import(&mut imported, os_handle, bits) }
        })?;
        Ok(PhysicalHandle(imported))
    }

    pub(super) unsafe fn mem_properties(&self, handle: PhysicalHandle) -> Result<AllocationProps> {
        let mut props = MemAllocationProp::ZERO;
        // SAFETY: as said above.
        unsafe { self.api().mem_get_properties(&mut props, handle.0)? };
        props.to_props(Call::MemGetAllocationPropertiesFromHandle)
    }

    pub(super) fn mem_retain(&self, ptr: DevicePtr) -> Result<PhysicalHandle> {
        let mut handle = 0;
        // SAFETY: as said above; the driver looks the address up and does not follow it.
        unsafe { self.api().mem_retain(&mut handle, opaque(ptr.0))? };
        Ok(PhysicalHandle(handle))
    }

    pub(super) fn pointer_attribute(
        &self,
        ptr: DevicePtr,
        attribute: PointerAttribute,
    ) -> Result<u64> {
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

    pub(super) fn mem_address_range(&self, ptr: DevicePtr) -> Result<(DevicePtr, u64)> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: as said above; the driver looks the address up and does not follow it.
        self.core.anywhere(|| unsafe {
            self.api()
                .mem_get_address_range(&mut base, &mut size, ptr.0)
        })?;
        Ok((DevicePtr(base), size as u64))
    }

    pub(super) unsafe fn mem_dma_buf(&self, ptr: DevicePtr, size: u64) -> Result<OwnedFd> {
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

    pub(super) fn mem_alloc(&self, device: i32, size: u64) -> Result<DevicePtr> {
        let mut ptr = 0;
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api().mem_alloc(&mut ptr, size as usize)
        })?;
        Ok(DevicePtr(ptr))
    }

    pub(super) unsafe fn mem_free(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        // SAFETY: as said above.
        self.core
            .on(device, || unsafe { self.api().mem_free(ptr.0) })
    }

    pub(super) fn mem_host_alloc(&self, device: i32, size: u64) -> Result<DevicePtr> {
        let mut ptr = ptr::null_mut();
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api()
                .mem_host_alloc(&mut ptr, size as usize, abi::HOST_ALLOC_PORTABLE_DEVICEMAP)
        })?;
        Ok(DevicePtr(ptr as u64))
    }

    pub(super) unsafe fn mem_free_host(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api().mem_free_host(opaque(ptr.0))
        })
    }

    pub(super) unsafe fn mem_host_register(
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

    pub(super) unsafe fn mem_host_unregister(&self, device: i32, ptr: DevicePtr) -> Result<()> {
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api().mem_host_unregister(opaque(ptr.0))
        })
    }

    pub(super) fn mem_host_device_pointer(&self, device: i32, ptr: DevicePtr) -> Result<DevicePtr> {
        let mut address = 0;
        // SAFETY: as said above; the driver looks the address up and does not follow it; the flags must be 0.
        self.core.on(device, || unsafe {
            self.api()
                .mem_host_get_device_pointer(&mut address, opaque(ptr.0), 0)
        })?;
        Ok(DevicePtr(address))
    }

    pub(super) fn mem_alloc_managed(&self, device: i32, size: u64) -> Result<DevicePtr> {
        let mut ptr = 0;
        // SAFETY: as said above.
        self.core.on(device, || unsafe {
            self.api()
                .mem_alloc_managed(&mut ptr, size as usize, abi::MEM_ATTACH_GLOBAL)
        })?;
        Ok(DevicePtr(ptr))
    }
}
