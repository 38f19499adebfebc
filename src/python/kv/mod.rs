//! `egmem.kv`: the KV-cache tier.

mod attach;
mod events;
mod gpu_array;
mod gpu_pages;
mod growth;
mod job;
mod keys;
mod member;
mod numbers;
mod once;
mod open_tier;
mod options;
mod page;
mod stats;
mod store;
mod subscription;
mod tier;

use pyo3::prelude::*;

/// Adds the tier's classes.
pub fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<tier::Tier>()?;
    module.add_class::<gpu_pages::GpuPages>()?;
    module.add_class::<member::Member>()?;
    module.add_class::<page::PageView>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<store::Load>()?;
    module.add_class::<events::TierEvent>()?;
    module.add_class::<events::Events>()?;
    module.add_class::<subscription::Subscription>()?;
    module.add_class::<job::Job>()
}
