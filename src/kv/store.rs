//! Stores and loads: pages that a caller is writing, or has pinned to read; and checksums of pages.

use std::hash::Hasher;
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use twox_hash::XxHash3_64;

use crate::events::TierEventKind;
use crate::inner::Inner;
use crate::lock::Use;
use crate::memory::{CpuView, in_threads};
use crate::page::{Evicted, PageId, Reserved};
use crate::{Error, Key, MemoryError, Result};

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
            return Err(committed().into());
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
        let sums = self.sums()?;
        let noted = self.tier.with(|table| {
            for (&page, sum) in self.pages.iter().zip(sums) {
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

    /// Returns the checksums of the pages; none if they have none.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    fn sums(&self) -> Result<Vec<u64>> {
        if !self.tier.checks.is_on() {
            return Ok(Vec::new());
        }
        self.tier
            .with(|table| table.expect_written(&self.pages))??;
        sums(&self.pages, |page| self.tier.page_view(page))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if !self.is_committed {
            self.tier.end(take(&mut self.pages), Use::Store);
        }
    }
}

fn committed() -> MemoryError {
    MemoryError::invalid("store", "it was committed, and others may read its pages")
}

/// Pairs pages with as many blocks.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for another number of blocks.
pub(crate) fn pairs(pages: &[PageId], blocks: &[u64]) -> Result<Vec<(PageId, u64)>> {
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
pub(crate) fn page(pages: &[PageId], index: usize) -> Result<PageId> {
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

/// Of so many pages that are loaded [`Verify::Sample`] checks one.
const SAMPLE: u64 = 16;
/// The bytes that are read at a time, which stay in the CPU's first cache.
const CHUNK: usize = 16 << 10;
/// So many threads read about as fast as a GPU copies over PCIe 5.
const MOST_THREADS: usize = 8;

/// Whether a tier checks that pages to be loaded have the bytes that were committed.
///
/// The CPU computes a checksum of each page ([`Store::commit`](crate::Store::commit)), and again when the page is loaded
/// ([`Tier::prepare_load`](crate::Tier::prepare_load)). Up to 8 threads share 16 MiB or more; they start and end within the call. That finds bytes that a failing memory or a stray write has changed. It
/// is no protection against a program that means to change them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verify {
    /// No checksum is computed.
    #[default]
    Never,
    /// Each commit computes checksums, and one in 16 pages that are loaded is checked.
    Sample,
    /// Each commit computes checksums, and each page that is loaded is checked.
    Always,
}

/// What a tier checks.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    verify: Verify,
    /// The pages that could have been checked so far.
    loaded: AtomicU64,
}

impl Checks {
    pub(crate) fn new(verify: Verify) -> Self {
        let loaded = AtomicU64::new(0);
        Self { verify, loaded }
    }

    /// Returns whether pages have checksums.
    pub(crate) fn is_on(&self) -> bool {
        self.verify != Verify::Never
    }

    /// Returns whether to check the next page.
    fn takes_next(&self) -> bool {
        match self.verify {
            Verify::Never => false,
            Verify::Sample => self.loaded.fetch_add(1, Relaxed).is_multiple_of(SAMPLE),
            Verify::Always => true,
        }
    }

    /// Returns the indices of damaged pages among some that are pinned. Pages without a checksum are not checked.
    ///
    /// # Errors
    /// Those of `view`.
    pub(crate) fn damaged<'a>(
        &self,
        pages: &[PageId],
        committed: &[Option<u64>],
        view: impl Fn(PageId) -> Result<CpuView<'a>> + Sync,
    ) -> Result<Vec<usize>> {
        let taken = committed.iter().enumerate();
        let taken = taken.filter(|(_, sum)| sum.is_some() && self.takes_next());
        let taken: Vec<usize> = taken.map(|(index, _)| index).collect();
        let found = sums(&taken, |index| view(pages[index]))?;
        let found = taken.into_iter().zip(found);
        let damaged = found.filter(|&(index, sum)| committed[index] != Some(sum));
        Ok(damaged.map(|(index, _)| index).collect())
    }
}

/// Returns the checksum of each page.
///
/// # Errors
/// Those of `view`.
pub(crate) fn sums<'a, P: Copy + Sync>(
    pages: &[P],
    view: impl Fn(P) -> Result<CpuView<'a>> + Sync,
) -> Result<Vec<u64>> {
    let mut sums = vec![0; pages.len()];
    let Some(&first) = pages.first() else {
        return Ok(sums);
    };
    let bytes = view(first)?.len().saturating_mul(pages.len() as u64);
    let pairs = pages.iter().zip(&mut sums);
    in_threads((bytes, MOST_THREADS), pairs, |(&page, found)| {
        *found = sum(&view(page)?)?;
        Ok::<_, Error>(())
    })?;
    Ok(sums)
}

/// Returns the XXH3 of a page, with 1 in place of 0: 0 stands for no checksum.
///
/// # Errors
/// Those of the view.
fn sum(page: &CpuView<'_>) -> Result<u64, MemoryError> {
    let mut hash = XxHash3_64::with_seed(0);
    let mut chunk = [0_u8; CHUNK];
    for at in (0..page.len()).step_by(CHUNK) {
        // At most CHUNK.
        let chunk = &mut chunk[..(page.len() - at).min(CHUNK as u64) as usize];
        // A copy: others may write the page meanwhile.
        page.read_at(at, chunk)?;
        hash.write(chunk);
    }
    Ok(hash.finish().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Buffer, Driver};
    use egmem_core::Machine;

    #[test]
    fn a_checksum_is_of_all_bytes_in_their_order() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let memory = Buffer::near(&driver, 0, 1 << 20).unwrap();
        let bytes: Vec<u8> = (0..50_000_u32).map(|n| ((n * n) >> 7) as u8).collect();
        memory.write_at(8, &bytes).unwrap();
        for len in [1, 333, CHUNK, CHUNK + 1, 3 * CHUNK, 50_000] {
            let found = sum(&memory.cpu().unwrap().slice(8, len as u64).unwrap());
            assert_eq!(found, Ok(XxHash3_64::oneshot(&bytes[..len])), "{len}");
        }
    }

    #[test]
    fn several_threads_return_the_sums_in_the_order_of_the_pages() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let memory = Buffer::near(&driver, 0, 34 << 20).unwrap();
        let page = |index: u64| Ok(memory.cpu()?.slice(index << 20, 1 << 20)?);
        for index in 0..34_u64 {
            page(index).unwrap().fill(0, 1 << 20, index as u8).unwrap();
        }
        for count in [0, 1, 8, 17, 34] {
            let pages: Vec<u64> = (0..count).rev().collect();
            let alone = pages
                .iter()
                .map(|&index| sum(&page(index).unwrap()).unwrap());
            assert_eq!(sums(&pages, page), Ok(alone.collect()), "{count}");
        }
        let beyond = [0, 33, 34];
        assert!(sums(&beyond, page).is_err());
    }
}
