//! Locks, the GIL, and state of this process alone, in functions that Python and other libraries call with the GIL or
//! without.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Mutex, OnceLock, PoisonError};

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

/// Locks a mutex whose data is valid even after a holder panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a copy of a mutex's value. The lock ends here: it must not be held while an exception is built, which runs
/// Python code.
pub fn copy_of<T: Clone>(mutex: &Mutex<T>) -> T {
    lock(mutex).clone()
}

/// State that each process makes for itself.
pub struct PerProcess<T: 'static>(AtomicPtr<Of<T>>);

struct Of<T> {
    process: u32,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// Creates it without state.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns this process's state. The first call in a process makes it, from the state of the parent process, if
    /// this one was forked. In that state `make` may read only atomics. Takes no lock.
    pub fn get(&self, make: impl Fn(Option<&T>) -> T) -> &'static T {
        let process = std::process::id();
        let mut found = self.0.load(Acquire);
        loop {
            // SAFETY: it is null or came from `Box::into_raw` below, after which nothing frees or changes it; the
            // load is after the store.
            let parent = unsafe { found.as_ref() };
            if let Some(of) = parent
                && of.process == process
            {
                return &of.value;
            }
            let value = make(parent.map(|of| &of.value));
            let own = Box::into_raw(Box::new(Of { process, value }));
            match self.0.compare_exchange(found, own, AcqRel, Acquire) {
                Ok(_) => found = own,
                Err(other) => {
                    // SAFETY: this call made it, and no other thread has seen it.
                    drop(unsafe { Box::from_raw(own) });
                    found = other;
                }
            }
        }
    }
}
