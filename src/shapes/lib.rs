//! egmem's shapes of memory: more than one allocation at one range of addresses.
//!
//! - [`Growable`] is a vector whose address never changes: memory is added and removed at its end, and nothing is
//!   copied.
//!
//! Programs depend on the crate `egmem`, which re-exports what they need.
#![deny(missing_docs)]

pub mod growable;

pub use growable::{Growable, GrowableOptions, Prefix};

use egmem_core::{Driver, Error, Result, buffer, driver, memory, size, topology, vmm};
