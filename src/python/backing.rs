//! What memory on a host node is: `backing="driver"`, `"registered"` or `"auto"`.

use egmem::backing::{Chosen, Why};
use egmem::driver::DevicePtr;
use egmem::ledger::{Located, locate};
use egmem::{Backing, Driver};
use pyo3::prelude::*;

use crate::args::choice;
use crate::error::OrRaise;

/// Parses what memory is to be.
///
/// # Errors
/// `InvalidArgument`.
pub fn parse(text: &str) -> PyResult<Backing> {
    let all = [Backing::Auto, Backing::Driver, Backing::Registered];
    let words = all.map(|backing| (backing.to_string(), backing));
    choice("backing", text, &words)
}

/// What memory is, and why, as text.
pub struct Words {
    pub backing: String,
    pub reason: String,
}

impl From<&Chosen> for Words {
    fn from(chosen: &Chosen) -> Self {
        Self {
            backing: chosen.backing.to_string(),
            reason: chosen.why.to_string(),
        }
    }
}

/// Returns what the ledger knows of the memory at an address.
///
/// # Errors
/// The driver's.
pub fn at(py: Python<'_>, driver: &Driver, address: DevicePtr) -> PyResult<Words> {
    let located = py.detach(|| locate(driver, address)).or_raise()?;
    let chosen = match located {
        Located::Allocation { allocation, .. } => allocation.backing,
        _ => None,
    };
    Ok(match &chosen {
        Some(chosen) => chosen.into(),
        // The ledger has no other memory without a decision.
        None => Words {
            backing: Backing::Driver.to_string(),
            reason: Why::Asked.to_string(),
        },
    })
}
