//! The structs that cross the C ABI, in plain integers.
//!
//! CUDA's own enums are closed in the bindings, and a driver may write a value that they lack;
//! integers hold any. The layouts are checked below against the bindings of the chosen version.

use std::ffi::c_void;

use crate::driver::{Access, AccessDesc, AllocationProps, Call, HandleTypes, Location, PoolProps};
use crate::{Error, Result};

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `cudaMemAllocationTypePinned`
const PINNED: u32 = 1;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
pub(super) const DMA_BUF_FD: u32 = 1;
/// `CU_STREAM_NON_BLOCKING`
pub(super) const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_STREAM_CAPTURE_STATUS_NONE`
pub(super) const STREAM_CAPTURE_STATUS_NONE: u32 = 0;
/// `CU_EVENT_DEFAULT`
pub(super) const EVENT_DEFAULT: u32 = 0;
/// `CU_EVENT_DISABLE_TIMING`
pub(super) const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`
pub(super) const HOST_ALLOC_PORTABLE_DEVICEMAP: u32 = 1 | 2;

/// `CUmemLocation`, `cudaMemLocation`
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct MemLocation {
    kind: u32,
    id: i32,
}

impl From<Location> for MemLocation {
    fn from(location: Location) -> Self {
        let (kind, id) = match location {
            Location::Device(ordinal) => (1, ordinal),
            Location::Host => (2, 0),
            Location::HostNuma(node) => (3, node),
            Location::HostNumaCurrent => (4, 0),
        };
        Self { kind, id }
    }
}

impl MemLocation {
    fn to_location(self, call: Call) -> Result<Location> {
        match self.kind {
            1 => Ok(Location::Device(self.id)),
            2 => Ok(Location::Host),
            3 => Ok(Location::HostNuma(self.id)),
            4 => Ok(Location::HostNumaCurrent),
            kind => Err(Error::System {
                what: call.name().into(),
                detail: format!("the driver names a location type unknown here: {kind}"),
            }),
        }
    }
}

/// `CUmemAccessDesc`, `cudaMemAccessDesc`
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct MemAccessDesc {
    location: MemLocation,
    flags: u32,
}

impl From<&AccessDesc> for MemAccessDesc {
    fn from(desc: &AccessDesc) -> Self {
        Self {
            location: desc.location.into(),
            flags: Access::flags(desc.access),
        }
    }
}

/// `CUmemAllocationProp`
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct MemAllocationProp {
    kind: u32,
    requested_handle_types: u32,
    location: MemLocation,
    win32_handle_meta_data: *mut c_void,
    compression_type: u8,
    gpu_direct_rdma_capable: u8,
    usage: u16,
    reserved: [u8; 4],
}

impl MemAllocationProp {
    pub(super) const ZERO: Self = Self {
        kind: 0,
        requested_handle_types: 0,
        location: MemLocation { kind: 0, id: 0 },
        win32_handle_meta_data: std::ptr::null_mut(),
        compression_type: 0,
        gpu_direct_rdma_capable: 0,
        usage: 0,
        reserved: [0; 4],
    };

    pub(super) fn to_props(self, call: Call) -> Result<AllocationProps> {
        Ok(AllocationProps {
            location: self.location.to_location(call)?,
            handle_types: HandleTypes::from_bits(self.requested_handle_types),
            gpu_direct_rdma: self.gpu_direct_rdma_capable != 0,
        })
    }
}

impl From<&AllocationProps> for MemAllocationProp {
    fn from(props: &AllocationProps) -> Self {
        Self {
            kind: PINNED,
            requested_handle_types: props.handle_types.bits(),
            location: props.location.into(),
            gpu_direct_rdma_capable: props.gpu_direct_rdma.into(),
            ..Self::ZERO
        }
    }
}

/// `CUmemPoolProps`, `cudaMemPoolProps`. Before CUDA 12.2 `max_size`, before 12.6 `usage` were
/// reserved bytes, to be zero.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct MemPoolProps {
    kind: u32,
    handle_types: u32,
    location: MemLocation,
    win32_security_attributes: *mut c_void,
    max_size: usize,
    usage: u16,
    reserved: [u8; 54],
}

impl From<&PoolProps> for MemPoolProps {
    fn from(props: &PoolProps) -> Self {
        Self {
            kind: PINNED,
            handle_types: props.handle_types.bits(),
            location: props.location.into(),
            win32_security_attributes: std::ptr::null_mut(),
            max_size: props.max_size as usize,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

/// `CUmemFabricHandle` and `CUmemPoolPtrExportData`, which are opaque bytes.
pub(super) type Opaque64 = [u8; 64];

/// The layouts of the bindings' version, so that a change in CUDA's headers fails the build.
mod layout {
    use std::mem::{align_of, offset_of, size_of};

    use cudarc::driver::sys;

    use super::*;

    macro_rules! same_layout {
        ($ours:ty, $theirs:ty $(, $our_field:ident = $their_field:ident)*) => {
            const _: () = {
                assert!(size_of::<$ours>() == size_of::<$theirs>());
                assert!(align_of::<$ours>() == align_of::<$theirs>());
                $(assert!(offset_of!($ours, $our_field) == offset_of!($theirs, $their_field));)*
            };
        };
    }

    // From 13.2 on the bindings wrap `id` in an anonymous union; size and `type_` place it.
    same_layout!(MemLocation, sys::CUmemLocation, kind = type_);
    const _: () = assert!(offset_of!(MemLocation, id) == 4 && size_of::<MemLocation>() == 8);
    same_layout!(
        MemAccessDesc,
        sys::CUmemAccessDesc,
        location = location,
        flags = flags
    );
    same_layout!(
        MemAllocationProp,
        sys::CUmemAllocationProp,
        kind = type_,
        requested_handle_types = requestedHandleTypes,
        location = location,
        win32_handle_meta_data = win32HandleMetaData,
        compression_type = allocFlags
    );
    type AllocFlags = sys::CUmemAllocationProp_st__bindgen_ty_1;
    const FLAGS: usize = offset_of!(MemAllocationProp, compression_type);
    const _: () = {
        assert!(
            offset_of!(MemAllocationProp, gpu_direct_rdma_capable) - FLAGS
                == offset_of!(AllocFlags, gpuDirectRDMACapable)
        );
        assert!(offset_of!(MemAllocationProp, usage) - FLAGS == offset_of!(AllocFlags, usage));
    };
    same_layout!(
        MemPoolProps,
        sys::CUmemPoolProps,
        kind = allocType,
        handle_types = handleTypes,
        location = location,
        win32_security_attributes = win32SecurityAttributes,
        max_size = maxSize
    );
    const _: () = assert!(offset_of!(MemPoolProps, usage) == 32 && size_of::<MemPoolProps>() == 88);
    same_layout!(Opaque64, sys::CUmemPoolPtrExportData);
    const _: () = {
        assert!(size_of::<sys::CUuuid>() == 16);
        assert!(size_of::<sys::CUmemGenericAllocationHandle>() == 8);
        assert!(size_of::<sys::CUdeviceptr>() == 8);
        assert!(size_of::<sys::CUresult>() == 4);
        assert!(
            size_of::<usize>() == 8,
            "CUDA drivers are for 64-bit machines"
        );
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_survive_the_way_through_the_driver() {
        for location in [
            Location::Device(3),
            Location::Host,
            Location::HostNuma(2),
            Location::HostNumaCurrent,
        ] {
            let back = MemLocation::from(location).to_location(Call::MemCreate);
            assert_eq!(back, Ok(location));
        }
    }

    #[test]
    fn a_location_of_a_newer_driver_is_an_error() {
        let location = MemLocation { kind: 77, id: 1 };
        let error = location.to_location(Call::MemCreate).unwrap_err();
        assert!(error.to_string().contains("77"), "{error}");
    }
}
