//! The soft limit: a callback decides whether the heap may grow beyond it.

use std::fmt;
use std::sync::Arc;

/// The state of the heap when it asks for [relief](Relief).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pressure {
    /// Bytes of the allocation that found no room.
    pub requested: u64,
    /// Bytes of memory that the heap has.
    pub backed: u64,
    /// The soft limit in bytes.
    pub soft_limit: u64,
    /// How often this allocation has called the callback before.
    pub asked: u32,
}

/// The callback's answer when an allocation would grow the heap beyond its soft limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relief {
    /// The callback freed blocks: retry, and call it again if that fails. A callback that always answers
    /// `Retry` makes the allocation spin forever, so answer it only after freeing something, or check
    /// [`Pressure::asked`].
    Retry,
    /// Grow beyond the soft limit.
    Grow,
    /// Fail with [`Error::HeapFull`](crate::Error::HeapFull).
    Refuse,
}

/// A heap's soft limit and its callback.
#[derive(Clone, Debug)]
pub(super) struct SoftLimit {
    pub(super) bytes: u64,
    pub(super) relieve: Callback<dyn Fn(&Pressure) -> Relief + Send + Sync>,
}

/// A function of the program.
pub(crate) struct Callback<F: ?Sized>(pub(crate) Arc<F>);

impl<F: ?Sized> Clone for Callback<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F: ?Sized> fmt::Debug for Callback<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}
