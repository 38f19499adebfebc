//! Buffers: memory of this process, of another one, or of a pool.

use std::ffi::{c_char, c_void};
use std::mem::{self, MaybeUninit};
use std::ptr::NonNull;
use std::sync::Arc;

use egmem::driver::{Access, AccessDesc, Location};
use egmem::exchange::blocking::RemoteBuffer;
use egmem::memory::{CpuMemory, CpuView};
use egmem::share::ImportedBuffer;
use egmem::{Buffer, BufferOptions, Error, Memory, PoolBuffer};

use crate::args::{handle, read_backing, read_handle_types, write_backing};
use crate::failure::{Failure, Outcome};
use crate::options::{With, check_flags, nonzero, read, read_grants};
use crate::{
    EGM_OVERCOMMIT, EGM_ROOM_FOR_PROBES, EGM_SHAREABLE, answer, args, ask, call,
    egm_buffer_options, egm_driver, egm_grant, egm_location, egm_status, egm_stream, make, noted,
    on,
};

/// Memory at one address for the CPU and the GPUs: allocated here, received from another process, fetched from a
/// server, or from a pool. Any thread may use it, several at a time, except where a function says otherwise.
pub enum egm_buffer {
    /// Allocated here.
    Own(Arc<Buffer>),
    /// Another process's.
    Imported(ImportedBuffer),
    /// Fetched by its name.
    Fetched(RemoteBuffer),
    /// A pool's.
    Pool(PoolBuffer),
}

impl egm_buffer {
    /// Returns the memory of a buffer that was allocated here.
    pub(crate) fn own_memory(&self) -> Outcome<&Arc<Buffer>> {
        match self {
            Self::Own(buffer) => Ok(buffer),
            _ => Err(not_own()),
        }
    }

    fn memory(&self) -> &dyn Whole {
        match self {
            Self::Own(buffer) => &**buffer,
            Self::Imported(buffer) => buffer,
            Self::Fetched(buffer) => buffer,
            Self::Pool(buffer) => buffer,
        }
    }

    fn cpu_at(&self, offset: u64, len: u64) -> Outcome<CpuView<'_>> {
        Ok(match self {
            // Its parts may have several kinds of access.
            Self::Own(buffer) => buffer.cpu_at(offset, len)?,
            other => other.memory().cpu()?.slice(offset, len)?,
        })
    }

    fn access(&self, location: Location) -> Outcome<Access> {
        Ok(match self {
            Self::Own(buffer) => buffer.access(location)?,
            Self::Imported(buffer) => buffer.access(location)?,
            Self::Fetched(buffer) => buffer.access(location)?,
            Self::Pool(buffer) => buffer.pool().access(location)?,
        })
    }

    fn pool_memory(&mut self) -> Outcome<&mut PoolBuffer> {
        match self {
            Self::Pool(buffer) => Ok(buffer),
            _ => Err(Failure::invalid("buffer", "it is not a pool's memory")),
        }
    }
}

fn not_own() -> Failure {
    let why = "it was not allocated by egm_buffer_create or egm_buffer_near";
    Failure::invalid("buffer", why)
}

/// Memory that the CPU and the GPUs can be asked about.
trait Whole: Memory + CpuMemory {}

impl<M: Memory + CpuMemory> Whole for M {}

/// Allocates, maps and grants memory. If a step fails, the steps before it are undone.
///
/// Fails with ::EGM_INVALID_ARGUMENT, ::EGM_NO_SUCH_NODE, ::EGM_NO_SUCH_GPU, ::EGM_NODE_TOO_FULL,
/// ::EGM_OUT_OF_MEMORY, and others of the driver.
///
/// # Safety
/// `driver` is null or a driver; `options` is null or points to as many bytes as its first field says; `out` is null
/// or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_create(
    driver: Option<&egm_driver>,
    options: *const egm_buffer_options,
    out: Option<&mut MaybeUninit<*mut egm_buffer>>,
) -> egm_status {
    // SAFETY: the caller's promise.
    let create = |driver: &egm_driver| unsafe { allocate(driver, &read(options)?) };
    noted(|| make(driver, out, create))
}

/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn allocate(driver: &egm_driver, options: &egm_buffer_options) -> Outcome<egm_buffer> {
    check_flags(
        options.flags,
        EGM_SHAREABLE | EGM_OVERCOMMIT | EGM_ROOM_FOR_PROBES,
    )?;
    let is = |flag| options.flags & flag != 0;
    let flag = |flag| is(flag).then_some(());
    // SAFETY: the caller's promise.
    let grants = unsafe { read_grants(options.grants, options.grant_count)? };
    // SAFETY: the caller's promise.
    let label = unsafe { args::optional_text(options.label, "label")? };
    let grant =
        |build: BufferOptions, grant: AccessDesc| build.access(grant.location, grant.access);
    let build = Buffer::on(options.location.read()?)
        .bytes(options.bytes)
        .handle_types(read_handle_types(options.handle_types)?)
        .overcommit(is(EGM_OVERCOMMIT))
        .with(grants, |build, grants| {
            let none = build.access_by::<Location>([]);
            grants.into_iter().fold(none, grant)
        })
        .with(nonzero(options.chunk), BufferOptions::chunk)
        .with(read_backing(options.backing)?, BufferOptions::backing)
        .with(label, BufferOptions::label)
        .with(flag(EGM_SHAREABLE), |build, ()| build.shareable())
        .with(flag(EGM_ROOM_FOR_PROBES), |build, ()| {
            build.room_for_probes()
        });
    Ok(egm_buffer::Own(build.allocate(&driver.0)?.into()))
}

/// Allocates `bytes` on the host node of a GPU, for the CPU and every GPU.
///
/// Fails as egm_buffer_create(), and with ::EGM_NODE_UNKNOWN if the GPU's node is not known.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_near(
    driver: Option<&egm_driver>,
    gpu: i32,
    bytes: u64,
    out: Option<&mut MaybeUninit<*mut egm_buffer>>,
) -> egm_status {
    let near = |driver: &egm_driver| {
        let buffer = Buffer::near(&driver.0, gpu, bytes)?;
        Ok(egm_buffer::Own(Arc::new(buffer)))
    };
    noted(|| make(driver, out, near))
}

/// Returns the address: the same for every GPU and, where the CPU has access, for the CPU. It is valid until the
/// buffer is destroyed.
///
/// # Safety
/// `buffer` is null or a buffer; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_ptr(
    buffer: Option<&egm_buffer>,
    out: Option<&mut MaybeUninit<*mut c_void>>,
) -> egm_status {
    ask(buffer, out, |buffer| {
        Ok(pointer(buffer.memory().device_ptr().0))
    })
}

/// Returns an address as a pointer.
#[inline]
pub(crate) fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Returns the number of bytes that were asked for.
///
/// # Safety
/// `buffer` is null or a buffer; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_size(
    buffer: Option<&egm_buffer>,
    out: Option<&mut MaybeUninit<u64>>,
) -> egm_status {
    answer(out, || Ok(handle(buffer)?.memory().len()))
}

/// Returns where the first part of the memory lies.
///
/// # Safety
/// `buffer` is null or a buffer; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_location(
    buffer: Option<&egm_buffer>,
    out: Option<&mut MaybeUninit<egm_location>>,
) -> egm_status {
    ask(buffer, out, |buffer| {
        Ok(egm_location::of(buffer.memory().location()))
    })
}

/// Returns what the memory is, ::EGM_BACKING_DRIVER or ::EGM_BACKING_REGISTERED, and writes why, as text, to `reason`
/// unless it is null. Free the text by egm_string_free().
///
/// Fails with ::EGM_INVALID_ARGUMENT for memory that egm_buffer_create() and egm_buffer_near() did not make.
///
/// # Safety
/// `buffer` is null or a buffer; `out` and `reason` are null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_backing(
    buffer: Option<&egm_buffer>,
    out: Option<NonNull<i32>>,
    reason: Option<NonNull<*mut c_char>>,
) -> egm_status {
    on(buffer, |buffer| {
        let chosen = buffer.own_memory()?.backing();
        // SAFETY: the caller's promise.
        unsafe { write_backing(chosen, out, reason) }
    })
}

/// Returns a location's access to the memory: one of `EGM_ACCESS_…`.
///
/// # Safety
/// `buffer` is null or a buffer; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_access(
    buffer: Option<&egm_buffer>,
    who: egm_location,
    out: Option<&mut MaybeUninit<i32>>,
) -> egm_status {
    ask(buffer, out, |buffer| {
        Ok(buffer.access(who.read()?)?.flags() as i32)
    })
}

/// Changes the access of locations of this process to a buffer that was allocated here. GPU work that needs the
/// access has ended. Other processes keep the access that they have.
///
/// # Safety
/// `buffer` is null or a buffer, which no other thread uses during the call; `grants` is null or points to
/// `grant_count` grants. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_set_access(
    buffer: Option<&mut egm_buffer>,
    grants: *const egm_grant,
    grant_count: usize,
) -> egm_status {
    on(buffer, |buffer| {
        // SAFETY: the caller's promise.
        let grants = unsafe { read_grants(grants, grant_count)? }.unwrap_or_default();
        let egm_buffer::Own(buffer) = buffer else {
            return Err(not_own());
        };
        let buffer = Arc::get_mut(buffer).ok_or_else(|| {
            let held = Error::StillHeld {
                name: "the buffer".into(),
                holders: vec!["a channel that sends it".into()],
            };
            Failure::from(held).with_remedy("call it again when egm_channel_send has returned")
        })?;
        Ok(buffer.set_access(&grants)?)
    })
}

/// Copies `len` bytes into the buffer with the CPU.
///
/// Fails with ::EGM_OUT_OF_RANGE and, where the CPU may not write, ::EGM_NOT_ACCESSIBLE. A pool's memory waits for
/// the streams that use it.
///
/// # Safety
/// `buffer` is null or a buffer; `from` is null or points to `len` bytes, none of them in the buffer. Any thread may
/// call this, also while other threads and GPUs write the same bytes, which then have the value of either.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_write(
    buffer: Option<&egm_buffer>,
    offset: u64,
    from: *const c_void,
    len: usize,
) -> egm_status {
    on(buffer, |buffer| {
        // SAFETY: the caller's promise.
        let from = unsafe { args::values(from.cast::<u8>(), len, "from")? };
        let view = buffer.cpu_at(offset, len as u64)?;
        Ok(view.write_at(0, from)?)
    })
}

/// Copies `len` bytes out of the buffer with the CPU.
///
/// Fails as egm_buffer_write(), where the CPU may not read.
///
/// # Safety
/// As egm_buffer_write(): `to` is null or points to `len` bytes, none of them in the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_read(
    buffer: Option<&egm_buffer>,
    offset: u64,
    to: *mut c_void,
    len: usize,
) -> egm_status {
    on(buffer, |buffer| {
        let view = buffer.cpu_at(offset, len as u64)?;
        if !to.is_null() {
            // The caller's bytes need not be initialised: a slice of them must be.
            // SAFETY: the caller promises `len` bytes.
            unsafe { to.cast::<u8>().write_bytes(0, len) };
        }
        // SAFETY: the caller's promise; initialised above.
        let to = unsafe { args::values_mut(to.cast::<u8>(), len, "to")? };
        Ok(view.read_at(0, to)?)
    })
}

/// Sets `len` bytes from `offset` on to `byte` with the CPU. Fails as egm_buffer_write().
///
/// # Safety
/// `buffer` is null or a buffer. Any thread may call this, as egm_buffer_write().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_fill(
    buffer: Option<&egm_buffer>,
    offset: u64,
    len: u64,
    byte: u8,
) -> egm_status {
    on(buffer, |buffer| {
        let view = buffer.cpu_at(offset, len)?;
        Ok(view.fill(0, len, byte)?)
    })
}

/// Lets work that is submitted to `stream` from now on use a pool's memory.
///
/// # Safety
/// `buffer` is null or a buffer, which no other thread uses during the call; `stream` is null or a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_use_on(
    buffer: Option<&mut egm_buffer>,
    stream: Option<&egm_stream>,
) -> egm_status {
    on(buffer, |buffer| {
        let stream = handle(stream)?;
        Ok(buffer.pool_memory()?.use_on(&stream.0)?)
    })
}

/// Destroys a pool's buffer: its memory is freed after all work submitted so far to `stream` and to every stream that
/// used it. The buffer is destroyed even where the call fails, except with ::EGM_INVALID_ARGUMENT.
///
/// # Safety
/// `buffer` is null, or a buffer that no thread uses during the call or afterwards; `stream` is null or a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_free_on(
    buffer: *mut egm_buffer,
    stream: Option<&egm_stream>,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let found = handle(unsafe { buffer.as_mut() })?;
        let stream = handle(stream)?;
        let memory = found.pool_memory()?;
        let driver = memory.driver();
        driver.expect_this_process("buffer")?;
        driver.expect_same(stream.0.driver(), "stream")?;
        // SAFETY: the caller's promise.
        match unsafe { args::take(buffer) }.map(|buffer| *buffer) {
            Some(egm_buffer::Pool(memory)) => Ok(memory.free_on(&stream.0)?),
            _ => Ok(()),
        }
    })
}

/// Destroys a buffer: unmaps its memory and gives it back. For fetched memory it ends the lease and waits until the
/// server has noted that; it fails if that cannot be known, and the memory is gone anyway. A pool's memory is freed
/// after the work of the streams that use it. A null pointer is left alone.
///
/// GPU work that uses the memory has ended: a GPU that accesses unmapped addresses loses its context.
///
/// # Safety
/// `buffer` is null, or a buffer that no thread uses during the call or afterwards: not destroyed yet. No GPU uses
/// its memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_buffer_destroy(buffer: *mut egm_buffer) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let Some(buffer) = (unsafe { args::take(buffer) }) else {
            return Ok(());
        };
        if !buffer.memory().driver().is_of_this_process() {
            mem::forget(buffer); // a forked child's copy: the threads that would end its lease are the parent's
            return Ok(());
        }
        match *buffer {
            egm_buffer::Fetched(remote) => Ok(remote.release()?),
            _ => Ok(()),
        }
    })
}
