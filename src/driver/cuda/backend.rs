//! The driver trait's calls on libcuda.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use super::core::Core;
use super::runtime::Runtime;
use crate::*;

/// Opens the CUDA driver of this machine.
pub(crate) fn open() -> Result<Arc<dyn Backend>> {
    let core = Core::open()?;
    Ok(Arc::new(Cuda {
        core: Arc::new(core),
        runtime: OnceLock::new(),
    }))
}

/// The backend: the driver API, and the runtime API once it is used.
#[derive(Debug)]
struct Cuda {
    core: Arc<Core>,
    runtime: OnceLock<Result<Runtime>>,
}

/// Forwards each call to the method of the same name of [`Core`], which is in `devices`, `memory` or `work`.
macro_rules! forward {
    ($($(#[$doc:meta])* [$($kind:tt)+] $method:ident($($arg:ident: $ty:ty),*) -> $out:ty
        = $call:ident;)*) => {$(
        forward!(@ $($kind)+ $method($($arg: $ty),*) -> $out);
    )*};
    (@ fn $method:ident($($arg:ident: $ty:ty),*) -> $out:ty) => {
        fn $method(&self, $($arg: $ty),*) -> Result<$out> {
            self.core.$method($($arg),*)
        }
    };
    (@ unsafe fn $method:ident($($arg:ident: $ty:ty),*) -> $out:ty) => {
        unsafe fn $method(&self, $($arg: $ty),*) -> Result<$out> {
            // SAFETY: the caller's promise.
            unsafe { self.core.$method($($arg),*) }
        }
    };
}

// SAFETY: each method makes the call that it is named after and reports its result.
unsafe impl Backend for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn active_device(&self) -> Option<i32> {
        self.core.active_device()
    }

    fn driver_pools(&self) -> &dyn PoolCalls {
        &*self.core
    }

    fn runtime_pools(&self) -> Result<&dyn PoolCalls> {
        let runtime = self.runtime.get_or_init(|| Runtime::open(&self.core));
        match runtime {
            Ok(runtime) => Ok(runtime),
            Err(error) => Err(error.clone()),
        }
    }

    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe { self.core.stream_query(stream) }
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe { self.core.event_query(event) }
    }

    driver_calls!(forward);
}
