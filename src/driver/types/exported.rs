//! Memory in forms that can leave the process.

use std::fmt;
use std::os::fd::OwnedFd;

use super::HandleType;

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
#[derive(Clone, PartialEq, Eq)]
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

impl fmt::Debug for FabricHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FabricHandle(redacted)")
    }
}

/// An event in a form that can leave the process: the 64 bytes of `CUipcEventHandle`, which are those of
/// `cudaIpcEventHandle_t` and of PyTorch's `Event.ipc_handle()`.
///
/// They grant the right to record the event, so `Debug` hides them and dropping wipes them.
#[derive(Clone, PartialEq, Eq)]
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

impl fmt::Debug for IpcEventHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IpcEventHandle(redacted)")
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
