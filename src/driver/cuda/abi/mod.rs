//! What crosses the C ABI: structs in plain integers, numbers as the driver's pointers, and handles that leave the process.
//!
//! A driver newer than CUDA's headers may write a value that their enums lack. In a closed Rust enum
//! that is undefined behaviour; an integer holds any value. The test `bindings` compares layouts and
//! numbers with those of CUDA's headers; ci/cudarc runs it for several CUDA versions.

#[cfg(test)]
#[path = "tests.rs"]
mod bindings;
mod layout;

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use crate::*;

pub(super) use layout::*;

/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`, `CUmemoryPool`: pointers to the driver's own
/// objects, never dereferenced here.
pub(super) type Opaque = *mut c_void;

impl From<Location> for MemLocation {
    fn from(location: Location) -> Self {
        let (kind, id) = match location {
            Location::Device(ordinal) => (LOCATION_DEVICE, ordinal),
            Location::Host => (LOCATION_HOST, 0),
            Location::HostNuma(node) => (LOCATION_HOST_NUMA, node),
            Location::HostNumaCurrent => (LOCATION_HOST_NUMA_CURRENT, 0),
        };
        Self { kind, id }
    }
}

impl MemLocation {
    fn to_location(self, call: Call) -> Result<Location> {
        match self.kind {
            LOCATION_DEVICE => Ok(Location::Device(self.id)),
            LOCATION_HOST => Ok(Location::Host),
            LOCATION_HOST_NUMA => Ok(Location::HostNuma(self.id)),
            LOCATION_HOST_NUMA_CURRENT => Ok(Location::HostNumaCurrent),
            kind => Err(Error::failed(
                call.name(),
                format!("the driver names a location type unknown here: {kind}"),
            )),
        }
    }
}

pub fn descs(access: &[AccessDesc]) -> Vec<MemAccessDesc> {
    let desc = |desc: &AccessDesc| MemAccessDesc {
        location: desc.location.into(),
        flags: Access::flags(desc.access),
    };
    access.iter().map(desc).collect()
}

impl MemAllocationProp {
    pub fn to_props(self, call: Call) -> Result<AllocationProps> {
        Ok(AllocationProps {
            location: self.location.to_location(call)?,
            handle_types: HandleTypes::from_bits(self.requested_handle_types),
            gpu_direct_rdma: self.gpu_direct_rdma_capable != 0,
        })
    }
}

impl From<&AllocationProps> for MemAllocationProp {
    fn from(props: &AllocationProps) -> Self {
        Self {
            kind: PINNED,
            requested_handle_types: props.handle_types.bits(),
            location: props.location.into(),
            gpu_direct_rdma_capable: props.gpu_direct_rdma.into(),
            ..Self::ZERO
        }
    }
}

impl From<&PoolProps> for MemPoolProps {
    fn from(props: &PoolProps) -> Self {
        Self {
            kind: PINNED,
            handle_types: props.handle_types.bits(),
            location: props.location.into(),
            win32_security_attributes: std::ptr::null_mut(),
            max_size: props.max_size as usize,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

pub(super) fn opaque(handle: u64) -> Opaque {
    handle as Opaque
}

/// Widens an `int` that the driver wrote to the first 4 bytes, the low ones.
pub(super) fn widened(value: u64) -> u64 {
    i64::from(value as i32) as u64
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
            Ok(ShareableHandle::PosixFd(unsafe { take(by, raw)? }))
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

/// Takes ownership of the fd that `call` has just written, and sets close-on-exec on it.
///
/// # Safety
/// `fd` is an fd that the driver has just created for the caller and that has no other owner, or a negative
/// number.
pub(super) unsafe fn take(call: Call, fd: RawFd) -> Result<OwnedFd> {
    if fd < 0 {
        return Err(Error::failed(
            call.name(),
            format!("the driver reports success, but its file descriptor is {fd}"),
        ));
    }
    // SAFETY: the fd is not −1, is open and has no other owner (this function's contract).
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    close_on_exec(&fd).map_err(|error| Error::system(call.name(), &error))?;
    Ok(fd)
}

/// Sets close-on-exec, which the driver may leave off: a child program must not inherit memory by accident.
fn close_on_exec(fd: &OwnedFd) -> std::io::Result<()> {
    // SAFETY: the fd is open; F_SETFD takes an integer and accesses no memory.
    let set = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    if set == -1 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

    use super::*;

    #[test]
    fn locations_survive_the_way_through_the_driver() {
        for location in [
            Location::Device(3),
            Location::Host,
            Location::HostNuma(2),
            Location::HostNumaCurrent,
        ] {
            let back = MemLocation::from(location).to_location(Call::MemCreate);
            assert_eq!(back, Ok(location));
        }
    }

    #[test]
    fn a_location_of_a_newer_driver_is_an_error() {
        let location = MemLocation { kind: 77, id: 1 };
        let error = location.to_location(Call::MemCreate).unwrap_err();
        assert!(error.to_string().contains("77"), "{error}");
    }

    #[test]
    fn a_taken_fd_closes_on_exec() {
        let file = tempfile::tempfile().unwrap();
        // SAFETY: the file is open and owns its fd; F_SETFD accesses no memory.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFD, 0) };
        // SAFETY: the fd is open and given up by `file` here.
        let fd = unsafe { take(Call::MemExportToShareableHandle, file.into_raw_fd()) }.unwrap();
        // SAFETY: as above.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    }

    #[test]
    fn a_negative_fd_is_an_error() {
        // SAFETY: a negative number is allowed.
        let error = unsafe { take(Call::MemExportToShareableHandle, -1) }.unwrap_err();
        assert!(error.to_string().contains("-1"), "{error}");
    }
}
