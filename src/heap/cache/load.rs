//! Blocks on their way from a cache to the core.

use super::kept::Kept;
use super::magazine::Magazine;
use super::shards::Own;
use crate::core::Extent;

/// Blocks that are being returned to the core.
pub(crate) enum Load {
    Small(Box<Magazine>),
    Ranges(Vec<Extent>),
}

/// All contents of a cache, which are out of it but counted.
pub(crate) struct Contents<'a> {
    #[expect(clippy::vec_box, reason = "magazines are large, and boxed already")]
    pub(crate) small: Vec<Box<Magazine>>,
    pub(crate) ranges: Vec<Extent>,
    pub(crate) shard: Option<&'a mut Own>,
    /// Cleared once the core has everything.
    pub(crate) kept: &'a Kept,
}
