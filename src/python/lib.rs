//! The native module of the Python package `egmem`.
//!
//! The functions below are a thin face: they check arguments, release the GIL, call the facade crate and convert
//! errors. No lock of egmem is held while Python code runs, and no egmem code that holds a lock asks for the GIL.
//! Making an exception runs Python code, so the error is built after the lock is released.

mod args;
mod blocks;
mod buffer;
mod cli;
mod copies;
mod cupy;
mod dlpack;
mod driver;
mod dtype;
mod error;
mod exchange;
mod frees;
mod gpus;
mod heap;
mod holds;
#[cfg(feature = "test-hooks")]
mod hooks;
mod import;
mod interpreter;
mod kv;
mod ledger;
mod memory;
mod owner;
mod pickle;
mod places;
mod region;
mod ring;
mod share;
mod shared_heap;
mod stream;
mod tickets;
mod torch_alloc;
mod view;

use pyo3::prelude::*;

#[pymodule]
fn _egmem(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<interpreter::Closing>()?;
    module.add_class::<driver::Driver>()?;
    module.add_class::<driver::Topology>()?;
    module.add_class::<places::Gpu>()?;
    module.add_class::<places::Node>()?;
    module.add_class::<stream::Event>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<ring::RingSide>()?;
    module.add_function(wrap_pyfunction!(ring::ring, module)?)?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<view::View>()?;
    module.add_class::<heap::Heap>()?;
    module.add_class::<blocks::Blocks>()?;
    module.add_class::<buffer::Pool>()?;
    module.add_class::<buffer::Buffer>()?;
    module.add_class::<blocks::Block>()?;
    module.add_class::<buffer::PoolBlock>()?;
    module.add_class::<copies::Slice>()?;
    module.add_class::<memory::SharedBuffer>()?;
    module.add_class::<share::Offer>()?;
    module.add_class::<shared_heap::SharedHeap>()?;
    module.add_function(wrap_pyfunction!(share::gather, module)?)?;
    module.add_function(wrap_pyfunction!(import::receive, module)?)?;
    module.add_function(wrap_pyfunction!(import::receive_offered, module)?)?;
    module.add_function(wrap_pyfunction!(import::unpickle, module)?)?;
    module.add_function(wrap_pyfunction!(share::close_offers, module)?)?;
    module.add_function(wrap_pyfunction!(driver::open, module)?)?;
    module.add_function(wrap_pyfunction!(driver::simulated, module)?)?;
    module.add_function(wrap_pyfunction!(driver::default_driver, module)?)?;
    module.add_function(wrap_pyfunction!(driver::set_default_driver, module)?)?;
    module.add_function(wrap_pyfunction!(driver::topology, module)?)?;
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
    module.add_class::<kv::tier::Tier>()?;
    module.add_class::<kv::gpu_pages::GpuPages>()?;
    module.add_class::<kv::tier::Member>()?;
    module.add_class::<kv::store::PageView>()?;
    module.add_class::<kv::store::Store>()?;
    module.add_class::<kv::store::Load>()?;
    module.add_class::<kv::store::Job>()?;
    module.add_class::<kv::events::TierEvent>()?;
    module.add_class::<kv::events::Events>()?;
    module.add_class::<kv::events::Subscription>()?;
    module.add_class::<cupy::CupySource>()?;
    module.add_class::<torch_alloc::TorchSlot>()?;
    module.add_function(wrap_pyfunction!(torch_alloc::register, module)?)?;
    #[cfg(feature = "test-hooks")]
    hooks::add(module)?;
    Ok(())
}
