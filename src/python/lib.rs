//! The native module of the Python package `egmem`.
//!
//! The functions below are a thin face: they check arguments, release the GIL, call the facade crate and convert
//! errors. No lock of egmem is held while Python code runs, and no egmem code that holds a lock asks for the GIL.
//! Making an exception runs Python code, so the error is built after the lock is released.

mod args;
mod backing;
mod block;
mod blocks;
mod buffer;
mod class;
mod cli;
mod contexts;
mod copies;
mod cupy;
mod device;
mod dlpack;
mod driver;
mod dtype;
mod error;
mod event;
mod exchange;
mod frees;
mod gil;
mod group;
mod heap;
mod holds;
#[cfg(feature = "test-hooks")]
mod hooks;
mod import;
mod interfaces;
mod interrupts;
mod kv;
mod ledger;
mod library;
mod many;
mod memory;
mod offer;
mod owner;
mod pickle;
mod places;
mod pool;
mod region;
mod ring;
mod running;
mod shared_heap;
mod site;
mod slice;
mod span;
mod stream;
mod tickets;
mod topology;
mod torch_alloc;
mod view;
mod window;

use pyo3::prelude::*;

#[pymodule]
fn _egmem(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<class::Closing>()?;
    module.add_class::<driver::Driver>()?;
    module.add_class::<topology::Topology>()?;
    module.add_class::<places::Gpu>()?;
    module.add_class::<places::Node>()?;
    module.add_class::<event::Event>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<ring::RingSide>()?;
    module.add_function(wrap_pyfunction!(ring::ring, module)?)?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<view::View>()?;
    module.add_class::<heap::Heap>()?;
    module.add_class::<blocks::Blocks>()?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<buffer::Buffer>()?;
    module.add_class::<block::Block>()?;
    module.add_class::<pool::PoolBlock>()?;
    module.add_class::<slice::Slice>()?;
    module.add_class::<memory::SharedBuffer>()?;
    module.add_class::<offer::Offer>()?;
    module.add_class::<shared_heap::SharedHeap>()?;
    module.add_function(wrap_pyfunction!(group::gather, module)?)?;
    module.add_function(wrap_pyfunction!(import::receive, module)?)?;
    module.add_function(wrap_pyfunction!(import::receive_offered, module)?)?;
    module.add_function(wrap_pyfunction!(import::unpickle, module)?)?;
    module.add_function(wrap_pyfunction!(offer::close_offers, module)?)?;
    module.add_function(wrap_pyfunction!(driver::open, module)?)?;
    module.add_function(wrap_pyfunction!(driver::simulated, module)?)?;
    module.add_function(wrap_pyfunction!(driver::default_driver, module)?)?;
    module.add_function(wrap_pyfunction!(driver::set_default_driver, module)?)?;
    module.add_function(wrap_pyfunction!(topology::topology, module)?)?;
    module.add_function(wrap_pyfunction!(frees::deferred, module)?)?;
    module.add_function(wrap_pyfunction!(frees::free_deferred, module)?)?;
    module.add_function(wrap_pyfunction!(frees::hold, module)?)?;
    module.add_function(wrap_pyfunction!(frees::release, module)?)?;
    module.add_function(wrap_pyfunction!(args::size, module)?)?;
    module.add_function(wrap_pyfunction!(args::node, module)?)?;
    module.add_function(wrap_pyfunction!(args::gpu, module)?)?;
    module.add_class::<cli::Report>()?;
    module.add_function(wrap_pyfunction!(cli::doctor, module)?)?;
    module.add_function(wrap_pyfunction!(cli::_run, module)?)?;
    module.add_function(wrap_pyfunction!(cli::ps, module)?)?;
    module.add_function(wrap_pyfunction!(cli::ps_dict, module)?)?;
    module.add_class::<ledger::Allocation>()?;
    module.add_class::<ledger::Located>()?;
    module.add_function(wrap_pyfunction!(ledger::allocations, module)?)?;
    module.add_function(wrap_pyfunction!(ledger::locate, module)?)?;
    module.add_function(wrap_pyfunction!(ledger::memory_summary, module)?)?;
    module.add_class::<exchange::Client>()?;
    module.add_class::<exchange::Entry>()?;
    module.add_class::<exchange::RemoteBuffer>()?;
    module.add_function(wrap_pyfunction!(exchange::connect, module)?)?;
    kv::add(module)?;
    module.add_class::<cupy::CupySource>()?;
    module.add_class::<torch_alloc::TorchSlot>()?;
    module.add_function(wrap_pyfunction!(torch_alloc::register, module)?)?;
    #[cfg(feature = "test-hooks")]
    hooks::add(module)?;
    Ok(())
}
