//! The state that the driver API and the runtime API share.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

use super::context::Contexts;
use super::library::Library;
use super::symbols::DriverApi;
use crate::{
    AllocationProps, CudaVersion, Error, GranularityKind, HandleTypes, Location, Result, lock,
    versions,
};

/// The driver's own name comes first: the other may be the toolkit's stub, which is only for linking.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// From 12.4 on VMM works without a context on every visible device.
const VMM_WITHOUT_CONTEXTS: CudaVersion = CudaVersion(12040);

/// The state that both APIs share.
pub(super) struct Core {
    pub(super) api: DriverApi,
    contexts: Contexts,
    /// Granularities never change, and a query takes over 1 % of the time to create 2 MiB.
    granularities: Mutex<Granularities>,
}

pub(super) type Granularities = HashMap<(AllocationProps, GranularityKind), u64>;

impl Core {
    pub(super) fn open() -> Result<Self> {
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
            granularities: Mutex::default(),
        };
        if have < VMM_WITHOUT_CONTEXTS {
            core.contexts.retain_all(&core.api)?;
        }
        Ok(core)
    }

    pub(super) fn device(&self, ordinal: i32) -> Result<i32> {
        self.contexts.device(&self.api, ordinal)
    }

    pub(super) fn on<T>(&self, ordinal: i32, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.contexts.with(&self.api, ordinal, work)
    }

    pub(super) fn active_device(&self) -> Option<i32> {
        self.contexts.active(&self.api)
    }

    /// Runs a call that needs no context.
    pub(super) fn here<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        work()
    }

    /// Runs a pool call: the driver finds the device itself.
    pub(super) fn at<T>(&self, _ordinal: i32, work: impl FnMut() -> Result<T>) -> Result<T> {
        self.anywhere(work)
    }

    pub(super) fn anywhere<T>(&self, work: impl FnMut() -> Result<T>) -> Result<T> {
        self.contexts.anywhere(&self.api, work)
    }

    /// Replaces the error if a location or handle type is newer than the driver.
    pub(super) fn age(&self, error: Error, location: Location, handle_types: HandleTypes) -> Error {
        versions::explain(error, self.api.version(), location, handle_types)
    }

    pub(super) fn granularities(&self) -> std::sync::MutexGuard<'_, Granularities> {
        lock(&self.granularities)
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

/// Defines methods that return the results of one call of `this.api`:
/// `[kind] method(arguments) -> result { let …; @place(…) function(values) => result expression }`.
///
/// The place is a method of the API's state, which runs the call in the context that it needs. The values are safe
/// expressions: the macro evaluates them in the `unsafe` block of the call.
macro_rules! methods {
    (|$this:ident| $(
        [$($kind:tt)+] $method:ident($($arg:ident: $ty:ty),*) -> $out:ty {
            $(let $var:pat = $init:expr;)*
            @$place:ident($($at:expr)?) $function:ident($($value:expr),*) => $result:expr
        }
    )*) => {$(
        $($kind)+ $method(&self, $($arg: $ty),*) -> $crate::Result<$out> {
            let $this = self;
            $(let $var = $init;)*
            // SAFETY: pointers are to live values of the types in CUDA's headers. The call fills or reads them
            // before it returns and does not keep them. Lengths and counts are those of the values they go with.
            // A `void` pointer leads to a value at least as wide as the attribute or handle type. Texts end with
            // a NUL. Flags are 0 or CUDA's own. The driver checks numbers and handles, and looks addresses up
            // without following them. The caller guarantees, by the contract of `Backend` and `PoolCalls`, that
            // handles are live, that work is in bounds, and that nothing uses memory that a call removes. The
            // caller of a launch also guarantees the number and widths of its arguments.
            $this.$place($($at,)? || unsafe { $this.api.$function($($value),*) })?;
            Ok($result)
        }
    )*};
}

pub(super) use methods;
