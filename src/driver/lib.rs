//! egmem's driver trait: the crates above it run unchanged on CUDA and on the simulator.
//!
//! - [`Driver`] is the driver in use. It dereferences to [`Backend`], the driver's calls one by one.
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
