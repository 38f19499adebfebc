//! Locations, access and other small values.

use std::ffi::c_char;
use std::ptr::NonNull;

use egmem::Backing;
use egmem::backing::Chosen;
use egmem::driver::{Access, AccessDesc, HandleTypes, Location};

use crate::failure::{Failure, Outcome};
use crate::text;

/// The major version of this interface in the upper 16 bits, the minor one in the lower. A program that was built for
/// a version runs with a library of the same major version and the same or a higher minor version. These are not the
/// library's numbers: a new soname has a new major version.
pub const EGM_ABI_VERSION: u32 = 1;

/// A GPU's own memory; `id` is its CUDA ordinal.
pub const EGM_LOCATION_DEVICE: i32 = 1;
/// The CPU, and its memory on no particular node.
pub const EGM_LOCATION_HOST: i32 = 2;
/// A host NUMA node; `id` is the operating system's number.
pub const EGM_LOCATION_HOST_NUMA: i32 = 3;

/// No access.
pub const EGM_ACCESS_NONE: i32 = 0;
/// Read only.
pub const EGM_ACCESS_READ: i32 = 1;
/// Read and write.
pub const EGM_ACCESS_READ_WRITE: i32 = 3;

/// Shareable as a POSIX file descriptor, with processes of the machine.
pub const EGM_HANDLE_POSIX_FD: u32 = 1;
/// Shareable as a fabric handle, with the nodes of an IMEX domain.
pub const EGM_HANDLE_FABRIC: u32 = 8;

/// For `backing`: the default of the type.
pub const EGM_BACKING_DEFAULT: i32 = 0;
/// Memory that the driver creates on the node: cuMemCreate.
pub const EGM_BACKING_DRIVER: i32 = 1;
/// Pages of the process on the node, which the driver pins chunk by chunk: cuMemHostRegister. Other code's copies by the
/// driver, of addresses alone, must end where a chunk ends.
pub const EGM_BACKING_REGISTERED: i32 = 2;
/// Registered pages where they are as good or better, else the driver's memory.
pub const EGM_BACKING_AUTO: i32 = 3;

/// Where memory lies, or where accesses come from. The numbers are those of CUDA's CUmemLocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct egm_location {
    /// One of `EGM_LOCATION_…`.
    pub kind: i32,
    /// A GPU's ordinal or a node's number; 0 for ::EGM_LOCATION_HOST.
    pub id: i32,
}

impl egm_location {
    pub(crate) fn of(location: Location) -> Self {
        let (kind, id) = match location {
            Location::Device(ordinal) => (EGM_LOCATION_DEVICE, ordinal),
            Location::HostNuma(node) => (EGM_LOCATION_HOST_NUMA, node),
            Location::Host | Location::HostNumaCurrent => (EGM_LOCATION_HOST, 0),
        };
        Self { kind, id }
    }

    pub(crate) fn read(self) -> Outcome<Location> {
        match self.kind {
            EGM_LOCATION_DEVICE => Ok(Location::Device(self.id)),
            EGM_LOCATION_HOST => Ok(Location::Host),
            EGM_LOCATION_HOST_NUMA => Ok(Location::HostNuma(self.id)),
            kind => Err(Failure::invalid(
                "location",
                format!("its kind {kind} is none of EGM_LOCATION_DEVICE, _HOST and _HOST_NUMA"),
            )),
        }
    }
}

/// Access for one location.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_grant {
    /// The location that gets access; ::EGM_LOCATION_HOST stands for the CPU.
    pub who: egm_location,
    /// One of `EGM_ACCESS_…`.
    pub access: i32,
}

impl egm_grant {
    pub(crate) fn read(self) -> Outcome<AccessDesc> {
        Ok(AccessDesc {
            location: self.who.read()?,
            access: read_access(self.access)?,
        })
    }
}

/// Memory under a name at a server.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_entry {
    /// Its size in bytes.
    pub bytes: u64,
    /// Where its first part lies.
    pub location: egm_location,
    /// The number of leases on it.
    pub leases: u32,
    /// 0.
    pub reserved: u32,
}

pub(crate) fn read_access(access: i32) -> Outcome<Access> {
    let known = u64::try_from(access).ok().and_then(Access::from_flags);
    known.ok_or_else(|| {
        let why = format!("{access} is none of EGM_ACCESS_NONE, _READ and _READ_WRITE");
        Failure::invalid("access", why)
    })
}

/// Reads what memory is to be; `None` for the default.
pub(crate) fn read_backing(backing: i32) -> Outcome<Option<Backing>> {
    match backing {
        EGM_BACKING_DEFAULT => Ok(None),
        EGM_BACKING_DRIVER => Ok(Some(Backing::Driver)),
        EGM_BACKING_REGISTERED => Ok(Some(Backing::Registered)),
        EGM_BACKING_AUTO => Ok(Some(Backing::Auto)),
        _ => {
            let why =
                format!("{backing} is none of EGM_BACKING_DEFAULT, _DRIVER, _REGISTERED and _AUTO");
            Err(Failure::invalid("backing", why))
        }
    }
}

/// Writes what memory is to `out`, and why to `reason` unless it is null.
///
/// # Safety
/// `out` may be written; `reason` is null or may be written.
pub(crate) unsafe fn give_backing(chosen: &Chosen, out: NonNull<i32>, reason: *mut *mut c_char) {
    let backing = match chosen.backing {
        Backing::Driver => EGM_BACKING_DRIVER,
        Backing::Registered => EGM_BACKING_REGISTERED,
        Backing::Auto => EGM_BACKING_AUTO,
    };
    // SAFETY: the caller's promise.
    unsafe {
        out.write(backing);
        if let Some(reason) = NonNull::new(reason) {
            text::give(reason, chosen.why.to_string());
        }
    }
}

pub(crate) fn read_handle_types(bits: u32) -> Outcome<HandleTypes> {
    match bits & !(EGM_HANDLE_POSIX_FD | EGM_HANDLE_FABRIC) {
        0 => Ok(HandleTypes::from_bits(bits)),
        unknown => Err(Failure::invalid(
            "handle types",
            format!("the bits {unknown:#x} are unknown to this version"),
        )),
    }
}

/// Returns ::EGM_ABI_VERSION of the library that runs. Any thread may call this.
#[unsafe(no_mangle)]
pub extern "C" fn egm_abi_version() -> u32 {
    EGM_ABI_VERSION
}

/// Returns the library's version, such as "0.1.0". The text is valid for ever. Any thread may call this.
#[unsafe(no_mangle)]
pub extern "C" fn egm_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
