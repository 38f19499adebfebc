//! The messages. In CBOR each is a map with text keys; a reader skips unknown keys. An enumeration is a map of one entry,
//! such as `{"fetch": {…}}`, or the text of a variant without fields.

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
