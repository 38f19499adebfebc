//! Memory exchanged by name, within a node and between nodes.

mod address;
pub mod group;
mod limits;
mod peer;
pub mod protocol;

pub use address::Address;
pub use limits::Limits;
pub use peer::{MAX_PATTERNS, PeerName, Who};
