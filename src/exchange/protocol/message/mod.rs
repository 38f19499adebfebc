//! The messages. In CBOR each is a map with text keys; a reader skips unknown keys.
//!
//! A choice is a map with exactly one known key: `{"id": 7, "fetch": {…}}`. A request with no known key is
//! answered with `unsupported`, an event with none is skipped.

mod event;
mod greeting;
mod reply;
mod request;

pub use event::*;
pub use greeting::*;
pub use reply::*;
pub use request::*;

/// Leaves a flag that is not set out of a message.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
const fn is_false(flag: &bool) -> bool {
    !*flag
}
