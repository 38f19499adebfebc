//! The processes that have a tier.

/// An open tier on one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// The process, by its number in its own PID namespace.
    pub pid: u32,
    /// Whether it is this open tier.
    pub is_self: bool,
}
