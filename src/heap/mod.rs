//! Suballocation: blocks of Extended GPU Memory in nanoseconds, without a driver call.
//!
//! Start with [`Heap`]; docs/architecture.md describes the implementation.

#[cfg(any(feature = "allocator-api2", feature = "nightly"))]
mod alloc_api;
mod backing;
mod block;
mod cache;
mod classes;
mod core;
pub mod debug;
mod deferred;
mod grower;
mod growth;
#[expect(
    clippy::module_inception,
    reason = "the type that the module is named after"
)]
mod heap;
mod life;
mod lifetime;
mod limits;
mod occupancy;
mod options;
mod picture;
mod piece;
mod release;
mod resize;
mod room;
#[cfg(feature = "share")]
mod share;
mod shared;
mod stats;
mod svg;
mod ways;
mod zero;

pub use block::{Block, NotFreed};
pub use debug::DebugOptions;
pub use heap::Heap;
pub use limits::{Pressure, Relief};
pub use occupancy::{Chunk, Occupancy, OccupancyTotals};
pub use options::HeapOptions;
pub use release::NotAllFreed;
pub use stats::{ClassStats, DriverCounts, HeapStats};
