//! Work without the GIL, in functions that Python and other libraries call with it or without.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use pyo3::prelude::*;

/// Calls `work` without the GIL, and takes the GIL again if the thread had it.
///
/// A thread that waits for a GPU must not have the GIL: the GPU's work may need it, such as a host function in
/// Python.
pub fn detached(work: impl FnOnce() + Send) {
    let mut work = Some(work);
    if has_gil() {
        Python::try_attach(|py| {
            if let Some(work) = work.take() {
                py.detach(work);
            }
        });
    }
    // Without the GIL, or at the interpreter's end.
    if let Some(work) = work {
        work();
    }
}

/// Returns whether this thread has the GIL; `true` if the interpreter cannot tell.
///
/// A thread without the GIL must not take it only to release it: it may hold a lock of another library, for which a
/// thread with the GIL waits.
pub fn has_gil() -> bool {
    type Check = unsafe extern "C" fn() -> c_int;
    static CHECK: OnceLock<Option<Check>> = OnceLock::new();
    let check = CHECK.get_or_init(|| {
        // The limited API does not declare it, although the interpreters that this crate supports have it.
        // SAFETY: the name ends with a zero byte; the lookup runs no code.
        let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"PyGILState_Check".as_ptr()) };
        // SAFETY: the symbol is Python's function of this name, with this signature since Python 3.4.
        let check = |symbol| unsafe { std::mem::transmute::<*mut c_void, Check>(symbol) };
        (!symbol.is_null()).then(|| check(symbol))
    });
    // SAFETY: the function may be called by any thread, with the GIL or without, also at the interpreter's end.
    check.is_none_or(|check| unsafe { check() } != 0)
}

/// Drops a value without the GIL: unmapping takes the driver's time.
pub fn drop_detached<T: Send>(value: T) {
    detached(|| drop(value));
}
