//! Attributes of drivers, devices, pools and pointers by number, capture modes, and versions.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A pool's settings and counters, all 64 bits wide here. Source: `CUmemPool_attribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(i32)]
pub enum PoolAttribute {
    /// Reuse memory freed in another stream when an event orders the two (0 or 1; `int` in CUDA).
    ReuseFollowEventDependencies = 1,
    /// Reuse memory whose free is seen to have completed (0 or 1; `int` in CUDA).
    ReuseAllowOpportunistic = 2,
    /// Insert dependencies between streams in order to reuse memory (0 or 1; `int` in CUDA).
    ReuseAllowInternalDependencies = 3,
    /// Bytes kept before freed memory goes back to the system at a synchronisation.
    ReleaseThreshold = 4,
    /// Bytes held now; read only.
    ReservedCurrent = 5,
    /// Most bytes held since the last reset; only 0 can be set.
    ReservedHigh = 6,
    /// Bytes allocated from the pool now; read only.
    UsedCurrent = 7,
    /// Most bytes allocated since the last reset; only 0 can be set.
    UsedHigh = 8,
}

impl PoolAttribute {
    /// Whether the attribute is an `int` in CUDA rather than a `cuuint64_t`.
    pub const fn is_int(self) -> bool {
        (self as i32) < 4
    }
}

/// Minimum or recommended granularity. Source: `CUmemAllocationGranularity_flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(i32)]
pub enum GranularityKind {
    /// The smallest unit that works.
    Minimum = 0,
    /// The unit for best performance.
    Recommended = 1,
}

/// A `CUdevice_attribute` number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DeviceAttribute(pub i32);

#[allow(missing_docs)] // the names are CUDA's without CU_DEVICE_ATTRIBUTE_
impl DeviceAttribute {
    pub const INTEGRATED: Self = Self(18);
    pub const UNIFIED_ADDRESSING: Self = Self(41);
    pub const MULTIPROCESSOR_COUNT: Self = Self(16);
    pub const COMPUTE_CAPABILITY_MAJOR: Self = Self(75);
    pub const COMPUTE_CAPABILITY_MINOR: Self = Self(76);
    pub const MANAGED_MEMORY: Self = Self(83);
    pub const PAGEABLE_MEMORY_ACCESS: Self = Self(88);
    pub const CONCURRENT_MANAGED_ACCESS: Self = Self(89);
    pub const CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: Self = Self(91);
    pub const HOST_REGISTER_SUPPORTED: Self = Self(99);
    pub const PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: Self = Self(100);
    pub const DIRECT_MANAGED_MEM_ACCESS_FROM_HOST: Self = Self(101);
    pub const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(102);
    pub const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: Self = Self(103);
    pub const GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: Self = Self(110);
    pub const READ_ONLY_HOST_REGISTER_SUPPORTED: Self = Self(113);
    pub const MEMORY_POOLS_SUPPORTED: Self = Self(115);
    pub const MEMPOOL_SUPPORTED_HANDLE_TYPES: Self = Self(119);
    pub const DMA_BUF_SUPPORTED: Self = Self(124);
    pub const HANDLE_TYPE_FABRIC_SUPPORTED: Self = Self(128);
    pub const NUMA_CONFIG: Self = Self(130);
    pub const NUMA_ID: Self = Self(131);
    pub const HOST_NUMA_ID: Self = Self(134);
    pub const HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(141);
    pub const HOST_NUMA_MEMORY_POOLS_SUPPORTED: Self = Self(142);
    pub const HOST_NUMA_MULTINODE_IPC_SUPPORTED: Self = Self(143);
    pub const HOST_MEMORY_POOLS_SUPPORTED: Self = Self(144);
    pub const HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(145);
}

/// A `CUdevice_P2PAttribute` number: an attribute of the link between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct P2pAttribute(pub i32);

impl P2pAttribute {
    /// How fast the link is beside others of the machine: 0 is the fastest.
    pub const PERFORMANCE_RANK: Self = Self(1);
    /// Whether the GPU can access the other's memory.
    pub const ACCESS_SUPPORTED: Self = Self(2);
    /// Whether atomic operations on the other's memory run there, without a lock of the link.
    pub const NATIVE_ATOMIC_SUPPORTED: Self = Self(3);
    /// Whether the GPU can access CUDA arrays in the other's memory.
    pub const CUDA_ARRAY_ACCESS_SUPPORTED: Self = Self(4);
    /// Whether the link has some of the native atomic operations only. Known from CUDA 13.0 on.
    pub const ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED: Self = Self(5);
}

/// Attributes for `cuPointerGetAttribute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(i32)]
pub enum PointerAttribute {
    /// 1: host, 2: device.
    MemoryType = 2,
    /// The address for the GPU.
    DevicePointer = 3,
    /// The address for the CPU.
    HostPointer = 4,
    /// The device's ordinal.
    DeviceOrdinal = 9,
    /// The start of the mapped range.
    RangeStartAddr = 11,
    /// The size of the mapped range.
    RangeSize = 12,
    /// Whether the range is mapped.
    Mapped = 13,
    /// The handle types chosen when the memory was created.
    AllowedHandleTypes = 14,
}

/// A CUDA version, as drivers report it: 13000 is 13.0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CudaVersion(pub i32);

impl CudaVersion {
    /// 12.2, the first version with host-NUMA locations and the oldest driver this crate uses.
    pub const OLDEST: Self = Self(12020);

    /// Major and minor number.
    pub const fn parts(self) -> (i32, i32) {
        (self.0 / 1000, self.0 % 1000 / 10)
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.parts();
        write!(f, "{major}.{minor}")
    }
}

impl fmt::Debug for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaVersion({self})")
    }
}

/// How the calling thread's calls interact with captures: `CUstreamCaptureMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CaptureMode(pub u32);

impl CaptureMode {
    /// Calls that a capture cannot see fail while any thread captures in this mode: the default.
    pub const GLOBAL: Self = Self(0);
    /// Such calls fail while this thread captures.
    pub const THREAD_LOCAL: Self = Self(1);
    /// Such calls never fail because of a capture.
    pub const RELAXED: Self = Self(2);
}
