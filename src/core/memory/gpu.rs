//! Checks GPUs' access to memory before a safe call submits work.

use super::{Engine, Memory};
use crate::driver::{Access, Location};
use crate::{Error, Result};

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
        return Err(Error::not_accessible(Location::Device(gpu), have, need));
    }
    Ok(())
}

/// Refuses a copy that the driver would make with the CPU and that would kill the process: between two host
/// memories, to one that the CPU may only read (docs/driver-behaviour.md, "Traps").
///
/// # Errors
/// [`Error::NotAccessible`].
pub fn expect_no_cpu_fault(
    (to, to_offset): (&impl Memory, u64),
    (from, from_offset): (&impl Memory, u64),
    len: u64,
) -> Result<()> {
    if to.is_read_only_for_cpu(to_offset, len) && from.may_be_on_host(from_offset, len) {
        let (have, need) = (Access::Read, Access::ReadWrite);
        return Err(Error::not_accessible(Location::Host, have, need));
    }
    Ok(())
}
