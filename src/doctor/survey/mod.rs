//! A survey of a machine: what the doctor finds, and what proofs and measurements find, without anything that identifies the
//! machine, its users or its processes.
//!
//! `egmem report` shows it. It is made to be posted in a public issue.

mod gather;
mod page;
mod private;
mod rows;

pub use gather::{Survey, VERSION};
pub use rows::{Fabric, Figure, Part, Pinned, Placed, Problem, Section, Taken};
