//! Buffers: memory of this process, of another one, or of a pool.

use std::ffi::{c_char, c_void};
use std::mem::{self, MaybeUninit};
use std::ptr::NonNull;
use std::sync::Arc;

use egmem::driver::{Access, Location};
use egmem::exchange::blocking::RemoteBuffer;
use egmem::memory::CpuView;
use egmem::share::ImportedBuffer;
use egmem::{Buffer, Error, Memory, PoolBuffer};

use crate::args::{object, read_backing, read_handle_types, write_backing};
use crate::failure::{Failure, Outcome};
use crate::options::{check_flags, read, read_grants};
use crate::{
    EGM_OVERCOMMIT, EGM_ROOM_FOR_PROBES, EGM_SHAREABLE, answer, args, ask, call,
    egm_buffer_options, egm_driver, egm_grant, egm_location, egm_status, egm_stream, make, noted,
    on,
};

/// Memory at one address for the CPU and the GPUs: allocated here, received from another process, fetched from a
/// server, or from a pool. Any thread may use it, several at a time, except where a function says otherwise.
pub struct egm_buffer {
    pub(crate) memory: Kind,
}

impl egm_buffer {
    pub(crate) fn own(buffer: Buffer) -> Self {
        let memory = Kind::Own(Arc::new(buffer));
        Self { memory }
    }

    /// Returns the memory of a buffer that was allocated here.
    pub(crate) fn own_memory(&self) -> Outcome<&Arc<Buffer>> {
        match &self.memory {
            Kind::Own(buffer) => Ok(buffer),
            _ => Err(not_own()),
        }
    }
}

fn not_own() -> Failure {
    let why = "it was not allocated by egm_buffer_create or egm_buffer_near";
    Failure::invalid("buffer", why)
}

/// Where a buffer comes from.
pub(crate) enum Kind {
    Own(Arc<Buffer>),
    Imported(ImportedBuffer),
    Fetched(RemoteBuffer),
    Pool(PoolBuffer),
}

impl Kind {
    fn memory(&self) -> &dyn Memory {
        match self {
            Self::Own(buffer) => &**buffer,
            Self::Imported(buffer) => buffer,
            Self::Fetched(buffer) => buffer,
            Self::Pool(buffer) => buffer,
        }
    }

    fn cpu_at(&self, offset: u64, len: u64) -> Outcome<CpuView<'_>> {
        Ok(match self {
            Self::Own(buffer) => buffer.cpu_at(offset, len)?,
            Self::Imported(buffer) => buffer.cpu()?.slice(offset, len)?,
            Self::Fetched(buffer) => buffer.cpu()?.slice(offset, len)?,
            Self::Pool(buffer) => buffer.cpu()?.slice(offset, len)?,
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
    noted(|| make(driver, "driver", out, create))
}

/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn allocate(driver: &egm_driver, options: &egm_buffer_options) -> Outcome<egm_buffer> {
    check_flags(
        options.flags,
        EGM_SHAREABLE | EGM_OVERCOMMIT | EGM_ROOM_FOR_PROBES,
    )?;
    let is = |flag| options.flags & flag != 0;
    let mut build = Buffer::on(options.location.read()?)
        .bytes(options.bytes)
        .handle_types(read_handle_types(options.handle_types)?)
        .overcommit(is(EGM_OVERCOMMIT));
    // SAFETY: the caller's promise.
    if let Some(grants) = unsafe { read_grants(options.grants, options.grant_count)? } {
        build = build.access_by::<Location>([]);
        for grant in grants {
            build = build.access(grant.location, grant.access);
        }
    }
    if options.chunk != 0 {
        build = build.chunk(options.chunk);
    }
    if let Some(backing) = read_backing(options.backing)? {
        build = build.backing(backing);
    }
    if is(EGM_SHAREABLE) {
        build = build.shareable();
    }
    if is(EGM_ROOM_FOR_PROBES) {
        build = build.room_for_probes();
    }
    // SAFETY: the caller's promise.
    if let Some(label) = unsafe { args::optional_text(options.label, "label")? } {
        build = build.label(label);
    }
    Ok(egm_buffer::own(build.allocate(&driver.driver)?))
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
    let near = |driver: &egm_driver| Ok(egm_buffer::own(Buffer::near(&driver.driver, gpu, bytes)?));
    noted(|| make(driver, "driver", out, near))
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
    ask(buffer, "buffer", out, |buffer| {
        Ok(pointer(buffer.memory.memory().device_ptr().0))
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
    answer(out, || Ok(object(buffer, "buffer")?.memory.memory().len()))
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
    ask(buffer, "buffer", out, |buffer| {
        Ok(egm_location::of(buffer.memory.memory().location()))
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
    on(buffer, "buffer", |buffer| {
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
    ask(buffer, "buffer", out, |buffer| {
        Ok(buffer.memory.access(who.read()?)?.flags() as i32)
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
    on(buffer, "buffer", |buffer| {
        // SAFETY: the caller's promise.
        let grants = unsafe { read_grants(grants, grant_count)? }.unwrap_or_default();
        let Kind::Own(buffer) = &mut buffer.memory else {
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
    on(buffer, "buffer", |buffer| {
        // SAFETY: the caller's promise.
        let from = unsafe { args::values(from.cast::<u8>(), len, "from")? };
        let view = buffer.memory.cpu_at(offset, len as u64)?;
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
    on(buffer, "buffer", |buffer| {
        let view = buffer.memory.cpu_at(offset, len as u64)?;
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
    on(buffer, "buffer", |buffer| {
        let view = buffer.memory.cpu_at(offset, len)?;
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
    on(buffer, "buffer", |buffer| {
        let stream = object(stream, "stream")?;
        Ok(buffer.memory.pool_memory()?.use_on(&stream.stream)?)
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
        let found = object(unsafe { buffer.as_mut() }, "buffer")?;
        let stream = object(stream, "stream")?;
        let memory = found.memory.pool_memory()?;
        let driver = memory.driver();
        driver.expect_this_process("buffer")?;
        driver.expect_same(stream.stream.driver(), "stream")?;
        // SAFETY: the caller's promise.
        match unsafe { args::take(buffer) }.map(|buffer| buffer.memory) {
            Some(Kind::Pool(memory)) => Ok(memory.free_on(&stream.stream)?),
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
        if !buffer.memory.memory().driver().is_of_this_process() {
            mem::forget(buffer); // a forked child's copy: the threads that would end its lease are the parent's
            return Ok(());
        }
        match buffer.memory {
            Kind::Fetched(remote) => Ok(remote.release()?),
            _ => Ok(()),
        }
    })
}
