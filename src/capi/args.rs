//! Arguments of calls: handles, texts, arrays, and locations, access and other small values.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use egmem::Backing;
use egmem::backing::Chosen;
use egmem::driver::{Access, AccessDesc, HandleTypes, Location};

use crate::failure::{Failure, Outcome, given_text};

/// Checks that the caller gave an object, or where a result goes: a reference that is not null. Results are written on
/// success only.
#[inline]
pub(crate) fn object<T>(reference: Option<T>, what: &'static str) -> Outcome<T> {
    reference.ok_or_else(|| null(what))
}

/// As [`object`], for a handle, which is named as its type: a null `egm_ring_side` is no side.
#[inline]
pub(crate) fn handle<T>(reference: Option<T>) -> Outcome<T> {
    reference.ok_or_else(null_handle::<T>)
}

#[cold]
fn null_handle<T>() -> Failure {
    null(
        std::any::type_name::<T>()
            .rsplit('_')
            .next()
            .unwrap_or("handle"),
    )
}

/// Writes a result that the caller may not want: `out` may be null.
pub(crate) fn write<T>(out: Option<&mut MaybeUninit<T>>, value: T) {
    if let Some(out) = out {
        out.write(value);
    }
}

/// Writes one of several results; `out` may be null. Places of several results are pointers, because two references to one
/// place must not exist, and a program may give one place twice.
///
/// # Safety
/// `out` is null or may be written.
pub(crate) unsafe fn write_one<T>(out: Option<NonNull<T>>, value: impl FnOnce() -> T) {
    if let Some(out) = out {
        // SAFETY: the caller's promise; no other reference to the place exists.
        unsafe { out.write(value()) };
    }
}

#[cold]
fn null(what: &'static str) -> Failure {
    Failure::invalid(what, "it is a null pointer")
}

/// Locks data that is valid even after a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a new object as a handle of the caller's, which must destroy it.
pub(crate) fn given<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

/// Takes an object back from the caller; `None` for a null pointer.
///
/// # Safety
/// `handle` is null, or a handle of this library that is not destroyed and is never used again.
pub(crate) unsafe fn take<T>(handle: *mut T) -> Option<Box<T>> {
    // SAFETY: `given` made it from a box, and the caller promises that this is its last use.
    (!handle.is_null()).then(|| unsafe { Box::from_raw(handle) })
}

/// Reads a string.
///
/// # Safety
/// `text` is null or ends with a zero byte, and does not change while `'a` lasts.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &'static str) -> Outcome<&'a str> {
    // SAFETY: the caller's promise.
    unsafe { optional_text(text, what)? }.ok_or_else(|| null(what))
}

/// As [`text`], but a null pointer is `None`.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn optional_text<'a>(
    text: *const c_char,
    what: &'static str,
) -> Outcome<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise; not null.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text
        .to_str()
        .map_err(|_| Failure::invalid(what, "it is not UTF-8"))?;
    Ok(Some(text))
}

/// Reads how long a call may take.
pub(crate) fn milliseconds(timeout_ms: u64) -> Outcome<Duration> {
    match timeout_ms {
        0 => Err(Failure::invalid("timeout_ms", "it is 0; valid: 1 or more")),
        some => Ok(Duration::from_millis(some)),
    }
}

/// Borrows `count` values of an array; none at all may be at a null pointer.
///
/// # Safety
/// `first` is null or points to `count` values that do not change while `'a` lasts.
pub(crate) unsafe fn values<'a, T>(
    first: *const T,
    count: usize,
    what: &'static str,
) -> Outcome<&'a [T]> {
    check_array::<T>(first.is_null(), count, what)?;
    match count {
        0 => Ok(&[]),
        // SAFETY: not null, no larger than an allocation can be; the rest is the caller's promise.
        _ => Ok(unsafe { std::slice::from_raw_parts(first, count) }),
    }
}

/// As [`values`], to be written.
///
/// # Safety
/// As [`values`]; nothing else uses them meanwhile, and they are initialised.
pub(crate) unsafe fn values_mut<'a, T>(
    first: *mut T,
    count: usize,
    what: &'static str,
) -> Outcome<&'a mut [T]> {
    check_array::<T>(first.is_null(), count, what)?;
    match count {
        0 => Ok(&mut []),
        // SAFETY: as in `values`.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(first, count) }),
    }
}

fn check_array<T>(is_null: bool, count: usize, what: &'static str) -> Outcome {
    if is_null && count > 0 {
        return Err(null(what));
    }
    match count.checked_mul(size_of::<T>()) {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
        _ => {
            let why = format!("{count} values are more than an address space has");
            Err(Failure::invalid(what, why))
        }
    }
}

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

/// Writes what memory is, and why to `reason` unless it is null.
///
/// # Safety
/// `out` and `reason` are null or may be written.
pub(crate) unsafe fn write_backing(
    chosen: &Chosen,
    out: Option<NonNull<i32>>,
    reason: Option<NonNull<*mut c_char>>,
) -> Outcome {
    let backing = match chosen.backing {
        Backing::Driver => EGM_BACKING_DRIVER,
        Backing::Registered => EGM_BACKING_REGISTERED,
        Backing::Auto => EGM_BACKING_AUTO,
    };
    object(out, "out")?;
    // SAFETY: the caller's promise.
    unsafe {
        write_one(out, || backing);
        write_one(reason, || given_text(chosen.why.to_string()));
    }
    Ok(())
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
