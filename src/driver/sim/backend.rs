//! The driver trait's methods; each forwards to the state.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::controls::Sim;
use super::pool::Face;
use super::shared::Shared;
use crate::Result;
use crate::*;

/// The simulated driver.
#[derive(Debug)]
pub(super) struct Simulator {
    pub(super) sim: Sim,
    driver_pools: Face,
    runtime_pools: Face,
}

impl Simulator {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            driver_pools: Face::new(Arc::clone(&shared), PoolApi::Driver),
            runtime_pools: Face::new(Arc::clone(&shared), PoolApi::Runtime),
            sim: Sim { shared },
        }
    }

    fn shared(&self) -> &Shared {
        &self.sim.shared
    }
}

/// Forwards each call to the method of the same name of [`State`](super::state::State).
macro_rules! forward {
    ($($(#[$doc:meta])* [$($kind:tt)+] $method:ident($($arg:ident: $ty:ty),*) -> $out:ty
        = $call:ident;)*) => {$(
        $($kind)+ $method(&self, $($arg: $ty),*) -> Result<$out> {
            self.shared().call(Call::$call, |state| state.$method($($arg),*))
        }
    )*};
}

// SAFETY: memory reported as mapped is mapped with `mmap` over a reservation that stays ours until it is
// freed, and memory reported as granted to the host has been given that protection.
unsafe impl Backend for Simulator {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn simulated_host(&self) -> Option<SimulatedHost> {
        let shared = self.shared();
        let mut host = shared.machine.host();
        let state = shared.lock();
        host.mappings = state.host_mappings();
        for node in &mut host.nodes {
            node.free = state.capacity.free(node.id.into());
        }
        Some(host)
    }

    fn runtime_pools(&self) -> Result<&dyn PoolCalls> {
        Ok(&self.runtime_pools)
    }

    fn driver_pools(&self) -> &dyn PoolCalls {
        &self.driver_pools
    }

    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        let shared = self.shared();
        done(shared.call(Call::StreamQuery, |state| state.stream_query(stream)))
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        let shared = self.shared();
        done(shared.call(Call::EventQuery, |state| state.event_query(event)))
    }

    driver_calls!(forward);
}

/// Returns whether work is done: an injected NOT_READY is an answer, as in the real driver.
fn done(answer: Result<bool>) -> Result<bool> {
    match answer {
        Err(error) if error.code() == Some(Code::NOT_READY) => Ok(false),
        answer => answer,
    }
}
