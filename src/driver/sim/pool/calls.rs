//! The pool calls of either API: the same pools, under that API's call names.

use std::sync::Arc;

use super::super::shared::Shared;
use crate::Result;
use crate::{
    AccessDesc, Call, DevicePtr, HandleType, Location, PoolApi, PoolAttribute, PoolCalls,
    PoolHandle, PoolProps, PoolPtrExport, ShareableHandle, StreamHandle,
};

/// The pools as seen through one API.
#[derive(Debug)]
pub(in crate::sim) struct Face {
    shared: Arc<Shared>,
    api: PoolApi,
}

impl Face {
    pub(in crate::sim) fn new(shared: Arc<Shared>, api: PoolApi) -> Self {
        Self { shared, api }
    }
}

/// Forwards each call to the method of the same name of [`State`](super::super::state::State).
macro_rules! forward {
    ($($(#[$doc:meta])* [$($kind:tt)+] $method:ident($($arg:ident: $ty:ty),*) -> $out:ty
        = $driver:ident, $runtime:ident;)*) => {$(
        $($kind)+ $method(&self, $($arg: $ty),*) -> Result<$out> {
            let call = match self.api {
                PoolApi::Driver => Call::$driver,
                PoolApi::Runtime => Call::$runtime,
            };
            self.shared.call(call, |state| state.$method($($arg),*))
        }
    )*};
}

// SAFETY: as for the simulator's `Backend`: chunks are mapped, with the host's protection, before
// an allocation in them is reported.
unsafe impl PoolCalls for Face {
    fn api(&self) -> &'static str {
        match self.api {
            PoolApi::Driver => "driver",
            PoolApi::Runtime => "runtime",
        }
    }

    pool_calls!(forward);
}
