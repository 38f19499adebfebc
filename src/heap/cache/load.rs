//! Blocks on their way from a cache to the core.

use super::magazine::Magazine;
use crate::core::RangeId;

/// Blocks that are being returned to the core.
#[derive(Debug)]
pub(crate) enum Load {
    Small(Box<Magazine>),
    Ranges(Vec<RangeId>),
}

/// All contents of a cache.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    #[expect(clippy::vec_box, reason = "magazines are large, and boxed already")]
    pub(crate) small: Vec<Box<Magazine>>,
    pub(crate) ranges: Vec<RangeId>,
}
