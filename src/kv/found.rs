//! The earlier contents of a tier's memory.

/// The contents that [`AttachOptions::open`](crate::AttachOptions::open) found in the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// How often the tier was attached, this time included.
    pub generation: u64,
    /// The ready pages that were kept.
    pub ready: u64,
    /// The pages that a process was writing when it ended. They are free now.
    pub unfinished: u64,
    /// The pages whose entry was damaged, or had the key of another page. They are free now.
    pub damaged: u64,
    /// Whether there was no tier, and one was created.
    pub is_new: bool,
}
