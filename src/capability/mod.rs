//! What works on this machine, found out by trying it.

mod imex;

pub use imex::{IMEX_CHANNELS, ImexChannel};
