//! Batched copies between pages and blocks of a GPU's cache.

mod job;
mod plan;

use std::sync::Arc;

pub use job::Job;

use crate::driver::Access;
use crate::inner::Inner;
use crate::memory::Engine;
use crate::table::{Direction, PageId};
use crate::{GpuPages, MemoryError, Result, Stream};
use plan::Plan;

/// How copies are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyMethod {
    /// The fastest that this driver has for parts of this size.
    #[default]
    Auto,
    /// One `cuMemcpyAsync` for each part of each page.
    Loop,
}

/// Starts the copies of `pairs`.
///
/// # Errors
/// Those of [`Tier::load`](crate::Tier::load).
pub(crate) fn start(
    tier: &Arc<Inner>,
    (direction, _method): (Direction, CopyMethod),
    stream: &Stream,
    pairs: &[(PageId, u64)],
    gpu: &GpuPages,
) -> Result<Job> {
    tier.expect_this_process()?;
    tier.driver().expect_same(stream.driver(), "stream")?;
    let plan = Plan::new(&tier.geometry, pairs, gpu)?;
    stream.expect_no_capture()?;
    let (of_tier, of_gpu) = match direction {
        Direction::Load => (Access::Read, Access::ReadWrite),
        Direction::Store => (Access::ReadWrite, Access::Read),
    };
    expect_tier_access(tier, stream, Engine::Copy, of_tier)?;
    let grants = gpu.ready(stream, Engine::Copy, of_gpu)?;
    let pages: Vec<PageId> = pairs.iter().map(|&(page, _)| page).collect();
    let job = Job::begin(tier, stream, direction, pages, (gpu, grants), plan.bytes())?;
    // SAFETY: the job keeps the tier's memory, its pages, and the parts until the work has ended; memory of the caller's stays by
    // the promise of `GpuPages::from_raw`.
    unsafe { job.submit(|| plan.copy_each(tier, stream, direction, gpu)) }
}

/// # Errors
/// [`NotAccessible`](crate::MemoryError::NotAccessible); the driver's errors.
fn expect_tier_access(tier: &Inner, stream: &Stream, engine: Engine, need: Access) -> Result<()> {
    // SAFETY: the stream lives, and is of the tier's driver.
    unsafe { tier.memory.ready_on(stream.handle())? };
    let have = tier
        .memory
        .gpu_access(stream.device(), engine, 0, tier.geometry.total)?;
    if have < need {
        let who = crate::driver::Location::Device(stream.device());
        return Err(MemoryError::NotAccessible { who, have, need }.into());
    }
    Ok(())
}
