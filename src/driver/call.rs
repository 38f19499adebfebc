//! The calls of the driver trait, and their result codes, by name.

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
        let known = Self::ALL.iter().copied().find(|call| call.name() == name);
        let why = || format!("'{name}' is not a call of the driver trait");
        known.ok_or_else(|| crate::Error::invalid("call", why()))
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

macro_rules! codes {
    ($($name:ident = $value:literal,)*) => {
        /// A `CUresult` (or `cudaError_t`, which shares the values used here) as an integer: a driver newer than this
        /// crate may return a code that a closed enum does not have, which would be undefined behaviour.
        ///
        /// Codes that no call of [`Backend`](crate::Backend) returns have no name here.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct Code(pub i32);

        impl Code {
            /// The call succeeded: `CUDA_SUCCESS`.
            pub const SUCCESS: Self = Self(0);
            $(
                #[doc = concat!("`CUDA_ERROR_", stringify!($name), "`")]
                pub const $name: Self = Self($value);
            )*

            /// Returns the code's name in CUDA's documentation, or `None` for a code unknown to this crate.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    0 => Some("CUDA_SUCCESS"),
                    $($value => Some(concat!("CUDA_ERROR_", stringify!($name))),)*
                    _ => None,
                }
            }
        }
    };
}

impl Code {
    /// Returns whether the code means that the process has lost its context on the GPU: every later call on
    /// that GPU fails the same way until the process ends.
    pub const fn loses_context(self) -> bool {
        matches!(
            self,
            Self::ECC_UNCORRECTABLE
                | Self::NVLINK_UNCORRECTABLE
                | Self::CONTAINED
                | Self::ILLEGAL_ADDRESS
                | Self::LAUNCH_TIMEOUT
                | Self::CONTEXT_IS_DESTROYED
                | Self::ASSERT
                | Self::HARDWARE_STACK_ERROR
                | Self::ILLEGAL_INSTRUCTION
                | Self::MISALIGNED_ADDRESS
                | Self::INVALID_ADDRESS_SPACE
                | Self::INVALID_PC
                | Self::LAUNCH_FAILED
                | Self::TENSOR_MEMORY_LEAK
                | Self::EXTERNAL_DEVICE
        )
    }
}

codes! {
    INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEINITIALIZED = 4, STUB_LIBRARY = 34,
    CALL_REQUIRES_NEWER_DRIVER = 36, DEVICE_UNAVAILABLE = 46, NO_DEVICE = 100, INVALID_DEVICE = 101,
    DEVICE_NOT_LICENSED = 102, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, MAP_FAILED = 205, UNMAP_FAILED = 206,
    ALREADY_MAPPED = 208, NO_BINARY_FOR_GPU = 209, ECC_UNCORRECTABLE = 214, PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_PTX = 218, NVLINK_UNCORRECTABLE = 220, JIT_COMPILER_NOT_FOUND = 221, UNSUPPORTED_PTX_VERSION = 222,
    JIT_COMPILATION_DISABLED = 223, CONTAINED = 226, INSUFFICIENT_LOADER_VERSION = 227, FILE_NOT_FOUND = 301,
    SHARED_OBJECT_SYMBOL_NOT_FOUND = 302, SHARED_OBJECT_INIT_FAILED = 303, OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_TIMEOUT = 702, CONTEXT_IS_DESTROYED = 709, ASSERT = 710, HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713, HARDWARE_STACK_ERROR = 714, ILLEGAL_INSTRUCTION = 715, MISALIGNED_ADDRESS = 716,
    INVALID_ADDRESS_SPACE = 717, INVALID_PC = 718, LAUNCH_FAILED = 719, TENSOR_MEMORY_LEAK = 721, NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801, SYSTEM_NOT_READY = 802, SYSTEM_DRIVER_MISMATCH = 803, COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
    MPS_CONNECTION_FAILED = 805, MPS_RPC_FAILURE = 806, MPS_SERVER_NOT_READY = 807, MPS_MAX_CLIENTS_REACHED = 808,
    MPS_MAX_CONNECTIONS_REACHED = 809, MPS_CLIENT_TERMINATED = 810, STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901, STREAM_CAPTURE_MERGE = 902, STREAM_CAPTURE_ISOLATION = 905,
    STREAM_CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907, STREAM_CAPTURE_WRONG_THREAD = 908, TIMEOUT = 909,
    EXTERNAL_DEVICE = 911, FABRIC_NOT_READY = 919, UNKNOWN = 999,
}

impl Code {
    /// `cudaErrorInsufficientDriver`: the CUDA runtime library is newer than the driver.
    pub const RUNTIME_NEEDS_NEWER_DRIVER: Self = Self(35);
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "unknown code {}", self.0),
        }
    }
}

/// A driver call that failed, and the code it failed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// The call.
    pub call: Call,
    /// Its result.
    pub code: Code,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.call, self.code)
    }
}

impl std::error::Error for DriverError {}

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
