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
mod answer;
mod backend;
mod capacity;
mod capture;
mod controls;
mod device;
mod event;
mod fault;
mod grants;
mod kernels;
mod machine;
mod memory;
mod physical;
mod pool;
mod presets;
mod ranges;
mod references;
mod registered;
mod share;
mod shared;
mod space;
mod state;
mod stream;
mod validate;
mod vmm;
mod window;
mod work;

#[cfg(test)]
mod tests;

use std::any::Any;
use std::sync::Arc;

pub use controls::{Held, Sim};
pub use fault::FaultId;
pub use machine::{AttributeAnswer, GpuSpec, Machine, NodeSpec, PeerAccess, Refusal};

use crate::{Driver, Result};
use backend::Simulator;
use shared::Shared;
use window::Placement;

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
        let shared = Shared::new(machine, Placement::from_env()?);
        Ok(Self::from_backend(Arc::new(Simulator::new(Arc::new(
            shared,
        )))))
    }

    /// Returns the simulator's controls, if this is the simulator.
    pub fn sim(&self) -> Option<&Sim> {
        let backend: &dyn Any = &**self;
        Some(&backend.downcast_ref::<Simulator>()?.sim)
    }
}
