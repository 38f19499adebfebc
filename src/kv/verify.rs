//! Checksums of pages.

use std::hash::Hasher;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use twox_hash::XxHash3_64;

use crate::memory::{CpuView, in_threads};
use crate::page::PageId;
use crate::{Error, MemoryError, Result};

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
