//! Counters of a tier's work and of its pages.

use crate::GrowthState;

/// Counters of a tier since it was created or attached, and the states of its pages now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// The pages of the tier.
    pub pages: u64,
    /// The bytes of a page.
    pub page_bytes: u64,
    /// The pages whose memory is there: fewer than `pages` while a tier grows in the background, or if its growth was
    /// stopped. All other numbers of pages count these alone.
    pub usable: u64,
    /// Whether the tier grows.
    pub growth: GrowthState,
    /// The pages that are free.
    pub free: u64,
    /// The pages that stores are writing.
    pub writing: u64,
    /// The pages with contents that can be loaded.
    pub ready: u64,
    /// Those of the ready pages that loads and copies have pinned.
    pub pinned: u64,
    /// The keys that [`lookup`](crate::Tier::lookup) found.
    pub hits: u64,
    /// The keys that it did not find, or that came after one.
    pub misses: u64,
    /// The pages that became ready by a commit.
    pub stores: u64,
    /// The ready pages that made room for others.
    pub evictions: u64,
    /// The ready pages that were found to have other bytes than were committed ([`Verify`](crate::Verify)).
    pub damaged: u64,
    /// The bytes of jobs from pages to GPUs that have ended without an error.
    pub loaded_bytes: u64,
    /// The bytes of jobs from GPUs to pages that have ended without an error.
    pub stored_bytes: u64,
}
