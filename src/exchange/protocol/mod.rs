//! The messages between client and server: docs/protocol.md is their specification.

mod at_most;
mod codec;
mod message;
mod name;
mod sanitize;
mod secret;
#[cfg(test)]
mod tests;

pub use codec::{decode, encode};
pub use message::*;
pub use name::{check_name, check_prefix};
pub use secret::{MAX_SECRET, Secret, Wiped};

pub use crate::texts::{Iter as TextsIter, Texts};
