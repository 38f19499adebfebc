//! The simulated driver: answers as the real one answers, with real memory behind it.

mod machine;

use std::sync::Arc;

pub use machine::{GpuSpec, Machine, NodeSpec};

use super::Backend;
use crate::{Error, Result};

/// The simulator's controls: injected faults, call counts, and what is still held.
#[derive(Debug)]
pub struct Sim {
    machine: Machine,
}

impl Sim {
    /// The machine that is simulated.
    pub const fn machine(&self) -> &Machine {
        &self.machine
    }
}

pub(super) fn open(_machine: Machine) -> Result<Arc<dyn Backend>> {
    Err(Error::NoDriver {
        detail: "not yet".into(),
    })
}
