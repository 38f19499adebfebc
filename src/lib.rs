//! Extended GPU Memory for Rust.
#![deny(missing_docs)]
#![warn(clippy::all)]

pub mod capability;
pub mod driver;
mod error;
mod explain;
pub mod kernels;
pub mod size;

pub use driver::Driver;
pub use driver::sim::Machine;
pub use error::{DriverError, Error, Explained, Result};
