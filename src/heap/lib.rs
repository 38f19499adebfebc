//! Suballocation: blocks of Extended GPU Memory in nanoseconds, without a driver call.
//!
//! Start with [`Heap`]; docs/architecture.md describes the implementation.
#![deny(missing_docs)]
#![cfg_attr(feature = "nightly", feature(allocator_api))]

#[cfg(any(feature = "allocator-api2", feature = "nightly"))]
mod alloc_api;
mod alloc_path;
mod arena;

mod backing;
mod block;
mod bytes;
mod cache;
mod classes;
pub mod debug;
mod deferred;
mod facts;
mod grower;
mod growth;
mod heap;
mod inner;
mod membership;
mod occupancy;
mod on_stream;
mod options;
#[cfg(feature = "pictures")]
mod picture;
mod piece;
mod ranges;
mod raw;
mod release;
mod reports;
mod resize;
mod room;
mod shards;
#[cfg(feature = "share")]
mod share;
mod stats;

pub use arena::{Arena, ArenaBlock};
pub use backing::DriverCounts;
pub use block::{Block, NotFreed};
pub use debug::DebugOptions;
pub use heap::Heap;
pub use occupancy::{Chunk, Occupancy, OccupancyTotals};
pub use on_stream::{OnStream, StreamBlock};
pub use options::{HeapOptions, Pressure, Relief};
pub use raw::RawBlock;
pub use release::NotAllFreed;
pub use stats::{ClassStats, HeapStats};

#[cfg(test)]
use egmem_core::{Buffer, Driver, DriverError, Machine, Topology, proof};
use egmem_core::{
    Error, Event, Growth, Memory, Progress, Result, Stream, accessors, buffer, capability, driver,
    error, explain, fork, guard, ledger, memory, per_driver, pinned, size, stream, teardown,
    topology, vmm,
};
