//! Extended GPU Memory for Rust.
#![deny(missing_docs)]

mod buffer;
pub mod capability;
pub mod driver;
mod error;
mod explain;
mod guard;
pub mod interop;
pub mod kernels;
pub mod memory;
pub mod plain;
pub mod pool;
pub mod proof;
pub mod size;
pub mod stream;
mod teardown;
pub mod topology;
pub mod trace;
pub mod vmm;

pub use buffer::{Buffer, BufferOptions};
pub use driver::Driver;
pub use driver::sim::Machine;
pub use error::{DriverError, Error, Explained, Result};
pub use memory::Memory;
pub use pool::{Pool, PoolBuffer};
pub use stream::{Event, Stream};
pub use topology::Topology;

/// The README's example, compiled and run as the documentation's are.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
