//! CUDA's structs and numbers, as its C headers define them.
//!
//! This file uses nothing else of the crate, because tests/bindings compiles it alone.

use std::ffi::c_void;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`, `cudaMemAllocationTypePinned`
pub(crate) const PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
pub(crate) const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_HOST`
pub(crate) const LOCATION_HOST: u32 = 2;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`
pub(crate) const LOCATION_HOST_NUMA: u32 = 3;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT`
pub(crate) const LOCATION_HOST_NUMA_CURRENT: u32 = 4;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
pub(crate) const DMA_BUF_FD: u32 = 1;
/// `CU_STREAM_NON_BLOCKING`
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_STREAM_CAPTURE_STATUS_NONE`
pub(crate) const STREAM_CAPTURE_STATUS_NONE: u32 = 0;
/// `CU_EVENT_DEFAULT`
pub(crate) const EVENT_DEFAULT: u32 = 0;
/// `CU_EVENT_DISABLE_TIMING`
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`
pub(crate) const EVENT_INTERPROCESS: u32 = 4;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`
pub(crate) const HOST_ALLOC_PORTABLE_DEVICEMAP: u32 = 1 | 2;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`
pub(crate) const HOST_REGISTER_PORTABLE_DEVICEMAP: u32 = 1 | 2;
/// `CU_MEMHOSTREGISTER_READ_ONLY`
pub(crate) const HOST_REGISTER_READ_ONLY: u32 = 8;
/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: the source is read in the stream's order.
pub(crate) const MEMCPY_SRC_ACCESS_ORDER_STREAM: u32 = 1;
/// `CU_MEM_ATTACH_GLOBAL`
pub(crate) const MEM_ATTACH_GLOBAL: u32 = 1;

/// `CUmemLocation`, `cudaMemLocation`
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct MemLocation {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

/// `CUmemAccessDesc`, `cudaMemAccessDesc`
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct MemAccessDesc {
    pub(crate) location: MemLocation,
    pub(crate) flags: u32,
}

/// `CUmemAllocationProp`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemAllocationProp {
    pub(crate) kind: u32,
    pub(crate) requested_handle_types: u32,
    pub(crate) location: MemLocation,
    pub(crate) win32_handle_meta_data: *mut c_void,
    pub(crate) compression_type: u8,
    pub(crate) gpu_direct_rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

impl MemAllocationProp {
    pub(crate) const ZERO: Self = Self {
        kind: 0,
        requested_handle_types: 0,
        location: MemLocation { kind: 0, id: 0 },
        win32_handle_meta_data: std::ptr::null_mut(),
        compression_type: 0,
        gpu_direct_rdma_capable: 0,
        usage: 0,
        reserved: [0; 4],
    };
}

/// `CUmemPoolProps`, `cudaMemPoolProps`. Before CUDA 12.2 `max_size`, before 12.6 `usage` were
/// reserved bytes, to be zero.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemPoolProps {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location: MemLocation,
    pub(crate) win32_security_attributes: *mut c_void,
    pub(crate) max_size: usize,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 54],
}

/// `CUmemcpyAttributes`, from CUDA 12.8 on. A location of kind 0 is no hint.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct MemcpyAttributes {
    pub(crate) src_access_order: u32,
    pub(crate) src_location_hint: MemLocation,
    pub(crate) dst_location_hint: MemLocation,
    pub(crate) flags: u32,
}

/// `CUmemFabricHandle` and `CUmemPoolPtrExportData`, which are opaque bytes.
pub(crate) type Opaque64 = [u8; 64];

/// `CUipcEventHandle`, which is passed by value: an array would not be.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcEventBytes(pub(crate) Opaque64);
