//! Options of tiers that Python gives as text.

use egmem::kv::Verify;
use pyo3::prelude::*;

use crate::error::invalid;

/// Reads which pages are checked.
///
/// # Errors
/// `InvalidArgument`.
pub fn verify(text: &str) -> PyResult<Verify> {
    match text {
        "never" => Ok(Verify::Never),
        "sample" => Ok(Verify::Sample),
        "always" => Ok(Verify::Always),
        _ => Err(invalid(&format!(
            "verify is {text:?}; valid: \"never\", \"sample\", \"always\""
        ))),
    }
}
