//! A tier's numbers: as dictionaries, and as text for Prometheus.

use egmem::kv;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

/// Returns what an attach has found.
pub fn found(py: Python<'_>, found: kv::Found) -> PyResult<Bound<'_, PyDict>> {
    let numbers = [
        ("generation", found.generation),
        ("ready", found.ready),
        ("unfinished", found.unfinished),
        ("damaged", found.damaged),
    ];
    let dictionary = numbers.into_py_dict(py)?;
    dictionary.set_item("is_new", found.is_new)?;
    Ok(dictionary)
}

/// Returns a tier's statistics.
pub fn stats(py: Python<'_>, stats: kv::Stats) -> PyResult<Bound<'_, PyDict>> {
    let numbers = [
        ("pages", stats.pages),
        ("usable", stats.usable),
        ("page_bytes", stats.page_bytes),
        ("free", stats.free),
        ("writing", stats.writing),
        ("ready", stats.ready),
        ("pinned", stats.pinned),
        ("hits", stats.hits),
        ("misses", stats.misses),
        ("stores", stats.stores),
        ("evictions", stats.evictions),
        ("damaged", stats.damaged),
        ("loaded_bytes", stats.loaded_bytes),
        ("stored_bytes", stats.stored_bytes),
    ];
    numbers.into_py_dict(py)
}

/// Returns a tier's statistics as text, with labels of any kind.
///
/// # Errors
/// Python's.
pub fn metrics(
    py: Python<'_>,
    tier: &kv::Tier,
    labels: Option<&Bound<'_, PyDict>>,
) -> PyResult<String> {
    let text = |(name, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        Ok((name.str()?.to_string(), value.str()?.to_string()))
    };
    let labels = labels.into_iter().flat_map(|labels| labels.iter());
    let labels = labels.map(text).collect::<PyResult<Vec<_>>>()?;
    let labels: Vec<_> = labels
        .iter()
        .map(|(name, value)| (&**name, &**value))
        .collect();
    Ok(py.detach(|| tier.metrics(&labels)))
}
