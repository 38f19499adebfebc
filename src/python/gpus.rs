//! Waits for the GPUs that this process uses, and memory that they use.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, OnceLock};

use egmem::driver::{Code, Driver, StreamHandle};
use egmem::{Error, Stream};
use pyo3::prelude::*;

use crate::error::{ToPy, raise};
use crate::interpreter::{PerProcess, lock};

type GetState = unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_int;

/// Why it is unknown whether the GPUs have ended their work.
#[derive(Debug)]
pub enum NotWaited {
    /// A stream is being captured into a graph: the wait would make the capture invalid.
    Capture,
    /// The driver refuses the wait.
    Driver(Error),
}

impl ToPy for NotWaited {
    fn to_py(self) -> PyErr {
        match self {
            Self::Capture => raise(
                "NotReady",
                "the GPUs cannot be waited for while a stream is being captured into a graph",
                "call it again after the capture",
                None,
            ),
            Self::Driver(error) => error.to_py(),
        }
    }
}

/// Waits until every GPU on which this process has a context has done all work submitted so far.
///
/// A GPU without a context has no work, and waiting for it would create one. `cuCtxSynchronize` makes captures of the
/// context's streams invalid, so it is not called during captures that the driver reports: those of streams that the
/// legacy default stream waits for. The caller knows of no other capture, and has no GIL, because a GPU's work may
/// need it.
///
/// # Errors
/// [`NotWaited`]: a GPU may still work.
pub fn wait(driver: &Driver) -> Result<(), NotWaited> {
    let count = driver.device_count().map_err(NotWaited::Driver)?;
    let is_used = |gpu: &i32| driver.is_simulated() || has_context(*gpu);
    let used = || (0..count).filter(is_used);
    for gpu in used() {
        let raw = 0;
        // SAFETY: each context has the legacy default stream, and it is only asked about within this call.
        let default = unsafe { Stream::borrowed(driver, StreamHandle { device: gpu, raw }) };
        match ended(default.is_capturing().map(drop)) {
            Err(error) if error.code() == Some(Code::STREAM_CAPTURE_IMPLICIT) => {
                return Err(NotWaited::Capture);
            }
            result => result.map_err(NotWaited::Driver)?,
        }
    }
    for gpu in used() {
        match ended(driver.ctx_synchronize(gpu)) {
            // A capture that was not reported. It is invalid now.
            Err(error) if error.code() == Some(Code::STREAM_CAPTURE_UNSUPPORTED) => {
                return Err(NotWaited::Capture);
            }
            result => result.map_err(NotWaited::Driver)?,
        }
    }
    Ok(())
}

/// A lost context runs no work.
fn ended(result: egmem::Result<()>) -> egmem::Result<()> {
    match result {
        Err(Error::ContextLost { .. }) => Ok(()),
        result => result,
    }
}

/// Returns whether this process has a primary context on the GPU; `true` if the driver cannot tell.
fn has_context(gpu: i32) -> bool {
    static GET_STATE: OnceLock<Option<GetState>> = OnceLock::new();
    let Some(get_state) = *GET_STATE.get_or_init(find_get_state) else {
        return true;
    };
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the function's signature is CUDA's; a device's handle is its ordinal; both pointers are of local
    // variables.
    let code = unsafe { get_state(gpu, &raw mut flags, &raw mut active) };
    code != 0 || active != 0
}

fn find_get_state() -> Option<GetState> {
    // SAFETY: both names end with a zero byte; RTLD_NOLOAD runs no code of the library. The handle is kept, so the library
    // stays. The symbol is CUDA's function of this name, with this signature since CUDA 7; null is `None`.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() {
            return None;
        }
        let symbol = libc::dlsym(library, c"cuDevicePrimaryCtxGetState".as_ptr());
        std::mem::transmute::<*mut c_void, Option<GetState>>(symbol)
    }
}

/// Returns whether the work has ended; it owns the memory.
type IsOver = Box<dyn FnMut() -> bool + Send>;

#[derive(Default)]
struct Running {
    works: Mutex<Vec<IsOver>>,
    count: AtomicUsize,
}

static RUNNING: PerProcess<Running> = PerProcess::new();

fn running() -> &'static Running {
    RUNNING.get(|_| Running::default())
}

/// Keeps what `is_over` owns until it has returned `true`.
pub fn keep_while_running(is_over: impl FnMut() -> bool + Send + 'static) {
    let running = running();
    let mut works = lock(&running.works);
    works.push(Box::new(is_over));
    running.count.store(works.len(), Relaxed);
}

/// Drops the memory of work that has ended, without the GIL.
pub fn sweep(py: Python<'_>) {
    let running = running();
    if running.count.load(Relaxed) == 0 {
        return;
    }
    py.detach(|| {
        let mut works = lock(&running.works);
        let ended: Vec<_> = works.extract_if(.., |is_over| is_over()).collect();
        running.count.store(works.len(), Relaxed);
        drop(works);
        drop(ended);
    });
}
