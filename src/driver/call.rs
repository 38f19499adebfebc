//! The calls of the driver trait, by name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Declares the calls. A call is named `cu` and the variant's name, unless a name follows.
macro_rules! calls {
    (@name $variant:ident) => { concat!("cu", stringify!($variant)) };
    (@name $variant:ident $name:literal) => { $name };
    ($($variant:ident $(= $name:literal)?,)*) => {
        /// A call of the driver trait. Errors, traces, counts and injected faults use it to name calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(into = "&'static str", try_from = "String")]
        #[non_exhaustive]
        pub enum Call {
            $(
                #[doc = concat!("`", calls!(@name $variant $($name)?), "`")]
                $variant,
            )*
        }

        impl Call {
            /// Every call of the driver trait.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The call's name in CUDA's documentation.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => calls!(@name $variant $($name)?),)* }
            }

            /// Returns a span for the call, which has its name.
            fn span(self) -> tracing::Span {
                match self {
                    $(Self::$variant => tracing::trace_span!(
                        target: "egmem::driver", calls!(@name $variant $($name)?)
                    ),)*
                }
            }
        }
    };
}

calls! {
    Init, DriverGetVersion, DeviceGetCount, DeviceGet, DeviceGetName, DeviceGetUuid,
    DeviceGetPciBusId = "cuDeviceGetPCIBusId", DeviceTotalMem, DeviceGetAttribute,
    DeviceCanAccessPeer, DeviceGetP2PAttribute, DevicePrimaryCtxRetain, DevicePrimaryCtxRelease,
    DevicePrimaryCtxGetState, CtxGetId,
    CtxPushCurrent, CtxPopCurrent, CtxGetCurrent, CtxSynchronize, MemGetInfo,
    MemGetAllocationGranularity, MemCreate, MemRelease, MemAddressReserve, MemAddressFree,
    MemMap, MemUnmap, MemSetAccess, MemGetAccess, MemExportToShareableHandle,
    MemImportFromShareableHandle, MemGetAllocationPropertiesFromHandle,
    MemRetainAllocationHandle, PointerGetAttribute, MemGetAddressRange,
    MemGetHandleForAddressRange, MemAlloc, MemFree, MemHostAlloc, MemFreeHost, MemHostRegister,
    MemHostUnregister, MemHostGetDevicePointer, MemAllocManaged, MemPoolCreate, MemPoolDestroy,
    MemPoolSetAttribute, MemPoolGetAttribute, MemPoolTrimTo, MemPoolSetAccess, MemPoolGetAccess,
    MemPoolExportToShareableHandle, MemPoolImportFromShareableHandle, MemPoolExportPointer,
    MemPoolImportPointer, MemAllocFromPoolAsync, MemAllocAsync, MemFreeAsync,
    DeviceGetDefaultMemPool, DeviceGetMemPool, DeviceSetMemPool, StreamCreate, StreamDestroy,
    StreamSynchronize, StreamQuery, StreamWaitEvent, StreamIsCapturing,
    ThreadExchangeStreamCaptureMode, EventCreate, EventDestroy, EventRecord, EventSynchronize,
    EventQuery, EventElapsedTime, IpcGetEventHandle, IpcOpenEventHandle, MemcpyAsync, MemcpyBatchAsync, MemsetD8Async, ModuleLoadData,
    ModuleUnload, ModuleGetFunction, LaunchKernel,
    RtMemPoolCreate = "cudaMemPoolCreate", RtMemPoolDestroy = "cudaMemPoolDestroy",
    RtMemPoolSetAttribute = "cudaMemPoolSetAttribute", RtMemPoolGetAttribute = "cudaMemPoolGetAttribute",
    RtMemPoolTrimTo = "cudaMemPoolTrimTo", RtMemPoolSetAccess = "cudaMemPoolSetAccess",
    RtMemPoolGetAccess = "cudaMemPoolGetAccess",
    RtMemPoolExportToShareableHandle = "cudaMemPoolExportToShareableHandle",
    RtMemPoolImportFromShareableHandle = "cudaMemPoolImportFromShareableHandle",
    RtMemPoolExportPointer = "cudaMemPoolExportPointer", RtMemPoolImportPointer = "cudaMemPoolImportPointer",
    RtMallocFromPoolAsync = "cudaMallocFromPoolAsync", RtMallocAsync = "cudaMallocAsync",
    RtFreeAsync = "cudaFreeAsync", RtDeviceGetDefaultMemPool = "cudaDeviceGetDefaultMemPool",
    RtDeviceGetMemPool = "cudaDeviceGetMemPool", RtDeviceSetMemPool = "cudaDeviceSetMemPool",
    RtRuntimeGetVersion = "cudaRuntimeGetVersion", RtGetLastError = "cudaGetLastError",
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
                let why = format!("'{name}' is not a call of the driver trait");
                crate::Error::invalid("call", why)
            })
    }
}

impl TryFrom<String> for Call {
    type Error = crate::Error;

    fn try_from(name: String) -> crate::Result<Self> {
        name.parse()
    }
}

impl From<Call> for &'static str {
    fn from(call: Call) -> Self {
        call.name()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_cudas_functions() {
        for (call, name) in [
            (Call::MemMap, "cuMemMap"),
            (Call::DeviceGetPciBusId, "cuDeviceGetPCIBusId"),
            (Call::DeviceGetP2PAttribute, "cuDeviceGetP2PAttribute"),
            (Call::RtMallocAsync, "cudaMallocAsync"),
            (Call::RtMallocFromPoolAsync, "cudaMallocFromPoolAsync"),
            (Call::RtFreeAsync, "cudaFreeAsync"),
            (Call::RtRuntimeGetVersion, "cudaRuntimeGetVersion"),
        ] {
            assert_eq!(call.name(), name);
        }
        for &call in Call::ALL {
            let prefix = match format!("{call:?}").starts_with("Rt") {
                true => "cuda",
                false => "cu",
            };
            assert!(call.name().starts_with(prefix), "{call:?}");
            let upper = call.name()[prefix.len()..].starts_with(char::is_uppercase);
            assert!(upper && call.name().parse().ok() == Some(call), "{call:?}");
        }
    }
}
