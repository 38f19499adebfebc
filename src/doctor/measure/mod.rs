//! Proofs and measurements of memory on host nodes, as the [`Survey`](crate::Survey) and the program egm-demo make them.
//!
//! Times on the simulator mean nothing; everything else is the same there.

mod memory;
mod proofs;
mod rates;
mod rows;

pub use memory::Kind;
pub use proofs::Proofs;
pub use rates::Rates;
pub use rows::{Bandwidth, BandwidthRow, OPERATIONS, Proof, Rate};

pub(crate) use memory::HostMemory;

use crate::Error;

/// What a measurement tells while it runs.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// What it does now.
    Doing(&'a str),
    /// One of its steps is done.
    Done,
    /// What it could not do, and why. It goes on without.
    Without(&'a str, &'a Error),
}
