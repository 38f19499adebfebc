//! The messages between client and server: docs/protocol.md is their specification.

mod at_most;
mod choice;
mod codec;
mod message;
mod name;
mod oneof;
mod payload;
mod sanitize;
mod scan;
mod secret;
#[cfg(test)]
mod tests;
mod wiped;

pub use codec::{decode, encode};
pub use message::*;
pub use name::{check_name, check_prefix};
pub use payload::{MAX_GATHER, MAX_GATHER_TOTAL, Payload};
pub use secret::{MAX_SECRET, Secret};

pub use crate::texts::{Iter as TextsIter, Texts};
