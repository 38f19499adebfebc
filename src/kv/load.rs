//! Pages that are pinned.

use std::fmt;
use std::mem::take;
use std::sync::Arc;

use crate::Result;
use crate::held::Use;
use crate::inner::Inner;
use crate::memory::CpuView;
use crate::page::PageId;
use crate::store::{page, pairs};

/// Ready pages that are pinned: none is evicted while this lives. Dropping it releases them.
///
/// A copy that was started keeps its pages by itself, so a load may be dropped while its jobs run.
#[must_use = "dropped, its pages may be evicted"]
pub struct Load {
    tier: Arc<Inner>,
    pub(crate) pages: Vec<PageId>,
}

impl Load {
    pub(crate) const fn empty(tier: Arc<Inner>) -> Self {
        let pages = Vec::new();
        Self { tier, pages }
    }

    /// Returns the page of each key, in the order asked for.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Pairs the pages with blocks of a GPU's cache, one for each page, for [`Tier::load`](crate::Tier::load).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for another number of blocks.
    pub fn pairs(&self, blocks: &[u64]) -> Result<Vec<(PageId, u64)>> {
        pairs(&self.pages, blocks)
    }

    /// Returns the CPU's view of page `index` of [`pages`](Self::pages). Others may read the page at the same time, so
    /// write to it only if no other load has it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no such page, and in a forked child; those of the memory's view.
    pub fn view(&self, index: usize) -> Result<CpuView<'_>> {
        self.tier.page_view(page(&self.pages, index)?)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.tier.end(take(&mut self.pages), Use::Load);
    }
}

impl fmt::Debug for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load")
            .field("pages", &self.pages)
            .finish_non_exhaustive()
    }
}
