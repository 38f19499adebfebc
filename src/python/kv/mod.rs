//! `egmem.kv`: the KV-cache tier.

mod events;
mod gpu_pages;
mod job;
mod keys;
mod open_tier;
mod options;
mod store;
mod tier;

use pyo3::prelude::*;

/// Adds the tier's classes.
pub fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<tier::Tier>()?;
    module.add_class::<gpu_pages::GpuPages>()?;
    module.add_class::<tier::Member>()?;
    module.add_class::<store::PageView>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<store::Load>()?;
    module.add_class::<events::TierEvent>()?;
    module.add_class::<events::Events>()?;
    module.add_class::<events::Subscription>()?;
    module.add_class::<job::Job>()
}
