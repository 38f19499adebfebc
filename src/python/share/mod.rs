//! Memory for other processes without a server: pickling, `Memory.share`, `receive` and groups.

mod chunks;
mod common;
mod events;
mod group;
mod import;
pub mod offer;
pub mod pickle;
mod rings;
pub mod tickets;

use pyo3::prelude::*;

/// Adds the functions and types.
pub fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<import::SharedBuffer>()?;
    module.add_class::<offer::Offer>()?;
    module.add_class::<chunks::SharedHeap>()?;
    module.add_function(wrap_pyfunction!(chunks::unpickle_heap, module)?)?;
    module.add_function(wrap_pyfunction!(group::gather, module)?)?;
    module.add_function(wrap_pyfunction!(import::receive, module)?)?;
    module.add_function(wrap_pyfunction!(import::receive_offered, module)?)?;
    module.add_function(wrap_pyfunction!(import::unpickle, module)?)?;
    module.add_function(wrap_pyfunction!(events::reduce, module)?)?;
    module.add_function(wrap_pyfunction!(events::unpickle, module)?)?;
    module.add_function(wrap_pyfunction!(rings::reduce, module)?)?;
    module.add_function(wrap_pyfunction!(rings::unpickle_producer, module)?)?;
    module.add_function(wrap_pyfunction!(rings::unpickle_consumer, module)?)?;
    module.add_function(wrap_pyfunction!(offer::close_offers, module)?)?;
    Ok(())
}
