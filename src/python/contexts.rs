//! Waits for the GPUs that this process uses.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::OnceLock;

use egmem::driver::{CaptureMode, Driver};

type GetState = unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_int;

/// Waits until every GPU on which this process has a context has done all work submitted so far.
///
/// A GPU without a context has no work, and waiting for it would create one. The wait does not disturb captures of streams. The
/// caller has no GIL, because a GPU's work may need it.
pub fn wait_for_gpus(driver: &Driver) {
    if !driver.is_of_this_process() {
        return;
    }
    let Ok(count) = driver.device_count() else {
        return;
    };
    let before = driver
        .thread_exchange_capture_mode(CaptureMode::RELAXED)
        .ok();
    let is_used = |gpu: &i32| driver.is_simulated() || has_context(*gpu);
    for gpu in (0..count).filter(is_used) {
        // A lost context runs nothing any more. While a stream is captured, nothing waits for its work.
        if let Err(error) = driver.ctx_synchronize(gpu) {
            tracing::warn!(%error, gpu, "memory is freed without waiting for a GPU");
        }
    }
    if let Some(before) = before {
        driver.thread_exchange_capture_mode(before).ok();
    }
}

/// Returns whether this process has a primary context on the GPU; `true` if the driver cannot tell.
fn has_context(gpu: i32) -> bool {
    static GET_STATE: OnceLock<Option<GetState>> = OnceLock::new();
    let Some(get_state) = *GET_STATE.get_or_init(find_get_state) else {
        return true;
    };
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the function's signature is CUDA's; a device's handle is its ordinal; both pointers are of local variables.
    let code = unsafe { get_state(gpu, &raw mut flags, &raw mut active) };
    code != 0 || active != 0
}

fn find_get_state() -> Option<GetState> {
    let symbol = find(c"libcuda.so.1", c"cuDevicePrimaryCtxGetState")?;
    // SAFETY: the symbol is CUDA's function of this name, with this signature since CUDA 7.
    Some(unsafe { std::mem::transmute::<*mut c_void, GetState>(symbol) })
}

/// Finds a symbol of a library that this process has loaded.
fn find(library: &CStr, symbol: &CStr) -> Option<*mut c_void> {
    // SAFETY: both names end with a zero byte; RTLD_NOLOAD runs no code of the library. The handle is kept, so the library
    // stays.
    let found = unsafe {
        let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() {
            return None;
        }
        libc::dlsym(library, symbol.as_ptr())
    };
    (!found.is_null()).then_some(found)
}
