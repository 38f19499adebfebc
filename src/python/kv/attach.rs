//! Tiers in memory that a Python object has.

use std::sync::Arc;

use egmem::driver::Location;
use egmem::kv;
use pyo3::prelude::*;

use crate::error::{ToPy, closed, invalid};
use crate::memory::Memory;
use crate::region::{Owner, Region};

/// Takes the memory of an object over for a tier, and returns the tier and its place. If that fails, the object has its memory
/// again.
///
/// # Errors
/// Those of `open`; `InvalidArgument` for other memory than a `Buffer` or a `RemoteBuffer`; `Closed`.
pub fn attach(
    py: Python<'_>,
    object: &Memory,
    open: impl FnOnce(kv::AttachOptions) -> Result<kv::Tier, kv::Error>,
) -> PyResult<(kv::Tier, Location)> {
    let region = object.region()?;
    region.expect_here()?;
    let location = region.only_location();
    drop(region);
    let region = object.take()?.ok_or_else(|| closed("memory"))?;
    if let Err(error) = region.wait_for_gpus(py) {
        object.put_back(region);
        return Err(error);
    }
    let (tier, refused) = match region.into_owner() {
        Some(Owner::Buffer(memory)) => {
            let (tier, memory) = in_memory(memory, open);
            (tier, memory.map(Owner::Buffer))
        }
        Some(Owner::Remote(memory)) => {
            let (tier, memory) = in_memory(Arc::new(memory), open);
            let memory = memory.and_then(Arc::into_inner);
            (tier, memory.map(Owner::Remote))
        }
        other => (
            Err(invalid("a tier lies in a Buffer or a RemoteBuffer")),
            other,
        ),
    };
    if let Some(owner) = refused {
        object.put_back(Region::new(owner));
    }
    Ok((tier?, location))
}

/// Attaches a tier in memory, or returns the memory with the error.
fn in_memory<M: kv::TierMemory + 'static>(
    memory: Arc<M>,
    open: impl FnOnce(kv::AttachOptions) -> Result<kv::Tier, kv::Error>,
) -> (PyResult<kv::Tier>, Option<Arc<M>>) {
    match open(kv::Tier::attach(Arc::clone(&memory))) {
        Ok(tier) => (Ok(tier), None),
        Err(error) => (Err(error.to_py()), Some(memory)),
    }
}
