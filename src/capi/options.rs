//! Options: structures that a program fills, and that later versions may make longer.

use std::ffi::c_char;
use std::mem::{MaybeUninit, offset_of};

use egmem::driver::{AccessDesc, Location};

use crate::args::object;
use crate::failure::{Failure, Outcome};
use crate::{args, egm_grant, egm_location};

/// For `flags`: shareable as widely as the machine allows.
pub const EGM_SHAREABLE: u32 = 1;
/// For `flags`: ask the driver for more memory than the node has free.
pub const EGM_OVERCOMMIT: u32 = 2;
/// For `flags` of a buffer: with room for the proof that importers see the same memory.
pub const EGM_ROOM_FOR_PROBES: u32 = 4;
/// For `flags` of a heap: overwrite blocks with zeros when they are freed.
pub const EGM_SCRUB_ON_FREE: u32 = 8;
/// For `flags` of a heap: an allocation that would fail waits for the GPU work that blocks were freed after.
pub const EGM_WAIT_FOR_GPU: u32 = 16;
/// For `flags` of a heap: find writes beside blocks and to freed blocks. For tests: it is slow.
pub const EGM_DEBUG: u32 = 32;
/// For `flags` of a client: connect to other machines without TLS. Anyone on the network path can read the handles.
pub const EGM_PLAIN_ANYWHERE: u32 = 64;
/// For `flags` of a client: memory is fetched read-only.
pub const EGM_READ_ONLY: u32 = 128;

/// For `flags` of a creation: memory that this peer created before with the same size and node will do.
pub const EGM_EXIST_OK: u32 = 256;

/// Options of a buffer. Set `struct_size` to sizeof(egm_buffer_options), and the fields that you do not need to 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_buffer_options {
    /// The size of this structure, by which the library knows the program's version.
    pub struct_size: usize,
    /// Where the memory lies.
    pub location: egm_location,
    /// Its size in bytes, at least 1; allocated in units of 2 MiB.
    pub bytes: u64,
    /// `grant_count` grants. A null pointer: the CPU, and every GPU that can reach the memory, read and write.
    /// Otherwise the CPU, unless a grant says something else, and the GPUs listed.
    pub grants: *const egm_grant,
    /// The number of grants.
    pub grant_count: usize,
    /// The size of the parts whose access can be changed alone; 0: one part.
    pub chunk: u64,
    /// Bits of `EGM_HANDLE_…`: how the memory may be shared.
    pub handle_types: u32,
    /// Bits: ::EGM_SHAREABLE, ::EGM_OVERCOMMIT, ::EGM_ROOM_FOR_PROBES.
    pub flags: u32,
    /// The memory's name in the ledger; may be null.
    pub label: *const c_char,
    /// What the memory is: one of `EGM_BACKING_…`; 0: ::EGM_BACKING_DRIVER.
    pub backing: i32,
    /// Must be 0: it ends the structure without padding, so that a field of a later version lies beyond.
    pub reserved: u32,
}

/// Options of a heap. Set `struct_size` to sizeof(egm_heap_options), and the fields that you do not need to 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_heap_options {
    /// The size of this structure, by which the library knows the program's version.
    pub struct_size: usize,
    /// Where the memory lies.
    pub location: egm_location,
    /// As in egm_buffer_options.
    pub grants: *const egm_grant,
    /// The number of grants.
    pub grant_count: usize,
    /// The most memory that the heap may have, in bytes; 0: the node's.
    pub limit: u64,
    /// How much memory the heap adds at a time, in bytes; 0: 64 MiB.
    pub chunk: u64,
    /// How much memory the heap has from the start, in bytes.
    pub reserve: u64,
    /// How many bytes a background thread keeps free in advance.
    pub grow_ahead: u64,
    /// How many bytes of blocks above 2 KiB a thread may cache; 0: 4 MiB. UINT64_MAX: none.
    pub thread_cache: u64,
    /// Bits of `EGM_HANDLE_…`: how its blocks may be shared.
    pub handle_types: u32,
    /// Bits: ::EGM_SHAREABLE, ::EGM_OVERCOMMIT, ::EGM_SCRUB_ON_FREE, ::EGM_WAIT_FOR_GPU, ::EGM_DEBUG.
    pub flags: u32,
    /// The name of the heap's memory in the ledger; may be null.
    pub label: *const c_char,
    /// What the heap's memory is: one of `EGM_BACKING_…`; 0: ::EGM_BACKING_AUTO.
    pub backing: i32,
    /// Must be 0: it ends the structure without padding, so that a field of a later version lies beyond.
    pub reserved: u32,
}

/// Options of a pool. Set `struct_size` to sizeof(egm_pool_options), and the fields that you do not need to 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_pool_options {
    /// The size of this structure, by which the library knows the program's version.
    pub struct_size: usize,
    /// Where the memory lies.
    pub location: egm_location,
    /// `gpu_count` ordinals of the GPUs that may read and write. A null pointer: every GPU for a host node's pool,
    /// only the owner for a GPU's.
    pub gpus: *const i32,
    /// The number of ordinals.
    pub gpu_count: usize,
    /// The most bytes that it may hold; 0 leaves it to the driver.
    pub max_size: u64,
    /// How many free bytes it keeps when a stream or an event is synchronised; UINT64_MAX keeps all.
    pub release_threshold: u64,
    /// Bits of `EGM_HANDLE_…`: how it may be shared.
    pub handle_types: u32,
    /// Bits: ::EGM_OVERCOMMIT.
    pub flags: u32,
    /// The name of its allocations in the ledger; may be null.
    pub label: *const c_char,
}

/// Options of a client. Set `struct_size` to sizeof(egm_client_options), and the fields that you do not need to 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_client_options {
    /// The size of this structure, by which the library knows the program's version.
    pub struct_size: usize,
    /// The authority's certificate, a file (ca.pem). It, `cert` and `key` go together; without them there is no TLS,
    /// which only Unix sockets and loopback addresses allow.
    pub ca: *const c_char,
    /// This peer's certificate, a file.
    pub cert: *const c_char,
    /// Its key, a file.
    pub key: *const c_char,
    /// Revocation lists, a file; may be null.
    pub crl: *const c_char,
    /// The name that the server's certificate must have; null: the address.
    pub expect_peer: *const c_char,
    /// How long connecting may take, and then each request until its answer, in milliseconds; 0: 10 s.
    pub timeout_ms: u64,
    /// A user besides your own whose server may be used over a Unix socket; 0: root's.
    pub server_user: u32,
    /// Bits: ::EGM_PLAIN_ANYWHERE, ::EGM_READ_ONLY.
    pub flags: u32,
    /// The owner that fetched memory must have: a certificate's name, "uid:1000", "local", or "@server" for the
    /// server's own. Null: any. A peer that created the name first could read and write the data that this process
    /// stores there.
    pub expect_owner: *const c_char,
}

/// Options of memory that a server creates. Set `struct_size` to sizeof(egm_create_options), and the fields that you do not
/// need to 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_create_options {
    /// The size of this structure, by which the library knows the program's version.
    pub struct_size: usize,
    /// The host node: of kind ::EGM_LOCATION_HOST_NUMA; of kind 0: one of the server's choice.
    pub location: egm_location,
    /// `share_count` peers that may fetch the memory besides this one: a certificate's name, "uid:1000", or "*" for all.
    pub share_with: *const *const c_char,
    /// The number of peers.
    pub share_count: usize,
    /// Bits: ::EGM_EXIST_OK.
    pub flags: u32,
    /// Must be 0: it ends the structure without padding, so that a field of a later version lies beyond.
    pub reserved: u32,
}

/// Structures that begin with their size.
///
/// # Safety
/// The structure is `repr(C)`, its first field is its size as `usize`, and every pattern of bits is a value of it.
pub(crate) unsafe trait Options: Copy {
    /// Where the last field ends: no padding follows, in which a later version's field would find a program's garbage.
    const END: usize;

    /// Returns the field that must be 0.
    fn reserved(&self) -> u32 {
        0
    }
}

// SAFETY: numbers and raw pointers only, the size first.
unsafe impl Options for egm_buffer_options {
    const END: usize = offset_of!(Self, reserved) + size_of::<u32>();
    fn reserved(&self) -> u32 {
        self.reserved
    }
}
// SAFETY: as above.
unsafe impl Options for egm_heap_options {
    const END: usize = offset_of!(Self, reserved) + size_of::<u32>();
    fn reserved(&self) -> u32 {
        self.reserved
    }
}
// SAFETY: as above.
unsafe impl Options for egm_pool_options {
    const END: usize = offset_of!(Self, label) + size_of::<*const c_char>();
}
// SAFETY: as above.
unsafe impl Options for egm_client_options {
    const END: usize = offset_of!(Self, expect_owner) + size_of::<*const c_char>();
}
// SAFETY: as above.
unsafe impl Options for egm_create_options {
    const END: usize = offset_of!(Self, reserved) + size_of::<u32>();
    fn reserved(&self) -> u32 {
        self.reserved
    }
}

/// Reads options of this or another version: fields that the program does not know are 0, and those that this library
/// does not know must be.
///
/// # Safety
/// `options` is null or points to as many bytes as its first word says.
pub(crate) unsafe fn read<T: Options>(options: *const T) -> Outcome<T> {
    const { assert!(T::END == size_of::<T>()) };
    // SAFETY: the first word is there, or the pointer is null.
    let size = *object(unsafe { options.cast::<usize>().as_ref() }, "options")?;
    let wrong = |why: &str| Err(Failure::invalid("struct_size", format!("{size}: {why}")));
    if size < size_of::<usize>() || size > 1 << 16 {
        return wrong("set it to the size of the structure, and what you do not need to 0");
    }
    let known = size.min(size_of::<T>());
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the caller promises `size` bytes, and `value` has room for `known`.
    unsafe {
        let from = options.cast::<u8>();
        value
            .as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(from, known);
        let rest = std::slice::from_raw_parts(from.add(known), size - known);
        if rest.iter().any(|&byte| byte != 0) {
            return wrong("the program uses options of a newer version than the library");
        }
    }
    // SAFETY: zeroed, and every pattern is a value.
    let value = unsafe { value.assume_init() };
    match value.reserved() {
        0 => Ok(value),
        given => Err(Failure::invalid(
            "reserved",
            format!("it is {given}; valid: 0"),
        )),
    }
}

/// As [`read`], but at a null pointer all fields are 0.
///
/// # Safety
/// As [`read`].
pub(crate) unsafe fn read_or_zeros<T: Options>(options: *const T) -> Outcome<T> {
    if options.is_null() {
        // SAFETY: every pattern is a value.
        return Ok(unsafe { MaybeUninit::zeroed().assume_init() });
    }
    // SAFETY: the caller's promise.
    unsafe { read(options) }
}

/// Settings of which a program may leave some out.
pub(crate) trait With: Sized {
    /// Sets what is given.
    fn with<V>(self, given: Option<V>, set: impl FnOnce(Self, V) -> Self) -> Self {
        match given {
            Some(value) => set(self, value),
            None => self,
        }
    }
}

impl<T> With for T {}

/// Returns a number of which 0 stands for the default.
pub(crate) fn nonzero(number: u64) -> Option<u64> {
    (number != 0).then_some(number)
}

/// Checks that only some bits are set.
pub(crate) fn check_flags(flags: u32, known: u32) -> Outcome {
    match flags & !known {
        0 => Ok(()),
        unknown => {
            let why = format!("the bits {unknown:#x} mean nothing here");
            Err(Failure::invalid("flags", why))
        }
    }
}

/// Reads ordinals of GPUs; `None` for a null pointer.
///
/// # Safety
/// As [`args::values`].
pub(crate) unsafe fn read_gpus(gpus: *const i32, count: usize) -> Outcome<Option<Vec<Location>>> {
    // SAFETY: the caller's promise.
    let listed = unsafe { args::values(gpus, count, "gpus")? };
    let listed = listed.iter().copied().map(Location::Device);
    Ok((!gpus.is_null()).then(|| listed.collect()))
}

/// Reads grants; `None` for a null pointer.
///
/// # Safety
/// As [`args::values`].
pub(crate) unsafe fn read_grants(
    grants: *const egm_grant,
    count: usize,
) -> Outcome<Option<Vec<AccessDesc>>> {
    // SAFETY: the caller's promise.
    let listed = unsafe { args::values(grants, count, "grants")? };
    let listed = listed
        .iter()
        .map(|grant| grant.read())
        .collect::<Outcome<_>>()?;
    Ok((!grants.is_null()).then_some(listed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Known {
        struct_size: usize,
        first: u64,
        second: u64,
    }
    // SAFETY: numbers only, the size first.
    unsafe impl Options for Known {
        const END: usize = size_of::<Self>();
        fn reserved(&self) -> u32 {
            u32::from(self.first == 9)
        }
    }

    #[repr(C)]
    struct Newer {
        known: Known,
        third: u64,
    }

    fn read_of(value: &Newer) -> Outcome<Known> {
        // SAFETY: it has the bytes of the largest size used here.
        unsafe { read(std::ptr::from_ref(value).cast::<Known>()) }
    }

    fn newer(struct_size: usize, third: u64) -> Newer {
        let known = Known {
            struct_size,
            first: 1,
            second: 2,
        };
        Newer { known, third }
    }

    #[test]
    fn an_older_program_leaves_the_fields_that_it_does_not_know_0() {
        let read = read_of(&newer(16, 3)).unwrap();
        assert_eq!((read.first, read.second), (1, 0));
        let read = read_of(&newer(24, 3)).unwrap();
        assert_eq!((read.first, read.second), (1, 2));
    }

    #[test]
    fn a_newer_program_may_not_use_what_the_library_does_not_know() {
        assert_eq!(read_of(&newer(32, 0)).unwrap().second, 2);
        let failure = read_of(&newer(32, 3)).unwrap_err();
        let message = failure.0.message.to_str().unwrap();
        assert!(message.contains("newer"), "{message}");
    }

    #[test]
    fn the_reserved_field_is_0() {
        let mut value = newer(24, 0);
        value.known.first = 9;
        let failure = read_of(&value).unwrap_err();
        let message = failure.0.message.to_str().unwrap();
        assert!(message.contains("reserved"), "{message}");
    }

    #[test]
    fn a_size_that_was_not_set_is_refused() {
        for size in [0, 7, usize::MAX] {
            read_of(&newer(size, 0)).unwrap_err();
        }
        // SAFETY: null is allowed.
        unsafe { read::<Known>(std::ptr::null()) }.unwrap_err();
    }
}
