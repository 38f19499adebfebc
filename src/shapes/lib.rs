//! egmem's shapes of memory: more than one allocation at one range of addresses.
//!
//! - [`Growable`] is a vector whose address never changes: memory is added and removed at its end, and nothing is
//!   copied.
//! - [`Stripes`] cuts one range into parts at several locations in turn, with a front elsewhere if need be: on host nodes,
//!   on GPUs, or on both. The result is a [`Buffer`].
//!
//! Programs depend on the crate `egmem`, which re-exports what they need.
#![deny(missing_docs)]

pub mod growable;
mod striped;

pub use growable::{Growable, GrowableOptions, Prefix};
pub use striped::{Stripe, Stripes, stripes};

use egmem_core::{
    Buffer, BufferOptions, Driver, Error, Result, buffer, driver, guard, ledger, memory, size,
    topology, vmm,
};
