//! egmem's doctor for programs: trials in child processes, and the report as text.
//!
//! The report itself and the trials are in [`egmem_core::doctor`]. [`Children`] runs each batch of trials in a child
//! process, which calls [`answer_trials`], so that a driver that crashes or hangs ends only the child. [`to_text`]
//! formats a report as `egmem doctor` shows it. [`Survey`] adds proofs and [measurements](measure).
//!
//! Programs depend on the crate `egmem`, which re-exports these items.
#![deny(missing_docs)]

mod child;
mod children;
mod host;
pub mod measure;
mod part;
mod probe;
pub mod survey;
mod text;

pub use children::Children;
pub use probe::answer_trials;
pub use survey::Survey;
pub use text::to_text;

use egmem_core::doctor::{Answer, Prober, Reason, Report};
use egmem_core::error::Explained;
use egmem_core::pinned::{DeviceMemory, PinnedHost};
use egmem_core::proof::Prover;
use egmem_core::{
    Backing, Buffer, Driver, Error, Event, Memory, Pool, PoolBuffer, Result, Stream, Topology,
    backing, capability, driver, host as facts, kernels, size, text as texts,
};
