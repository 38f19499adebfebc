//! egmem's shapes of memory: more than one allocation at one range of addresses.
//!
//! - [`Growable`] is a vector whose address never changes: memory is added and removed at its end, and nothing is
//!   copied.
//! - [`Stripes`] cuts one range into parts at several locations in turn, with a front elsewhere if need be: on host nodes,
//!   on GPUs, or on both. The result is a [`Buffer`].
//! - [`Ring`] is a bounded queue between the CPU and GPUs, also of two processes, whose memory is mapped twice so that no batch is split.
//! - [`Appender`] takes the output of kernels that cannot say before how much it will be.
//! - [`Replicated`] is read-mostly data with a copy on each of several nodes and GPUs.
//!
//! The module [`sharing`] maps growing vectors in other processes, a process hands one side of a ring to
//! another, and replicated data have readers in other processes.
//!
//! Programs depend on the crate `egmem`, which re-exports the items that they need.
#![deny(missing_docs)]

pub mod appender;
mod counters;
pub mod device;
pub mod growable;
pub mod replicated;
pub mod ring;
pub mod sharing;
mod striped;

pub use appender::{Appended, Appender};
pub use growable::{Growable, GrowableOptions, Prefix};
pub use replicated::{Replica, Replicated, ReplicatedOptions};
pub use ring::{Consumer, Producer, Ring};
pub use striped::{Stripe, Stripes, stripes};

use egmem_core::{
    Buffer, BufferOptions, Driver, Error, Event, Growth, Result, Stream, Transfer, buffer, driver,
    explain, guard, ledger, memory, pinned, size, topology, vmm,
};
