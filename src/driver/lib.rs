//! egmem's driver trait: the crates above it run unchanged on CUDA and on the simulator.
//!
//! - [`Driver`] is the driver in use. It dereferences to [`Backend`], the driver's calls one by one.
//!
//! # Design
//! `driver::Backend` has one method per driver call, named after it, with the driver's own arguments. All code above is
//! written once. Below are the CUDA driver and, with the feature `simulator`, the simulator; `Driver::from_backend` takes
//! others, such as a null driver for measuring or a recorder.
//!
//! The trait has plain calls and not ideas ("allocate memory on a node"), because this crate is about the order of calls,
//! their rounding and their roll-back. Above the trait these are the same code on a laptop and on a GPU, so a test on the
//! simulator tests them.
//!
//! Result codes are integers (`Code`), functions are looked up one by one, and structures are our own plain mirrors. Tests
//! compare the mirrors with cudarc's bindings for six CUDA versions (`driver/cuda/abi/tests.rs`, `ci/cudarc`). A newer
//! driver may return a code or a value that a closed enum does not have; in Rust that would be undefined behaviour.
//!
//! VMM calls need no current context (from driver 12.4 on; before, every device's primary context is retained when the
//! driver is opened). Other calls push the device's primary context and pop it, so the caller's context stays current in
//! every thread.
#![cfg_attr(
    feature = "simulator",
    doc = "- [`sim`] is the simulated driver, of a [`Machine`] (feature `simulator`, on by default)."
)]
//! - [`Error`] is the error of calls about memory; each layer above has its own, which carries it.
//!
//! Programs depend on the crate `egmem`, which re-exports the items that they need.
#![deny(missing_docs)]

#[macro_use]
mod macros;

mod attributes;
#[macro_use]
mod backend;
mod bytes;
mod call;
mod capture;
mod code;
mod cuda;
mod driver;
pub mod error;
pub mod fork;
#[cfg(feature = "interop")]
mod interop;
pub mod kernels;
mod lock;
pub mod numbers;
#[cfg(feature = "simulator")]
pub mod sim;
pub mod size;
pub mod text;
mod types;
pub mod versions;

pub use attributes::*;
pub use backend::{Backend, PoolCalls, SimulatedHost, SimulatedNode};
pub use call::Call;
pub use capture::Relaxed;
pub use code::Code;
pub use driver::{Driver, WeakDriver};
pub use error::{DriverError, Error, Explain, Explained, Language, NoRoom, Result};
pub use lock::lock;
pub use numbers::random;
#[cfg(feature = "simulator")]
pub use sim::Machine;
pub use types::*;
