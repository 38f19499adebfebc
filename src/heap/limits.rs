//! The soft limit: whoever wants the heap to stay small is asked before it grows.

use std::sync::Arc;

/// Why a heap's user is asked for [relief](Relief).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pressure {
    /// Bytes of the allocation that has no place.
    pub requested: u64,
    /// Bytes of memory that the heap has.
    pub backed: u64,
    /// The soft limit in bytes.
    pub soft_limit: u64,
    /// How often this allocation has asked before.
    pub asked: u32,
}

/// What is to become of an allocation for which the heap would grow beyond its soft limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relief {
    /// Blocks were freed: try once more, and ask again if that is in vain. Nothing ends this but another
    /// answer: one that is always `Retry` lets the allocation spin without end, so say it only where
    /// something was freed, or look at [`Pressure::asked`].
    Retry,
    /// Grow beyond the soft limit.
    Grow,
    /// Fail with [`Error::HeapFull`](crate::Error::HeapFull).
    Refuse,
}

/// A heap's soft limit and whom to ask.
#[derive(Clone)]
pub(super) struct SoftLimit {
    pub(super) bytes: u64,
    pub(super) relieve: Arc<dyn Fn(&Pressure) -> Relief + Send + Sync>,
}
