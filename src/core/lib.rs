//! egmem's memory: topology, physical memory, mappings, pools, streams and buffers.
//!
//! Programs depend on the crate `egmem`, which re-exports the items that they need.
#![deny(missing_docs)]

pub mod accessors;
pub mod backing;
pub mod buffer;
pub mod capability;
pub mod doctor;
pub mod explain;
pub mod growth;
pub mod guard;
pub mod host;
#[cfg(feature = "interop")]
pub mod interop;
pub mod ledger;
pub mod memory;
pub mod per_driver;
pub mod pinned;
pub mod pool;
pub mod proof;
pub mod stream;
pub mod svg;
pub mod table;
pub mod teardown;
pub mod topology;
pub mod vmm;

pub use backing::Backing;
pub use buffer::{Buffer, BufferOptions, GrowingBuffer};
pub use growth::{Growth, GrowthState, Progress};
pub use memory::Memory;
pub use pool::{Pool, PoolBuffer};
pub use stream::{Event, Stream, Transfer};
pub use topology::Topology;

#[cfg(feature = "simulator")]
pub use egmem_driver::Machine;
pub use egmem_driver::{
    self as driver, Driver, DriverError, Error, Explained, Result, error, fork, kernels, numbers,
    size, text,
};
