//! The messages. In CBOR each is a map with text keys; what a reader does not know it skips.
//!
//! A choice is a map of which exactly one known key is there: `{"id": 7, "fetch": {…}}`. A request
//! with no known key is answered with `unsupported`, an event with none is skipped.

mod event;
mod greeting;
mod reply;
mod request;

pub use event::*;
pub use greeting::*;
pub use reply::*;
pub use request::*;
