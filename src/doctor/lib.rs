//! egmem's doctor for programs: trials in child processes, and the report as text.
//!
//! A [`Report`] has everything that `egmem doctor` shows, and a [`Prober`] makes its trials. [`Children`] runs each batch of trials in a child
//! process, which calls [`answer_trials`], so that a driver that crashes or hangs ends only the child. [`to_text`]
//! formats a report as `egmem doctor` shows it. [`Survey`] adds proofs and [measurements](measure).
//!
//! Programs depend on the crate `egmem`, which re-exports these items.
#![deny(missing_docs)]

mod advice;
mod child;
mod children;
pub mod host;
pub mod measure;
mod part;
mod prober;
mod report;
pub mod survey;
mod text;

pub use advice::Advice;
pub use children::{Children, answer_trials};
pub use prober::{Answer, InProcess, Libraries, Prober, Reason, Tried};
pub use report::{AutoBacking, DriverFacts, GpuHints, Report};
pub use survey::Survey;
pub use text::to_text;

use egmem_core::error::{self as errors, Explained};
use egmem_core::pinned::{DeviceMemory, PinnedHost};
use egmem_core::proof::Prover;
use egmem_core::{
    Backing, Buffer, Driver, Error, Event, Memory, Pool, PoolBuffer, Result, Stream, Topology,
    backing, capability, driver, kernels, size, text as texts,
};
use host::HostFacts;
