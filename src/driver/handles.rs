//! Handles and addresses: plain numbers from the driver, and forms of memory and events that can leave the process.

use std::fmt;
use std::os::fd::OwnedFd;

use crate::HandleType;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident,)*) => {$(
        $(#[$doc])*
        ///
        /// A plain number from the driver: it owns nothing. Using it is unsafe, because it may no longer
        /// refer to anything.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u64);
    )*};
}

handles! {
    /// Physical memory: `CUmemGenericAllocationHandle`.
    PhysicalHandle,
    /// A memory pool: `CUmemoryPool` or `cudaMemPool_t`, the same object.
    PoolHandle,
    /// A loaded module: `CUmodule`.
    ModuleHandle,
    /// A kernel: `CUfunction`.
    FunctionHandle,
}

/// A stream with the device that it belongs to: `CUstream`. A plain value: it owns nothing,
/// and using it is unsafe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamHandle {
    /// The device's ordinal.
    pub device: i32,
    /// The driver's pointer; 0 is the legacy default stream.
    pub raw: u64,
}

impl StreamHandle {
    /// `CU_STREAM_PER_THREAD`: one handle for another stream in each thread.
    pub const PER_THREAD: u64 = 2;

    /// Returns whether it is a default stream, of whichever context is current: 0, 1 (`CU_STREAM_LEGACY`) or
    /// [`PER_THREAD`](Self::PER_THREAD).
    pub const fn is_default(self) -> bool {
        self.raw <= Self::PER_THREAD
    }
}

/// An event with the device that it belongs to: `CUevent`. A plain value: it owns nothing,
/// and using it is unsafe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventHandle {
    /// The device's ordinal.
    pub device: i32,
    /// The driver's pointer.
    pub raw: u64,
}

/// An address in CUDA's unified address space: `CUdeviceptr`.
///
/// For host memory it is also the CPU's address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// Returns the address `bytes` further.
    ///
    /// # Panics
    /// In debug builds, if the address would wrap.
    #[allow(clippy::should_implement_trait)] // `+` would suggest a distance as the result.
    pub const fn add(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevicePtr({:#x})", self.0)
    }
}

// SAFETY: `repr(transparent)` over the 64-bit address that a kernel's pointer parameter is.
#[cfg(feature = "interop")]
unsafe impl cudarc::driver::DeviceRepr for DevicePtr {}

#[cfg(feature = "interop")]
impl From<&cudarc::driver::CudaStream> for StreamHandle {
    /// Converts the stream for this crate's calls. cudarc still owns it: it must outlive the handle's use.
    fn from(stream: &cudarc::driver::CudaStream) -> Self {
        Self {
            device: stream.context().ordinal() as i32,
            raw: stream.cu_stream() as u64,
        }
    }
}

/// One copy of a batch, for [`Backend::memcpy_batch_async`](crate::Backend::memcpy_batch_async).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemcpyDesc {
    /// The destination.
    pub dst: DevicePtr,
    /// The source.
    pub src: DevicePtr,
    /// The number of bytes.
    pub bytes: u64,
}

/// 64 bytes that grant a right: wiped when dropped.
#[derive(Clone, PartialEq, Eq)]
struct Secret(Box<[u8; 64]>);

impl Secret {
    fn from_bytes(bytes: &[u8; 64]) -> Self {
        // Copies into memory that is wiped later, not through the stack.
        let mut own = Box::new([0; 64]);
        own.copy_from_slice(bytes);
        Self(own)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("redacted")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        for byte in self.0.iter_mut() {
            // SAFETY: `byte` is a live, exclusive reference; volatile so that the compiler keeps the wipe.
            unsafe { std::ptr::write_volatile(byte, 0) };
        }
    }
}

/// The 64 bytes that identify memory across the nodes of an IMEX domain: `CUmemFabricHandle`.
///
/// They grant the right to map the memory, so `Debug` hides them and dropping wipes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricHandle(Secret);

impl FabricHandle {
    /// Returns the handle with these bytes.
    pub fn from_bytes(bytes: &[u8; 64]) -> Self {
        Self(Secret::from_bytes(bytes))
    }

    /// Returns the handle's bytes: a secret.
    pub fn expose_bytes(&self) -> &[u8; 64] {
        &self.0.0
    }
}

/// An event in a form that can leave the process: the 64 bytes of `CUipcEventHandle`, which are those of
/// `cudaIpcEventHandle_t` and of PyTorch's `Event.ipc_handle()`.
///
/// They grant the right to record the event, so `Debug` hides them and dropping wipes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpcEventHandle(Secret);

impl IpcEventHandle {
    /// Returns the handle with these bytes.
    pub fn from_bytes(bytes: &[u8; 64]) -> Self {
        Self(Secret::from_bytes(bytes))
    }

    /// Returns the handle's bytes: a secret.
    pub fn expose_bytes(&self) -> &[u8; 64] {
        &self.0.0
    }
}

/// Memory in a form that can leave the process.
#[derive(Debug)]
pub enum ShareableHandle {
    /// A file descriptor, owned: closed when dropped.
    PosixFd(OwnedFd),
    /// A fabric handle.
    Fabric(FabricHandle),
}

impl ShareableHandle {
    /// Returns its type.
    pub const fn handle_type(&self) -> HandleType {
        match self {
            Self::PosixFd(_) => HandleType::PosixFd,
            Self::Fabric(_) => HandleType::Fabric,
        }
    }
}

/// A pool allocation in a form that can leave the process: `CUmemPoolPtrExportData`.
#[derive(Clone)]
pub struct PoolPtrExport(pub [u8; 64]);

impl fmt::Debug for PoolPtrExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PoolPtrExport(redacted)")
    }
}
