//! Finds out what works on this machine by trying it.
//!
//! An attribute says what a GPU's hardware can do. Whether memory can be allocated, shared and granted here
//! and now also depends on the driver, the container and the administrator. So a trial allocates memory in
//! the driver's smallest unit, writes and reads a word with the CPU, and frees the memory at once.

mod capabilities;
mod imex;
pub mod shareable;
mod support;
mod trial;

pub use capabilities::Capabilities;
pub use imex::{IMEX_CHANNELS, ImexChannel};
pub use support::{HANDLE_TYPES, Hint, Path, Support, Trial, hints};
