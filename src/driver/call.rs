//! The calls of the driver trait, by name.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! calls {
    ($($variant:ident => $name:literal,)*) => {
        /// A call of the driver trait. Errors, traces, counts and injected faults use it to name calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum Call {
            $(
                #[doc = concat!("`", $name, "`")]
                #[serde(rename = $name)]
                $variant,
            )*
        }

        impl Call {
            /// Every call of the driver trait.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The call's name in CUDA's documentation.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns a span for the call, which has its name.
            fn span(self) -> tracing::Span {
                match self {
                    $(Self::$variant => tracing::trace_span!(target: "egmem::driver", $name),)*
                }
            }
        }
    };
}

calls! {
    Init => "cuInit",
    DriverGetVersion => "cuDriverGetVersion",
    DeviceGetCount => "cuDeviceGetCount",
    DeviceGet => "cuDeviceGet",
    DeviceGetName => "cuDeviceGetName",
    DeviceGetUuid => "cuDeviceGetUuid",
    DeviceGetPciBusId => "cuDeviceGetPCIBusId",
    DeviceTotalMem => "cuDeviceTotalMem",
    DeviceGetAttribute => "cuDeviceGetAttribute",
    DeviceCanAccessPeer => "cuDeviceCanAccessPeer",
    DeviceGetP2PAttribute => "cuDeviceGetP2PAttribute",
    DevicePrimaryCtxRetain => "cuDevicePrimaryCtxRetain",
    DevicePrimaryCtxRelease => "cuDevicePrimaryCtxRelease",
    CtxPushCurrent => "cuCtxPushCurrent",
    CtxPopCurrent => "cuCtxPopCurrent",
    CtxGetCurrent => "cuCtxGetCurrent",
    CtxSynchronize => "cuCtxSynchronize",
    MemGetInfo => "cuMemGetInfo",
    MemGetAllocationGranularity => "cuMemGetAllocationGranularity",
    MemCreate => "cuMemCreate",
    MemRelease => "cuMemRelease",
    MemAddressReserve => "cuMemAddressReserve",
    MemAddressFree => "cuMemAddressFree",
    MemMap => "cuMemMap",
    MemUnmap => "cuMemUnmap",
    MemSetAccess => "cuMemSetAccess",
    MemGetAccess => "cuMemGetAccess",
    MemExportToShareableHandle => "cuMemExportToShareableHandle",
    MemImportFromShareableHandle => "cuMemImportFromShareableHandle",
    MemGetAllocationPropertiesFromHandle => "cuMemGetAllocationPropertiesFromHandle",
    MemRetainAllocationHandle => "cuMemRetainAllocationHandle",
    PointerGetAttribute => "cuPointerGetAttribute",
    MemGetAddressRange => "cuMemGetAddressRange",
    MemGetHandleForAddressRange => "cuMemGetHandleForAddressRange",
    MemAlloc => "cuMemAlloc",
    MemFree => "cuMemFree",
    MemHostAlloc => "cuMemHostAlloc",
    MemFreeHost => "cuMemFreeHost",
    MemHostRegister => "cuMemHostRegister",
    MemHostUnregister => "cuMemHostUnregister",
    MemHostGetDevicePointer => "cuMemHostGetDevicePointer",
    MemAllocManaged => "cuMemAllocManaged",
    MemPoolCreate => "cuMemPoolCreate",
    MemPoolDestroy => "cuMemPoolDestroy",
    MemPoolSetAttribute => "cuMemPoolSetAttribute",
    MemPoolGetAttribute => "cuMemPoolGetAttribute",
    MemPoolTrimTo => "cuMemPoolTrimTo",
    MemPoolSetAccess => "cuMemPoolSetAccess",
    MemPoolGetAccess => "cuMemPoolGetAccess",
    MemPoolExportToShareableHandle => "cuMemPoolExportToShareableHandle",
    MemPoolImportFromShareableHandle => "cuMemPoolImportFromShareableHandle",
    MemPoolExportPointer => "cuMemPoolExportPointer",
    MemPoolImportPointer => "cuMemPoolImportPointer",
    MemAllocFromPoolAsync => "cuMemAllocFromPoolAsync",
    MemAllocAsync => "cuMemAllocAsync",
    MemFreeAsync => "cuMemFreeAsync",
    DeviceGetDefaultMemPool => "cuDeviceGetDefaultMemPool",
    DeviceGetMemPool => "cuDeviceGetMemPool",
    DeviceSetMemPool => "cuDeviceSetMemPool",
    StreamCreate => "cuStreamCreate",
    StreamDestroy => "cuStreamDestroy",
    StreamSynchronize => "cuStreamSynchronize",
    StreamQuery => "cuStreamQuery",
    StreamWaitEvent => "cuStreamWaitEvent",
    StreamIsCapturing => "cuStreamIsCapturing",
    ThreadExchangeStreamCaptureMode => "cuThreadExchangeStreamCaptureMode",
    EventCreate => "cuEventCreate",
    EventDestroy => "cuEventDestroy",
    EventRecord => "cuEventRecord",
    EventSynchronize => "cuEventSynchronize",
    EventQuery => "cuEventQuery",
    EventElapsedTime => "cuEventElapsedTime",
    MemcpyAsync => "cuMemcpyAsync",
    MemcpyBatchAsync => "cuMemcpyBatchAsync",
    MemsetD8Async => "cuMemsetD8Async",
    ModuleLoadData => "cuModuleLoadData",
    ModuleUnload => "cuModuleUnload",
    ModuleGetFunction => "cuModuleGetFunction",
    LaunchKernel => "cuLaunchKernel",
    RtSetDevice => "cudaSetDevice",
    RtMemPoolCreate => "cudaMemPoolCreate",
    RtMemPoolDestroy => "cudaMemPoolDestroy",
    RtMemPoolSetAttribute => "cudaMemPoolSetAttribute",
    RtMemPoolGetAttribute => "cudaMemPoolGetAttribute",
    RtMemPoolTrimTo => "cudaMemPoolTrimTo",
    RtMemPoolSetAccess => "cudaMemPoolSetAccess",
    RtMemPoolGetAccess => "cudaMemPoolGetAccess",
    RtMemPoolExportToShareableHandle => "cudaMemPoolExportToShareableHandle",
    RtMemPoolImportFromShareableHandle => "cudaMemPoolImportFromShareableHandle",
    RtMemPoolExportPointer => "cudaMemPoolExportPointer",
    RtMemPoolImportPointer => "cudaMemPoolImportPointer",
    RtMallocFromPoolAsync => "cudaMallocFromPoolAsync",
    RtMallocAsync => "cudaMallocAsync",
    RtFreeAsync => "cudaFreeAsync",
    RtDeviceGetDefaultMemPool => "cudaDeviceGetDefaultMemPool",
    RtDeviceGetMemPool => "cudaDeviceGetMemPool",
    RtDeviceSetMemPool => "cudaDeviceSetMemPool",
    RtRuntimeGetVersion => "cudaRuntimeGetVersion",
}

impl Call {
    /// Enters a span of the target `egmem::driver` for the call, until the result is dropped: its duration is the call's.
    /// If no subscriber wants level TRACE, this takes a load.
    #[inline]
    pub fn traced(self) -> Option<tracing::span::EnteredSpan> {
        let wanted = tracing::level_filters::LevelFilter::current() >= tracing::Level::TRACE;
        wanted.then(|| self.span().entered())
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Call {
    type Err = crate::Error;

    fn from_str(name: &str) -> crate::Result<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|call| call.name() == name)
            .ok_or_else(|| {
                crate::Error::invalid(
                    "call",
                    format!("'{name}' is not a call of the driver trait"),
                )
            })
    }
}
