//! egmem's ledger over processes: whose memory it is, as tables and drawings.
//!
//! The entries themselves are made in [`egmem_core::ledger`], with the values that own memory. This crate sums them up,
//! offers them to other processes of the same user, and asks those for theirs.
//!
//! Programs depend on the crate `egmem`, which re-exports the items that they need.
#![deny(missing_docs)]

mod ask;
mod holders;
mod ledger;
mod offer;
mod parts;
mod procs;
mod report;
mod report_text;
mod svg;
#[cfg(test)]
mod tests;
mod text;

pub use ask::{Silent, processes};
pub use holders::{Holder, Holders, MAX_HOLDERS, NvmlGpu, NvmlProcess, OnGpu, Why};
pub use ledger::{Ledger, Process, Total};
pub use offer::{LEAKS, MAX_TEXT, Offer, PS, offer, report_leaks_at_exit};
pub use parts::{Cause, NodeUse, Part};
pub use report::{Exporter, GpuUse, Importer, Kept, Report};

use egmem_core::ledger as entries;
use egmem_core::{
    Error as MemoryError, Result as MemoryResult, driver, fork, size, svg as drawing, table,
    text as texts, topology, vmm,
};
use egmem_share::{Error, Result};
