//! The messages between client and server: docs/protocol.md is their specification.

mod codec;
mod message;
#[cfg(test)]
mod tests;

pub use codec::{MAX_NAME, MAX_SECRET, Secret, check_name, check_prefix, decode, encode};
pub use message::*;
