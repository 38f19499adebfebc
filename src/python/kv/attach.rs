//! Tiers in memory that a Python object has.

use std::sync::Arc;

use egmem::driver::Location;
use egmem::kv::{self, AttachOptions};
use pyo3::prelude::*;

use crate::error::{OrRaise, closed, invalid};
use crate::memory::Memory;
use crate::region::{Owner, Region};

/// A tier, its place, and memory that other processes may get while the tier is open.
pub type Attached = (kv::Tier, Location, Option<Arc<Region>>);

/// Takes the memory of an object over for a tier. If that fails, the object has its memory again.
///
/// # Errors
/// Those of `open`; `InvalidArgument` for memory that no tier lies in; `InUse` for memory with views; `Closed`.
pub fn attach(
    py: Python<'_>,
    object: &Memory,
    open: impl FnOnce(AttachOptions) -> Result<kv::Tier, kv::Error>,
) -> PyResult<Attached> {
    let region = object.region()?;
    region.expect_here()?;
    let location = region.only_location();
    drop(region);
    let region = object.take_offered()?.ok_or_else(|| closed("memory"))?;
    let opened = region
        .wait_for_gpus(py)
        .and_then(|()| open(options(region.owner().or_raise()?)?).or_raise());
    let tier = match opened {
        Ok(tier) => tier,
        Err(error) => {
            object.put_back(region);
            return Err(error);
        }
    };
    if region.shared_before().is_some() {
        return Ok((tier, location, Some(region)));
    }
    // The tier keeps the memory, and waits for its own copies.
    drop(Arc::into_inner(region).map(Region::into_owner));
    Ok((tier, location, None))
}

/// Returns the options of a tier in memory.
///
/// # Errors
/// `InvalidArgument` for a block, for a part of memory and for a page.
fn options(owner: &Owner) -> PyResult<AttachOptions> {
    match owner {
        Owner::Buffer(memory) => Ok(kv::Tier::attach(Arc::clone(memory))),
        Owner::Remote(memory) => Ok(kv::Tier::attach(Arc::clone(memory))),
        Owner::Imported(memory) => Ok(kv::Tier::attach(Arc::new(memory.clone()))),
        _ => Err(invalid(
            "a tier lies in a Buffer, a RemoteBuffer or a SharedBuffer that is no part of one",
        )),
    }
}
