//! What travels between client and server: docs/protocol.md is its specification.

mod message;
mod secret;

pub use message::*;
pub use secret::{MAX_SECRET, Secret};
