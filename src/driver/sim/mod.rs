//! The simulated driver: answers as the real one answers, with real memory behind it.

mod machine;

use std::sync::Arc;

pub use machine::{GpuSpec, Machine, NodeSpec};

use super::Backend;
use crate::{Error, Result};

/// The simulator's controls: injected faults, call counts, and what is still held.
#[derive(Debug)]
pub struct Sim {}

pub(super) fn open(_machine: Machine) -> Result<Arc<dyn Backend>> {
    Err(Error::NoDriver {
        detail: "not yet".into(),
    })
}
