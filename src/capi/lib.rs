//! egmem for C and C++. The header `include/egmem.h` has the documentation of each function for C programs; docs/c.md
//! is the guide.
//!
//! Each function checks its arguments, does one thing through the crate `egmem`, and returns an [`egm_status`]. A
//! panic does not leave the library: it becomes [`EGM_INTERNAL`](egm_status::EGM_INTERNAL).
//!
//! Rust programs use the crate `egmem` instead.
#![deny(missing_docs)]
#![allow(
    non_camel_case_types,
    reason = "these are the names of the C interface"
)]

mod args;
mod blocks;
mod buffer;
mod call;
mod call_site;
mod channel;
mod client;
mod driver;
mod failure;
mod group;
mod heap;
mod last_error;
mod names;
mod options;
mod pool;
mod report;
mod ring;
mod status;
mod stream;
mod text;
mod topology;
mod types;

pub use buffer::*;
pub use call_site::*;
pub use channel::*;
pub use client::*;
pub use driver::*;
pub use group::*;
pub use heap::*;
pub use last_error::*;
pub use names::*;
pub use options::*;
pub use pool::*;
pub use report::*;
pub use ring::*;
pub use status::*;
pub use stream::*;
pub use text::*;
pub use topology::*;
pub use types::*;
