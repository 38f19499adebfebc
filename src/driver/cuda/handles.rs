//! Handles: numbers as the driver's pointers, and handles that leave the process.

use std::ffi::c_void;
use std::os::fd::AsRawFd;
use std::ptr;

use super::abi::Opaque64;
use super::fd;
use super::symbols::Opaque;
use crate::{Call, FabricHandle, HandleType, HandleTypes, IpcEventHandle, Result, ShareableHandle};

pub(super) fn opaque(handle: u64) -> Opaque {
    handle as Opaque
}

/// Imports the memory or pool behind `handle`: passes a POSIX fd by value in place of the pointer, a fabric
/// handle's bytes by pointer.
pub(super) fn import<T>(
    handle: &ShareableHandle,
    call: impl FnOnce(*mut c_void, u32) -> Result<T>,
) -> Result<T> {
    let kind = HandleTypes::from(handle.handle_type()).bits();
    match handle {
        ShareableHandle::PosixFd(fd) => call(fd.as_raw_fd() as usize as *mut c_void, kind),
        ShareableHandle::Fabric(fabric) => {
            // A copy, because the driver's signature is not const; wiped when dropped.
            let copy = fabric.clone();
            call(copy.expose_bytes().as_ptr().cast_mut().cast(), kind)
        }
    }
}

/// Exports to a handle of `kind`; `export` writes it.
pub(super) fn export(
    by: Call,
    kind: HandleType,
    export: impl FnOnce(*mut c_void, u32) -> Result<()>,
) -> Result<ShareableHandle> {
    let bits = HandleTypes::from(kind).bits();
    match kind {
        HandleType::PosixFd => {
            let mut raw = -1_i32;
            export((&raw mut raw).cast(), bits)?;
            // SAFETY: the driver has just created the fd for this call and written it.
            Ok(ShareableHandle::PosixFd(unsafe { fd::take(by, raw)? }))
        }
        HandleType::Fabric => {
            let mut bytes: Opaque64 = [0; 64];
            export(bytes.as_mut_ptr().cast(), bits)?;
            let handle = FabricHandle::from_bytes(&bytes);
            wipe(&mut bytes);
            Ok(ShareableHandle::Fabric(handle))
        }
    }
}

/// Moves an event's handle out of the bytes that the driver wrote.
pub(super) fn take_event_handle(bytes: &mut Opaque64) -> IpcEventHandle {
    let handle = IpcEventHandle::from_bytes(bytes);
    wipe(bytes);
    handle
}

fn wipe(bytes: &mut Opaque64) {
    // SAFETY: a live, exclusive reference; volatile so that the compiler keeps the wipe of the secret.
    unsafe { ptr::write_volatile(bytes, [0; 64]) };
}
