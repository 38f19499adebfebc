//! Exit statuses that several commands have.

/// Success.
pub const DONE: u8 = 0;
/// Any failure without a status of its own.
pub const FAILED: u8 = 1;
/// Wrong usage.
pub const WRONG_USAGE: u8 = 2;
/// A peer had not released memory at the deadline.
pub const STILL_HELD: u8 = 3;
