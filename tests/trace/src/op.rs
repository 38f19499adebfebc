//! The elements of a trace: operations with slot numbers in place of addresses and handles.

use serde::{Deserialize, Serialize};

use super::addr::{Addr, Slot};
use egmem::driver::{
    AccessDesc, AllocationProps, DeviceAttribute, GranularityKind, HandleType, Location,
    PointerAttribute, PoolAttribute, PoolProps,
};

/// The source of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The handle that [`Op::Export`] exported.
    Exported(Slot),
    /// A file descriptor that is no memory: `/dev/null`.
    GarbageFd,
    /// A fabric handle of 64 arbitrary bytes.
    GarbageFabric,
}

/// A question about a device whose answer differs from machine to machine: only the code counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Query {
    /// `cuDeviceGetName`
    Name,
    /// `cuDeviceGetUuid`
    Uuid,
    /// `cuDeviceGetPCIBusId`
    PciBusId,
    /// `cuDeviceTotalMem`
    TotalMem,
    /// `cuMemGetInfo`
    MemInfo,
}

/// A call of the driver trait, or a few that belong together.
///
/// `out` is the slot that a success fills. `stream: None` is the legacy default stream of device 0.
/// Asynchronous work is waited for at once. With `twice`, the call is made again right away and
/// the second answer is recorded too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // The fields are the arguments of the calls named, which CUDA documents.
pub enum Op {
    /// `cuDeviceGetAttribute`
    DeviceAttribute {
        device: i32,
        attribute: DeviceAttribute,
    },
    /// One of [`Query`]'s calls.
    DeviceQuery { device: i32, what: Query },
    /// `cuDeviceCanAccessPeer`
    CanAccessPeer { device: i32, peer: i32 },
    /// `cuMemGetAllocationGranularity`
    Granularity {
        props: AllocationProps,
        kind: GranularityKind,
    },
    /// `cuMemCreate`
    Create {
        out: Slot,
        size: u64,
        props: AllocationProps,
    },
    /// `cuMemRelease`
    Release { handle: Slot, twice: bool },
    /// `cuMemAddressReserve`, the hint a range's address.
    Reserve {
        out: Slot,
        size: u64,
        alignment: u64,
        hint: Option<Slot>,
    },
    /// `cuMemAddressFree`
    AddressFree { range: Slot, size: u64, twice: bool },
    /// `cuMemMap`
    Map {
        at: Addr,
        size: u64,
        offset: u64,
        handle: Slot,
    },
    /// `cuMemUnmap`
    Unmap { at: Addr, size: u64 },
    /// `cuMemSetAccess`
    SetAccess {
        at: Addr,
        size: u64,
        access: Vec<AccessDesc>,
    },
    /// `cuMemGetAccess`
    GetAccess { at: Addr, location: Location },
    /// `cuMemExportToShareableHandle`
    Export {
        out: Slot,
        handle: Slot,
        kind: HandleType,
    },
    /// `cuMemImportFromShareableHandle`
    Import { out: Slot, from: Source },
    /// `cuMemGetAllocationPropertiesFromHandle`
    Properties { handle: Slot },
    /// `cuMemRetainAllocationHandle`
    Retain { out: Slot, at: Addr },
    /// `cuPointerGetAttribute`
    PointerAttribute {
        at: Addr,
        attribute: PointerAttribute,
    },
    /// `cuMemGetAddressRange`
    AddressRange { at: Addr },
    /// `cuMemGetHandleForAddressRange`
    DmaBuf { at: Addr, size: u64 },
    /// `cuMemAlloc`
    Alloc { out: Slot, device: i32, size: u64 },
    /// `cuMemHostAlloc`
    HostAlloc { out: Slot, device: i32, size: u64 },
    /// `cuMemFree` or `cuMemFreeHost`
    FreePlain { plain: Slot, twice: bool },
    /// `cuMemPoolCreate`
    PoolCreate { out: Slot, props: PoolProps },
    /// `cuMemPoolDestroy`
    PoolDestroy { pool: Slot },
    /// `cuMemPoolSetAttribute`
    PoolSet {
        pool: Slot,
        attribute: PoolAttribute,
        value: u64,
    },
    /// `cuMemPoolGetAttribute`
    PoolGet {
        pool: Slot,
        attribute: PoolAttribute,
    },
    /// `cuMemPoolTrimTo`
    PoolTrim { pool: Slot, keep: u64 },
    /// `cuMemPoolSetAccess`
    PoolSetAccess { pool: Slot, access: Vec<AccessDesc> },
    /// `cuMemPoolGetAccess`
    PoolGetAccess { pool: Slot, location: Location },
    /// `cuMemPoolExportToShareableHandle` as a POSIX fd: fabric, refused, corrupts the heap.
    PoolExport { pool: Slot },
    /// `cuMemPoolExportPointer`
    PoolExportPointer { alloc: Slot },
    /// `cuMemAllocFromPoolAsync`, or without a pool `cuMemAllocAsync`. Filled with zeros.
    PoolAlloc {
        out: Slot,
        pool: Option<Slot>,
        size: u64,
        stream: Option<Slot>,
    },
    /// `cuMemFreeAsync`
    PoolFree { alloc: Slot, stream: Option<Slot> },
    /// `cuDeviceGetMemPool`
    DevicePool { device: i32 },
    /// `cuDeviceSetMemPool`
    SetDevicePool { device: i32, pool: Slot },
    /// `cuStreamCreate`
    StreamCreate { out: Slot, device: i32 },
    /// `cuStreamDestroy`
    StreamDestroy { stream: Slot },
    /// `cuStreamSynchronize`
    StreamSynchronize { stream: Option<Slot> },
    /// `cuStreamQuery`
    StreamQuery { stream: Option<Slot> },
    /// `cuStreamWaitEvent`
    StreamWaitEvent { stream: Option<Slot>, event: Slot },
    /// `cuEventCreate`
    EventCreate {
        out: Slot,
        device: i32,
        timing: bool,
    },
    /// `cuEventDestroy`
    EventDestroy { event: Slot },
    /// `cuEventRecord`
    EventRecord { event: Slot, stream: Option<Slot> },
    /// `cuEventSynchronize`
    EventSynchronize { event: Slot },
    /// `cuEventQuery`
    EventQuery { event: Slot },
    /// `cuEventElapsedTime`: only the code counts.
    EventElapsed { start: Slot, end: Slot },
    /// `cuMemsetD8Async`
    Memset {
        at: Addr,
        value: u8,
        bytes: u64,
        stream: Option<Slot>,
    },
    /// `cuMemcpyAsync`
    Memcpy {
        dst: Addr,
        src: Addr,
        bytes: u64,
        stream: Option<Slot>,
    },
    /// The kernel [`WRITE`](egmem::kernels::WRITE).
    WriteKernel {
        at: Addr,
        words: u64,
        seed: u64,
        threads: u32,
        stream: Option<Slot>,
    },
    /// The kernel [`CHECK_REWRITE`](egmem::kernels::CHECK_REWRITE); its report is the output.
    CheckKernel {
        at: Addr,
        words: u64,
        expected: u64,
        seed: u64,
        threads: u32,
        stream: Option<Slot>,
    },
    /// The kernel [`READ`](egmem::kernels::READ); its report is the output.
    ReadKernel {
        at: Addr,
        words: u64,
        threads: u32,
        stream: Option<Slot>,
    },
    /// The CPU writes the pattern.
    CpuWrite { at: Addr, words: u64, seed: u64 },
    /// The CPU reads; the output is a checksum.
    CpuRead { at: Addr, words: u64 },
}

impl Op {
    /// The operation's kind, as files name it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::DeviceAttribute { .. } => "device_attribute",
            Self::DeviceQuery { .. } => "device_query",
            Self::CanAccessPeer { .. } => "can_access_peer",
            Self::Granularity { .. } => "granularity",
            Self::Create { .. } => "create",
            Self::Release { .. } => "release",
            Self::Reserve { .. } => "reserve",
            Self::AddressFree { .. } => "address_free",
            Self::Map { .. } => "map",
            Self::Unmap { .. } => "unmap",
            Self::SetAccess { .. } => "set_access",
            Self::GetAccess { .. } => "get_access",
            Self::Export { .. } => "export",
            Self::Import { .. } => "import",
            Self::Properties { .. } => "properties",
            Self::Retain { .. } => "retain",
            Self::PointerAttribute { .. } => "pointer_attribute",
            Self::AddressRange { .. } => "address_range",
            Self::DmaBuf { .. } => "dma_buf",
            Self::Alloc { .. } => "alloc",
            Self::HostAlloc { .. } => "host_alloc",
            Self::FreePlain { .. } => "free_plain",
            Self::PoolCreate { .. } => "pool_create",
            Self::PoolDestroy { .. } => "pool_destroy",
            Self::PoolSet { .. } => "pool_set",
            Self::PoolGet { .. } => "pool_get",
            Self::PoolTrim { .. } => "pool_trim",
            Self::PoolSetAccess { .. } => "pool_set_access",
            Self::PoolGetAccess { .. } => "pool_get_access",
            Self::PoolExport { .. } => "pool_export",
            Self::PoolExportPointer { .. } => "pool_export_pointer",
            Self::PoolAlloc { .. } => "pool_alloc",
            Self::PoolFree { .. } => "pool_free",
            Self::DevicePool { .. } => "device_pool",
            Self::SetDevicePool { .. } => "set_device_pool",
            Self::StreamCreate { .. } => "stream_create",
            Self::StreamDestroy { .. } => "stream_destroy",
            Self::StreamSynchronize { .. } => "stream_synchronize",
            Self::StreamQuery { .. } => "stream_query",
            Self::StreamWaitEvent { .. } => "stream_wait_event",
            Self::EventCreate { .. } => "event_create",
            Self::EventDestroy { .. } => "event_destroy",
            Self::EventRecord { .. } => "event_record",
            Self::EventSynchronize { .. } => "event_synchronize",
            Self::EventQuery { .. } => "event_query",
            Self::EventElapsed { .. } => "event_elapsed",
            Self::Memset { .. } => "memset",
            Self::Memcpy { .. } => "memcpy",
            Self::WriteKernel { .. } => "write_kernel",
            Self::CheckKernel { .. } => "check_kernel",
            Self::ReadKernel { .. } => "read_kernel",
            Self::CpuWrite { .. } => "cpu_write",
            Self::CpuRead { .. } => "cpu_read",
        }
    }

    /// Whether only the code counts: the output depends on the driver's allocator.
    pub fn output_is_informational(&self) -> bool {
        matches!(
            self,
            Self::PoolGet {
                attribute: PoolAttribute::ReservedCurrent | PoolAttribute::ReservedHigh,
                ..
            }
        )
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn files_name_kinds_as_reports_do() {
        let ops = crate::generate(
            1,
            &crate::Shape {
                len: 2000,
                devices: 2,
            },
        )
        .ops;
        for op in ops {
            let json = serde_json::to_value(&op).unwrap();
            let name = json.as_object().unwrap().keys().next().unwrap();
            assert_eq!(name, op.kind());
        }
    }
}
