//! Checks GPUs' access to memory before a safe call submits work.

use super::Memory;
use crate::driver::{Access, Location};
use crate::{Error, Result};

/// The part of a GPU that accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Copies and fills. They reach every GPU's memory from `cuMemAlloc`, with or without peer access.
    Copy,
    /// Kernels. They reach another GPU's memory only with a grant of it to their own GPU.
    Kernel,
}

/// Refuses a range that `engine` of GPU `gpu` has no access `need` to: the GPU would lose its context.
///
/// # Errors
/// [`Error::NotAccessible`]; those of [`gpu_access`](super::AccessChecks::gpu_access).
pub fn expect_gpu_access(
    memory: &impl Memory,
    (gpu, engine): (i32, Engine),
    (offset, len): (u64, u64),
    need: Access,
) -> Result<()> {
    let have = memory.gpu_access(gpu, engine, offset, len)?;
    if have < need {
        let who = Location::Device(gpu);
        return Err(Error::NotAccessible { who, have, need });
    }
    Ok(())
}

/// Refuses a copy that the driver would make with the CPU and that would kill the process: between two host
/// memories, to one that the CPU may only read (docs/driver-behaviour.md, "Traps").
///
/// # Errors
/// [`Error::NotAccessible`].
pub fn expect_no_cpu_fault(
    to: &impl Memory,
    (offset, len): (u64, u64),
    from: &impl Memory,
) -> Result<()> {
    if from.location().is_host() && to.is_read_only_for_cpu(offset, len) {
        return Err(Error::NotAccessible {
            who: Location::Host,
            have: Access::Read,
            need: Access::ReadWrite,
        });
    }
    Ok(())
}
