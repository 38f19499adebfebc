//! Compares `layout` with cudarc's bindings, which are generated from CUDA's headers.
//!
//! The crate's own tests compile this file with the CUDA version of the development dependencies,
//! tests/bindings with any other.

use std::mem::{align_of, offset_of};

use cudarc::driver::sys;

use super::layout::*;

macro_rules! expect_same_layout {
    ($ours:ty, $theirs:ty $(, $our_field:ident = $their_field:ident)*) => {
        assert_eq!(size_of::<$ours>(), size_of::<$theirs>(), "size");
        assert_eq!(align_of::<$ours>(), align_of::<$theirs>(), "alignment");
        $(assert_eq!(
            offset_of!($ours, $our_field),
            offset_of!($theirs, $their_field),
            stringify!($our_field)
        );)*
    };
}

#[test]
fn locations_and_accesses_are_laid_out_as_in_cuda() {
    // Since 13.2 the bindings wrap `id` in an anonymous union. It is the only field after `type_`.
    expect_same_layout!(MemLocation, sys::CUmemLocation, kind = type_);
    assert_eq!(
        (offset_of!(MemLocation, id), size_of::<MemLocation>()),
        (4, 8)
    );
    expect_same_layout!(
        MemAccessDesc,
        sys::CUmemAccessDesc,
        location = location,
        flags = flags
    );
}

#[test]
fn allocation_properties_are_laid_out_as_in_cuda() {
    expect_same_layout!(
        MemAllocationProp,
        sys::CUmemAllocationProp,
        kind = type_,
        requested_handle_types = requestedHandleTypes,
        location = location,
        win32_handle_meta_data = win32HandleMetaData,
        compression_type = allocFlags
    );
    type AllocFlags = sys::CUmemAllocationProp_st__bindgen_ty_1;
    let in_flags = |offset: usize| offset - offset_of!(MemAllocationProp, compression_type);
    assert_eq!(
        in_flags(offset_of!(MemAllocationProp, gpu_direct_rdma_capable)),
        offset_of!(AllocFlags, gpuDirectRDMACapable)
    );
    assert_eq!(
        in_flags(offset_of!(MemAllocationProp, usage)),
        offset_of!(AllocFlags, usage)
    );
}

#[test]
fn pool_properties_are_laid_out_as_in_cuda() {
    expect_same_layout!(
        MemPoolProps,
        sys::CUmemPoolProps,
        kind = allocType,
        handle_types = handleTypes,
        location = location,
        win32_security_attributes = win32SecurityAttributes,
        max_size = maxSize
    );
    // Before 12.6 these are the first two of CUDA's reserved bytes.
    assert_eq!(offset_of!(MemPoolProps, usage), 32);
}

#[test]
fn copy_attributes_are_laid_out_as_in_cuda() {
    // Of CUDA 12.8 and later; the bindings for 12.2 and 12.6 have none to compare with.
    assert_eq!(
        (
            offset_of!(MemcpyAttributes, src_access_order),
            offset_of!(MemcpyAttributes, src_location_hint),
            offset_of!(MemcpyAttributes, dst_location_hint),
            offset_of!(MemcpyAttributes, flags),
            size_of::<MemcpyAttributes>(),
        ),
        (0, 4, 12, 20, 24)
    );
    assert_eq!(MEMCPY_SRC_ACCESS_ORDER_STREAM, 1);
}

#[test]
fn opaque_types_have_cudas_sizes() {
    expect_same_layout!(Opaque64, sys::CUmemPoolPtrExportData);
    expect_same_layout!(IpcEventBytes, sys::CUipcEventHandle);
    assert_eq!(size_of::<sys::CUuuid>(), 16);
    assert_eq!(size_of::<sys::CUmemGenericAllocationHandle>(), 8);
    assert_eq!(size_of::<sys::CUdeviceptr>(), 8);
    assert_eq!(size_of::<sys::CUresult>(), 4);
}

#[test]
fn numbers_are_cudas() {
    use sys::{CUevent_flags, CUmemAllocationType, CUmemLocationType, CUstream_flags};
    macro_rules! same {
        ($($ours:ident = $theirs:expr;)*) => {$(
            assert_eq!($ours, $theirs as u32, stringify!($ours));
        )*};
    }
    same! {
        PINNED = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        LOCATION_DEVICE = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        LOCATION_HOST = CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST;
        LOCATION_HOST_NUMA = CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA;
        LOCATION_HOST_NUMA_CURRENT = CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
        DMA_BUF_FD = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        STREAM_NON_BLOCKING = CUstream_flags::CU_STREAM_NON_BLOCKING;
        STREAM_CAPTURE_STATUS_NONE = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        EVENT_DEFAULT = CUevent_flags::CU_EVENT_DEFAULT;
        EVENT_DISABLE_TIMING = CUevent_flags::CU_EVENT_DISABLE_TIMING;
        EVENT_INTERPROCESS = CUevent_flags::CU_EVENT_INTERPROCESS;
        HOST_ALLOC_PORTABLE_DEVICEMAP = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        HOST_REGISTER_PORTABLE_DEVICEMAP = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        HOST_REGISTER_READ_ONLY = sys::CU_MEMHOSTREGISTER_READ_ONLY;
        MEM_ATTACH_GLOBAL = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL;
    }
}
