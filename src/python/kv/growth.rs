//! Tiers that grow in the background.

use std::time::Duration;

use egmem::{GrowthState, kv};
use pyo3::prelude::*;

use crate::error::OrRaise;

/// How often a wait runs Python's signal handlers and tells progress.
const CHECK: Duration = Duration::from_millis(50);

/// Returns the word for whether a tier grows.
pub fn growth(tier: &kv::Tier) -> &'static str {
    match tier.growth() {
        GrowthState::Complete => "complete",
        GrowthState::Growing => "growing",
        _ => "stopped",
    }
}

/// Waits for the end of a tier's growth without the GIL, and calls `progress(done, total)` when it has changed. `tier` is asked
/// for a handle each time, so that the wait does not keep a tier that was closed.
///
/// # Errors
/// Those of `tier`, of `progress`, of a signal handler and of the growth.
pub fn waiting(
    py: Python<'_>,
    progress: Option<&Bound<'_, PyAny>>,
    tier: impl Fn() -> PyResult<kv::Tier>,
) -> PyResult<()> {
    let mut told = None;
    loop {
        let tier = tier()?;
        let ended = py.detach(|| tier.wait_grown_timeout(CHECK));
        let made = tier.grown();
        crate::gil::drop_detached(tier);
        if let Some(progress) = progress
            && told != Some(made)
        {
            progress.call1((made.done, made.total))?;
            told = Some(made);
        }
        match ended {
            Some(grown) => return grown.or_raise(),
            None => py.check_signals()?,
        }
    }
}
