//! Options of tiers that Python gives as text.

use egmem::kv::{TierOptions, Verify};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::args::{Count, OneOrEach, Size, choice};

/// Reads which pages are checked.
///
/// # Errors
/// `InvalidArgument`.
pub fn verify(text: &str) -> PyResult<Verify> {
    let words = [
        ("never", Verify::Never),
        ("sample", Verify::Sample),
        ("always", Verify::Always),
    ];
    choice("verify", text, &words)
}

/// Sets the sizes of a tier.
///
/// # Errors
/// `TypeError` unless `page_bytes` is given, and one of `pages` and `bytes`.
pub fn sized(
    options: TierOptions,
    pages: Option<Count>,
    page_bytes: Option<PageSizes>,
    bytes: Option<Size>,
) -> PyResult<TierOptions> {
    let Some(page_bytes) = page_bytes else {
        return Err(PyTypeError::new_err("a tier needs page_bytes"));
    };
    let options = match (pages, bytes) {
        (Some(pages), None) => options.pages(pages.0),
        (None, Some(bytes)) => options.bytes(bytes.0),
        _ => {
            let why = "a tier has either pages, their number, or bytes, those of all its memory";
            return Err(PyTypeError::new_err(why));
        }
    };
    Ok(options.page_sizes(page_bytes.sizes()))
}

/// The bytes of a page, or of a page of each group.
pub type PageSizes = OneOrEach<Size>;

impl PageSizes {
    /// Returns the sizes.
    pub fn sizes(self) -> Vec<u64> {
        let sizes = match self {
            Self::One(size) => vec![size],
            Self::Each(sizes) => sizes,
        };
        sizes.into_iter().map(|size| size.0).collect()
    }
}
