//! Numbers of pages and blocks that Python gives.

use egmem::kv::PageId;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::args::Count;
use crate::error::invalid;

/// Reads a list or another sequence of numbers. A NumPy array is read as a whole, without a Python object for each
/// number.
///
/// # Errors
/// `InvalidArgument` for an array of another kind; Python's errors for an object that is no sequence of numbers
/// from 0 on.
pub fn numbers(given: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if !given.hasattr("astype")? {
        let numbers: Vec<Count> = given.extract()?;
        return Ok(numbers.into_iter().map(|number| number.0).collect());
    }
    let kind: String = given.getattr("dtype")?.getattr("kind")?.extract()?;
    let dimensions: usize = given.getattr("ndim")?.extract()?;
    if !matches!(kind.as_str(), "i" | "u") || dimensions != 1 {
        return Err(invalid(
            "an array of pages or blocks has one dimension and integers",
        ));
    }
    // A negative number becomes one that no tier and no cache has.
    let words = given.call_method1("astype", ("<u8",))?;
    let bytes: PyBackedBytes = words.call_method0("tobytes")?.extract()?;
    let words = bytes.chunks_exact(8).map(|word| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        u64::from_le_bytes(bytes)
    });
    Ok(words.collect())
}

/// Returns pages as numbers: a page's number, and above bit 32 how often it was free before, so that an old one is
/// refused.
pub fn bits(pages: &[PageId]) -> Vec<u64> {
    pages.iter().map(|page| page.to_bits()).collect()
}
