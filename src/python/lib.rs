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
mod dlpack;
mod driver;
mod dtype;
mod error;
mod exchange;
mod frees;
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

#[pyo3::pymodule]
mod _egmem {
    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::args::{gpu, node, size};
    #[pymodule_export]
    use crate::blocks::{Block, Blocks};
    #[pymodule_export]
    use crate::buffer::{Buffer, Pool, PoolBlock};
    #[pymodule_export]
    use crate::cli::{_run, Report, doctor, ps, ps_dict};
    #[pymodule_export]
    use crate::copies::Slice;
    #[pymodule_export]
    use crate::driver::{
        Driver, Topology, default_driver, open, set_default_driver, simulated, topology,
    };
    #[pymodule_export]
    use crate::exchange::{Client, Entry, RemoteBuffer, connect, gather};
    #[pymodule_export]
    use crate::frees::{deferred, free_deferred, hold, release};
    #[pymodule_export]
    use crate::heap::Heap;
    #[cfg(feature = "test-hooks")]
    #[pymodule_export]
    use crate::hooks::{_begin_capture, _end_capture, _fail, _measure};
    #[pymodule_export]
    use crate::import::{receive, receive_offered, unpickle};
    #[pymodule_export]
    use crate::interpreter::Closing;
    #[pymodule_export]
    use crate::kv::events::{Events, Subscription, TierEvent};
    #[pymodule_export]
    use crate::kv::gpu_pages::GpuPages;
    #[pymodule_export]
    use crate::kv::open_tier::Tier;
    #[pymodule_export]
    use crate::kv::store::{Job, Load, PageView, Store};
    #[pymodule_export]
    use crate::kv::tier::Member;
    #[pymodule_export]
    use crate::ledger::{Allocation, Located, allocations, locate, memory_summary};
    #[pymodule_export]
    use crate::memory::{Memory, SharedBuffer};
    #[pymodule_export]
    use crate::places::{Gpu, Node};
    #[pymodule_export]
    use crate::ring::{RingSide, ring};
    #[pymodule_export]
    use crate::share::{Offer, close_offers};
    #[pymodule_export]
    use crate::shared_heap::SharedHeap;
    #[pymodule_export]
    use crate::stream::{Event, Stream};
    #[pymodule_export]
    use crate::torch_alloc::{CupySource, TorchSlot, register};
    #[pymodule_export]
    use crate::view::View;
}
