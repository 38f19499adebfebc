//! Stream-ordered pools.

use egmem::Pool;
use egmem::driver::Location;

use crate::buffer::Kind;
use crate::call::{ask, call};
use crate::call_site::call_that_allocates;
use crate::failure::Outcome;
use crate::options::{check_flags, read};
use crate::types::read_handle_types;
use crate::{
    EGM_OVERCOMMIT, args, egm_buffer, egm_driver, egm_pool_options, egm_status, egm_stream,
};

/// A memory pool, whose allocations happen in the order of a stream. Any thread may use it, several at a time.
pub struct egm_pool {
    pool: Pool,
}

/// The bytes of a pool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_pool_stats {
    /// Held from the system now.
    pub reserved: u64,
    /// The most that was ever held.
    pub reserved_high: u64,
    /// Allocated now.
    pub used: u64,
    /// The most that was ever allocated.
    pub used_high: u64,
}

/// Creates a pool and grants access. It takes no memory before the first allocation.
///
/// # Safety
/// `driver` is null or a driver; `options` is null or points to as many bytes as its first field says; `out` is null
/// or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_create(
    driver: *const egm_driver,
    options: *const egm_pool_options,
    out: *mut *mut egm_pool,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let (driver, options) = unsafe { (args::object(driver, "driver")?, read(options)?) };
        let out = args::out(out, "out")?;
        // SAFETY: the caller's promise.
        let pool = unsafe { create(driver, &options)? };
        // SAFETY: the caller's promise.
        unsafe { args::give(out, egm_pool { pool }) };
        Ok(())
    })
}

/// # Safety
/// The pointers in `options` are null or valid.
unsafe fn create(driver: &egm_driver, options: &egm_pool_options) -> Outcome<Pool> {
    check_flags(options.flags, EGM_OVERCOMMIT)?;
    let mut build = Pool::options(options.location.read()?)
        .max_size(options.max_size)
        .release_threshold(options.release_threshold)
        .handle_types(read_handle_types(options.handle_types)?)
        .overcommit(options.flags & EGM_OVERCOMMIT != 0);
    // SAFETY: the caller's promise.
    let gpus = unsafe { args::values(options.gpus, options.gpu_count, "gpus")? };
    if !options.gpus.is_null() {
        build = build.access_by(gpus.iter().copied().map(Location::Device));
    }
    // SAFETY: the caller's promise.
    if let Some(label) = unsafe { args::optional_text(options.label, "label")? } {
        build = build.label(label);
    }
    Ok(build.create(&driver.driver)?)
}

/// Allocates `bytes`, usable by work that is submitted to `stream` from now on. Destroy the buffer by
/// egm_buffer_free_on(), or by egm_buffer_destroy().
///
/// Fails with ::EGM_INVALID_ARGUMENT for 0 bytes, ::EGM_NODE_TOO_FULL, ::EGM_OUT_OF_MEMORY.
///
/// # Safety
/// `pool` is null or a pool; `stream` is null or a stream; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_alloc(
    pool: *const egm_pool,
    bytes: u64,
    stream: *const egm_stream,
    out: *mut *mut egm_buffer,
) -> egm_status {
    call_that_allocates(|| {
        // SAFETY: the caller's promise.
        let pool = unsafe { args::object(pool, "pool")? };
        // SAFETY: the caller's promise.
        let stream = unsafe { args::object(stream, "stream")? };
        let out = args::out(out, "out")?;
        let memory = Kind::Pool(pool.pool.allocate(bytes, &stream.stream)?);
        // SAFETY: the caller's promise.
        unsafe { args::give(out, egm_buffer { memory }) };
        Ok(())
    })
}

/// Returns the pool's bytes.
///
/// # Safety
/// `pool` is null or a pool; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_get_stats(
    pool: *const egm_pool,
    out: *mut egm_pool_stats,
) -> egm_status {
    let answer = |pool: &egm_pool| {
        let stats = pool.pool.stats()?;
        let stats = egm_pool_stats {
            reserved: stats.reserved,
            reserved_high: stats.reserved_high,
            used: stats.used,
            used_high: stats.used_high,
        };
        Ok(stats)
    };
    // SAFETY: the caller's promise.
    unsafe { ask(pool, "pool", out, answer) }
}

/// Gives free memory back to the system until `keep` bytes are held, or no more is free.
///
/// # Safety
/// `pool` is null or a pool. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_trim(pool: *const egm_pool, keep: u64) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let pool = unsafe { args::object(pool, "pool")? };
        Ok(pool.pool.trim_to(keep)?)
    })
}

/// Destroys a pool; its buffers keep its memory until they are destroyed. A null pointer is left alone.
///
/// # Safety
/// `pool` is null, or a pool that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_pool_destroy(pool: *mut egm_pool) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { args::take(pool) });
        Ok(())
    })
}
