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

    #[cfg(feature = "test-hooks")]
    #[pymodule_export]
    use crate::hooks::{_begin_capture, _end_capture, _fail, _measure};
    #[pymodule_export]
    use crate::{
        args::{gpu, node, size},
        blocks::{Block, Blocks},
        buffer::{Buffer, Pool, PoolBlock},
        cli::{_run, Report, doctor, ps, ps_dict},
        copies::Slice,
        driver::{Driver, Topology, default_driver, open, set_default_driver, simulated, topology},
        exchange::{Client, Entry, RemoteBuffer, connect, gather},
        frees::{deferred, free_deferred, hold, release},
        heap::Heap,
        import::{receive, receive_offered, unpickle},
        interpreter::Closing,
        kv::{
            events::{Events, Subscription, TierEvent},
            gpu_pages::GpuPages,
            open_tier::Tier,
            store::{Job, Load, PageView, Store},
            tier::Member,
        },
        ledger::{Allocation, Located, allocations, locate, memory_summary},
        memory::{Memory, SharedBuffer},
        places::{Gpu, Node},
        ring::{RingSide, ring},
        share::{Offer, close_offers},
        shared_heap::SharedHeap,
        stream::{Event, Stream},
        torch_alloc::{CupySource, TorchSlot, register},
        view::View,
    };
}
