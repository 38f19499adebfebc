//! egmem's doctor for programs: trials in child processes, and the report as text.
//!
//! The report itself and the trials are in [`egmem_core::doctor`]. [`Children`] runs each batch of trials in a child
//! process, which calls [`answer_trials`], so that a driver that crashes or hangs ends only the child. [`to_text`]
//! formats a report as `egmem doctor` shows it.
//!
//! Programs depend on the crate `egmem`, which re-exports these items.
#![deny(missing_docs)]

mod child;
mod children;
mod host;
mod probe;
mod ranges;
mod text;

pub use children::Children;
pub use probe::answer_trials;
pub use text::to_text;

use egmem_core::doctor::{Answer, Prober, Reason, Report};
use egmem_core::{
    Driver, Error, Result, backing, capability, driver, host as facts, size, text as texts,
};
