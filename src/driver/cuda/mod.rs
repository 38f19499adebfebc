//! The CUDA driver, loaded at run time.
//!
//! Nothing here panics, whatever is installed: the library may be absent, a stub, too old, or lack functions.
//! Functions are looked up one by one, and result codes are integers.
//!
//! Calls that need a context run in the device's primary context, which is retained on first use and released
//! with the driver. The caller's current context is the same after each call, failed or not. Every method
//! works from any thread. As with CUDA itself, a child made by `fork` without `exec` cannot use a driver that
//! was opened before the fork; dropping it and its objects in the child does nothing.

mod abi;
mod backend;
mod context;
mod fd;
mod library;
mod pools;
#[cfg(feature = "cudart")]
mod runtime;
mod symbols;

use std::collections::HashMap;
use std::path::Path;
#[cfg(feature = "cudart")]
use std::sync::OnceLock;
use std::sync::{Arc, Mutex, PoisonError};

use context::Contexts;
use library::Library;
use symbols::DriverApi;

use super::{
    AllocationProps, Backend, Call, Code, CudaVersion, EventHandle, GranularityKind, HandleTypes,
    Location, versions,
};
use crate::{Error, Result};

/// The driver's own name comes first: the other may be the toolkit's stub, which is only for linking.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// From 12.4 on VMM works without a context on every visible device.
const VMM_WITHOUT_CONTEXTS: CudaVersion = CudaVersion(12040);

/// Opens the CUDA driver of this machine.
pub(super) fn open() -> Result<Arc<dyn Backend>> {
    let core = Core::open()?;
    Ok(Arc::new(Cuda {
        core: Arc::new(core),
        #[cfg(feature = "cudart")]
        runtime: OnceLock::new(),
    }))
}

/// The backend: the driver API, and the runtime API once it is used.
#[derive(Debug)]
struct Cuda {
    core: Arc<Core>,
    #[cfg(feature = "cudart")]
    runtime: OnceLock<Result<runtime::Runtime>>,
}

/// The state that both APIs share.
struct Core {
    api: DriverApi,
    contexts: Contexts,
    /// The device of each event: a handle does not tell.
    events: Mutex<HashMap<EventHandle, i32>>,
    /// Granularities never change, and a query takes over 1 % of the time to create 2 MiB.
    granularities: Mutex<Granularities>,
}

type Granularities = HashMap<(AllocationProps, GranularityKind), u64>;

impl Core {
    fn open() -> Result<Self> {
        let mut api = DriverApi::new(load()?);
        // SAFETY: the flags must be 0.
        unsafe { api.init(0)? };
        let have = api.learn_version()?;
        if have < CudaVersion::OLDEST {
            return Err(Error::DriverTooOld {
                what: "egmem",
                have,
                need: CudaVersion::OLDEST,
            });
        }
        let core = Self {
            contexts: Contexts::new(&api)?,
            api,
            events: Mutex::default(),
            granularities: Mutex::default(),
        };
        if have < VMM_WITHOUT_CONTEXTS {
            core.contexts.retain_all(&core.api)?;
        }
        Ok(core)
    }

    fn device(&self, ordinal: i32) -> Result<i32> {
        self.contexts.device(&self.api, ordinal)
    }

    fn on<T>(&self, ordinal: i32, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.contexts.with(&self.api, ordinal, work)
    }

    fn anywhere<T>(&self, work: impl FnMut() -> Result<T>) -> Result<T> {
        self.contexts.anywhere(&self.api, work)
    }

    /// Replaces the error if a location or handle type is newer than the driver.
    fn age(&self, error: Error, location: Location, handle_types: HandleTypes) -> Error {
        versions::explain(error, self.api.version(), location, handle_types)
    }

    fn events(&self) -> std::sync::MutexGuard<'_, HashMap<EventHandle, i32>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn granularities(&self) -> std::sync::MutexGuard<'_, Granularities> {
        self.granularities
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on the device of `event`; in the caller's context if the event was created elsewhere.
    fn at_event<T>(&self, event: EventHandle, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let device = self.events().get(&event).copied();
        match device {
            Some(device) => self.on(device, work),
            None => work(),
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.contexts.release(&self.api);
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.api, f)
    }
}

fn load() -> Result<Library> {
    let mut tried = Vec::new();
    for name in LIBRARIES {
        match Library::open(Path::new(name), name) {
            Ok(library) => return Ok(library),
            Err(words) => tried.push(words),
        }
    }
    Err(Error::NoDriver {
        detail: tried.join("; "),
    })
}

/// Converts a call's code to a result.
#[inline]
fn check(call: Call, code: i32) -> Result<()> {
    if code == 0 {
        Ok(())
    } else {
        Err(failed(call, Code(code)))
    }
}

#[cold]
fn failed(call: Call, code: Code) -> Error {
    // `NOT_READY` is an answer, not an error.
    if code != Code::NOT_READY {
        tracing::debug!(%call, %code, "a driver call failed");
    }
    Error::driver(call, code)
}
