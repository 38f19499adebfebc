//! The simulated driver: answers like the real one, with real memory behind it.
//!
//! # Design
//! The simulator answers as the real driver answers. docs/driver-behaviour.md is its specification, the
//! conformance suite runs on both, and traces recorded on real machines are replayed on it. Memory is real (`memfd`), so
//! bytes, faults and file descriptors behave. Work on streams runs as late as possible, so that a missing synchronisation
//! shows. It has no clock: no time measured on it means anything. With `EGMEM_SIM_PLACEMENT=guarded`, reservations lie
//! between inaccessible addresses, and freed ones are reused at once; `ci/examples` runs the heap's tests so once more.
//!
//! A simulated machine has another host than the kernel describes: its nodes, free memory and IMEX channel come from
//! `Backend::simulated_host`, so that few modules above the trait name the simulator's types.

mod access;
mod alloc;
mod by_address;
mod capacity;
mod controls;
mod device;
mod event;
mod fault;
mod machine;
mod memory;
mod pool;
mod presets;
mod space;
mod state;
mod stream;
mod vmm;

#[cfg(test)]
mod tests;

use std::any::Any;
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use controls::{Held, Sim};
pub use machine::{AttributeAnswer, GpuSpec, Machine, NodeSpec, PeerAccess, Refusal};

use crate::backend::done;
use crate::*;
use controls::Entered;
use fault::answered;
use space::Placement;

impl Driver {
    /// Creates a simulated driver of `machine`: for tests, and for development without a GPU.
    ///
    /// With `EGMEM_SIM_PLACEMENT=guarded` in the environment every reservation lies between inaccessible
    /// addresses, and the next reservation of the same size reuses a freed one at once, so that accesses
    /// beyond an end, and many after a free, fault. The default is `packed`: reservations without gaps.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the description contradicts itself, and for another value of
    /// `EGMEM_SIM_PLACEMENT`; [`Error::System`](crate::Error::System) if the operating system has no memory for it.
    pub fn simulated(machine: Machine) -> Result<Self> {
        machine.validate()?;
        let sim = Arc::new(Sim::new(machine, Placement::from_env()?));
        Ok(Self::from_backend(Arc::new(Simulator {
            driver_pools: Pools(Arc::clone(&sim), PoolApi::Driver),
            runtime_pools: Pools(Arc::clone(&sim), PoolApi::Runtime),
            sim,
        })))
    }

    /// Returns the simulator's controls, if this is the simulator.
    pub fn sim(&self) -> Option<&Sim> {
        let backend: &dyn Any = &**self;
        Some(&backend.downcast_ref::<Simulator>()?.sim)
    }
}

/// The simulated driver.
#[derive(Debug)]
struct Simulator {
    sim: Arc<Sim>,
    driver_pools: Pools,
    runtime_pools: Pools,
}

/// Forwards each call to the method of the same name of [`State`].
macro_rules! forward {
    ($($(#[$doc:meta])* [$($kind:tt)+] $method:ident($($arg:ident: $ty:ty),*) -> $out:ty
        = $call:ident;)*) => {$(
        $($kind)+ $method(&self, $($arg: $ty),*) -> Result<$out> {
            let (state, _traced) = &mut self.sim.enter(Call::$call)?;
            answered(Call::$call, state.$method($($arg),*))
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
        let mut host = self.sim.machine().host();
        if !self.sim.born.is_current() {
            return Some(host);
        }
        let state = self.sim.lock();
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
        let entered = self.sim.enter(Call::StreamQuery);
        let query = |mut it: Entered<'_>| answered(Call::StreamQuery, it.0.stream_query(stream));
        done(entered.and_then(query))
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        let entered = self.sim.enter(Call::EventQuery);
        let query = |mut it: Entered<'_>| answered(Call::EventQuery, it.0.event_query(event));
        done(entered.and_then(query))
    }

    driver_calls!(forward);
}

/// The pools as seen through one API: the same ones, under that API's call names.
#[derive(Debug)]
struct Pools(Arc<Sim>, PoolApi);

/// Forwards each call to the method of the same name of [`State`].
macro_rules! forward_pools {
    ($($(#[$doc:meta])* [$($kind:tt)+] $method:ident($($arg:ident: $ty:ty),*) -> $out:ty
        = $driver:ident, $runtime:ident;)*) => {$(
        $($kind)+ $method(&self, $($arg: $ty),*) -> Result<$out> {
            let call = match self.1 {
                PoolApi::Driver => Call::$driver,
                PoolApi::Runtime => Call::$runtime,
            };
            let (state, _traced) = &mut self.0.enter(call)?;
            answered(call, state.$method($($arg),*))
        }
    )*};
}

// SAFETY: as for the simulator's `Backend`: chunks are mapped, with the host's protection, before
// an allocation in them is reported.
unsafe impl PoolCalls for Pools {
    fn api(&self) -> &'static str {
        match self.1 {
            PoolApi::Driver => "driver",
            PoolApi::Runtime => "runtime",
        }
    }

    pool_calls!(forward_pools);
}
