//! egmem for C and C++. The header `include/egmem.h` has the documentation of each function for C programs; docs/c.md
//! is the guide.
//!
//! Each function checks its arguments, does one thing through the crate `egmem`, and returns an [`egm_status`]. A
//! panic does not leave the library: it becomes [`EGM_INTERNAL`](egm_status::EGM_INTERNAL).
//!
//! Handles and places for results are nullable references, `Option<&T>`: C programs pass pointers that are null or as each
//! function's contract says. So bodies need unsafe code only for texts, arrays, options, blocks, and the places of several
//! results, which a program may confuse: those are pointers.
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
mod channel;
mod client;
mod driver;
mod failure;
mod group;
mod heap;
mod options;
mod ring;
mod stream;

pub use args::*;
pub use buffer::*;
pub use call::*;
pub use channel::*;
pub use client::*;
pub use driver::*;
pub use failure::*;
pub use group::*;
pub use heap::*;
pub use options::*;
pub use ring::*;
pub use stream::*;
