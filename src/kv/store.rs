//! Stores and loads: pages that a caller is writing, or has pinned to read.

use std::mem::take;
use std::sync::Arc;

use crate::events::{Noted, TierEventKind};
use crate::inner::{Inner, sums};
use crate::memory::CpuView;
use crate::page::{Evicted, PageId, Reserved};
use crate::table::Use;
use crate::tier::Tier;
use crate::{Error, GrowthState, Key, MemoryError, Result};

impl Tier {
    /// Finds a page for each of `keys` that the tier does not have, and evicts the least recently used pages if there
    /// are too few: never pinned ones, and never those of `keys`.
    ///
    /// # Errors
    /// [`Error::Full`](crate::Error::Full) if too few pages can be evicted; nothing has changed then. It says whether the
    /// tier still grows. [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child.
    pub fn prepare_store(&self, keys: &[Key]) -> Result<Store> {
        let (store, noted) = self.0.with(|table| {
            let reserved = table.reserve(keys);
            let evicted = match &reserved {
                Ok(reserved) => &reserved.evicted[..],
                Err(Error::Full { evicted, .. }) => evicted,
                Err(_) => &[],
            };
            let gone = || evicted.iter().map(|evicted| evicted.key).collect();
            let noted = self.0.events.note(TierEventKind::Evicted, gone);
            let store = reserved.map(|reserved| Store::new(Arc::clone(&self.0), keys, reserved));
            (store, noted)
        })?;
        drop(noted);
        store.map_err(|mut error| {
            if let Error::Full {
                missing: 1..,
                is_growing,
                ..
            } = &mut error
            {
                // They may have come by now.
                let growth = self.0.growing.as_ref().map(|memory| memory.growth());
                *is_growing = growth != Some(GrowthState::Stopped);
            }
            error
        })
    }

    /// Pins the pages of `keys`, all of which must be ready.
    ///
    /// With [`Verify`](crate::Verify) the CPU then reads the pages that are to be checked, without the tier's lock. Keys of
    /// damaged pages are removed, and such a page becomes free with its last use.
    ///
    /// # Errors
    /// [`Error::NotReady`](crate::Error::NotReady) with the first key that is not, or whose page is damaged; nothing is
    /// pinned then. [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child. Those of the memory's view.
    pub fn prepare_load(&self, keys: &[Key]) -> Result<Load> {
        let is_checked = self.0.has_sums();
        let mut load = Load {
            tier: Arc::clone(&self.0),
            pages: Vec::new(),
        };
        let sums = self.0.with(|table| {
            load.pages = table.pin(keys)?;
            let checked = load.pages.iter().filter(|_| is_checked);
            Ok(checked.map(|&page| table.sum(page)).collect::<Vec<_>>())
        })?;
        let not_ready = |index: usize| Error::NotReady {
            key: keys[index],
            index,
        };
        let sums = sums.map_err(not_ready)?;
        let damaged = self.0.damaged(load.pages(), &sums)?;
        let Some(&index) = damaged.first() else {
            return Ok(load);
        };
        let noted = self.discard_damaged(keys, load.pages(), &damaged)?;
        drop(load);
        drop(noted);
        Err(not_ready(index))
    }

    /// Takes the keys of some of `pages`, which loads have pinned, out of the table.
    fn discard_damaged(&self, keys: &[Key], pages: &[PageId], damaged: &[usize]) -> Result<Noted> {
        self.0.with(|table| {
            let discard = |&index: &usize| table.discard_damaged(pages[index]).then(|| keys[index]);
            let keys = damaged.iter().filter_map(discard).collect();
            self.0.events.note(TierEventKind::Damaged, || keys)
        })
    }
}

/// Pages for keys that the tier does not have yet. Copy the contents to them, wait, and [`commit`](Self::commit).
///
/// Dropped before that, the pages become free. A page into which a copy still runs becomes free when the copy has ended.
#[derive(Debug)]
#[must_use = "dropped, its pages become free again"]
pub struct Store {
    tier: Arc<Inner>,
    keys: Vec<Key>,
    indices: Vec<usize>,
    pages: Vec<PageId>,
    evicted: Vec<Evicted>,
    is_committed: bool,
}

impl Store {
    pub(crate) fn new(tier: Arc<Inner>, asked: &[Key], reserved: Reserved) -> Self {
        let (indices, pages): (Vec<_>, Vec<_>) = reserved.placed.into_iter().unzip();
        Self {
            tier,
            keys: indices.iter().map(|&index: &usize| asked[index]).collect(),
            indices,
            pages,
            evicted: reserved.evicted,
            is_committed: false,
        }
    }

    /// Returns the keys that the tier did not have, in the order asked for. Keys that are ready or that another store is
    /// writing are not among them.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Returns the places of [`keys`](Self::keys) in the list that was asked for.
    pub fn indices(&self) -> &[usize] {
        &self.indices
    }

    /// Returns the page of each of [`keys`](Self::keys).
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Returns the keys that made room, which the tier has no longer.
    pub fn evicted(&self) -> &[Evicted] {
        &self.evicted
    }

    /// Returns whether there is nothing to store.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Returns whether [`commit`](Self::commit) has made the pages ready.
    pub fn is_committed(&self) -> bool {
        self.is_committed
    }

    /// Pairs the pages with blocks of a GPU's cache, one for each of [`keys`](Self::keys), for
    /// [`Tier::store`](crate::Tier::store).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for another number of blocks.
    pub fn pairs(&self, blocks: &[u64]) -> Result<Vec<(PageId, u64)>> {
        pairs(&self.pages, blocks)
    }

    /// Returns the CPU's view of the page of key `index` of [`keys`](Self::keys), to write it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no such key, after the commit, and in a forked child;
    /// those of the memory's view.
    pub fn view(&self, index: usize) -> Result<CpuView<'_>> {
        if self.is_committed {
            let why = "it was committed, and others may read its pages";
            return Err(MemoryError::invalid("store", why).into());
        }
        self.tier.page_view(page(&self.pages, index)?)
    }

    /// Makes the pages ready: [`lookup`](crate::Tier::lookup) finds them from now on. A second call does nothing.
    ///
    /// With [`Verify`](crate::Verify) the CPU reads all pages before, without the tier's lock.
    ///
    /// # Errors
    /// [`Error::StillCopying`](crate::Error::StillCopying) if a copy into one of the pages has not been waited for; the
    /// pages stay the store's then. [`Error::CopyFailed`](crate::Error::CopyFailed) if one failed, or was refused. [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child. Those of
    /// the memory's view.
    pub fn commit(&mut self) -> Result<()> {
        if self.is_committed {
            return Ok(());
        }
        let mut found = Vec::new();
        if self.tier.has_sums() {
            self.tier
                .with(|table| table.expect_written(&self.pages))??;
            found = sums(&self.pages, |page| self.tier.page_view(page))?;
        }
        let noted = self.tier.with(|table| {
            for (&page, sum) in self.pages.iter().zip(found) {
                table.set_sum(page, sum);
            }
            table.commit(&self.pages)?;
            let keys = || self.keys.clone();
            Ok::<_, Error>(self.tier.events.note(TierEventKind::Stored, keys))
        })??;
        self.is_committed = true;
        drop(noted);
        Ok(())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if !self.is_committed {
            self.tier.end(take(&mut self.pages), Use::Store);
        }
    }
}

/// Pairs pages with as many blocks.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for another number of blocks.
fn pairs(pages: &[PageId], blocks: &[u64]) -> Result<Vec<(PageId, u64)>> {
    if pages.len() != blocks.len() {
        let why = format!("{} blocks for {} pages", blocks.len(), pages.len());
        return Err(MemoryError::invalid("blocks", why).into());
    }
    Ok(pages.iter().copied().zip(blocks.iter().copied()).collect())
}

/// Returns page `index` of a list.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument).
fn page(pages: &[PageId], index: usize) -> Result<PageId> {
    let none = || MemoryError::invalid_index("page", index as u64, pages.len() as u64);
    pages.get(index).copied().ok_or_else(|| none().into())
}

/// Ready pages that are pinned: none is evicted while this lives. Dropping it releases them.
///
/// A copy that was started keeps its pages by itself, so a load may be dropped while its jobs run.
#[derive(Debug)]
#[must_use = "dropped, its pages may be evicted"]
pub struct Load {
    tier: Arc<Inner>,
    pages: Vec<PageId>,
}

impl Load {
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
