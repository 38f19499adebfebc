//! Checksums of pages.

use std::hash::Hasher;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use twox_hash::XxHash3_64;

use crate::memory::CpuView;
use crate::page::PageId;
use crate::{MemoryError, Result};

/// Of so many pages that are loaded [`Verify::Sample`] checks one.
const SAMPLE: u64 = 16;
/// The bytes that are read at a time, which stay in the CPU's first cache.
const CHUNK: usize = 16 << 10;

/// Whether a tier checks that pages to be loaded have the bytes that were committed.
///
/// The CPU computes a checksum of each page ([`Store::commit`](crate::Store::commit)), and again when the page is loaded
/// ([`Tier::prepare_load`](crate::Tier::prepare_load)). That finds bytes that a failing memory or a stray write has changed. It
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
        sums: &[Option<u64>],
        view: impl Fn(PageId) -> Result<CpuView<'a>>,
    ) -> Result<Vec<usize>> {
        let mut damaged = Vec::new();
        for (index, (&page, &committed)) in pages.iter().zip(sums).enumerate() {
            if let Some(committed) = committed
                && self.takes_next()
                && sum(&view(page)?)? != committed
            {
                damaged.push(index);
            }
        }
        Ok(damaged)
    }
}

/// Returns the XXH3 of a page, with 1 in place of 0: 0 stands for no checksum.
///
/// # Errors
/// Those of the view.
pub(crate) fn sum(page: &CpuView<'_>) -> Result<u64, MemoryError> {
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
}
