//! The state that a tier's handles, its stores, loads and jobs share; checksums of pages.

use std::fmt;
use std::hash::Hasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egmem_core::GrowingBuffer;
use egmem_core::per_driver::lock;
use twox_hash::XxHash3_64;

use crate::copy::{CopyMethod, Kernels};
use crate::driver::Code;
use crate::events::Hub;
use crate::geometry::Geometry;
use crate::gpu::Borders;
use crate::header::{DIRTY, Lock, PATIENCE};
use crate::members::Own;
use crate::memory::{CpuMemory, CpuView, GrantUse, Memory, in_threads};
use crate::page::PageId;
use crate::table::{End, Found, Private, Table, Use};
use crate::words::Words;
use crate::{Driver, Error, MemoryError, Result, Stats};

/// The looks at the lock for a report, a millisecond apart.
const GLANCES: u32 = 50;

/// Memory that a tier can lie in: of this library, with a view of the CPU, usable from every thread. A
/// [`Buffer`](egmem_core::Buffer), or memory that `egmem serve` keeps (`exchange::RemoteBuffer`).
pub trait TierMemory: Memory + CpuMemory + Send + Sync {}

impl<M: Memory + CpuMemory + Send + Sync + ?Sized> TierMemory for M {}

/// A tier's memory and its table. It lives as long as a handle, a store, a load or a job does.
pub(crate) struct Inner {
    /// Taken before the lock in the memory, by one thread of this process at a time.
    pub(crate) own: Mutex<Private>,
    pub(crate) member: Own,
    pub(crate) geometry: Geometry,
    pub(crate) memory: Arc<dyn TierMemory>,
    /// The memory, if it grows in the background.
    pub(crate) growing: Option<Arc<GrowingBuffer>>,
    pub(crate) kernels: Kernels,
    /// The driver is known to have no batches of copies.
    pub(crate) no_batches: AtomicBool,
    /// Where the memory continues in another allocation, if that is known. No copy goes over such a border: a batch
    /// was not tried there.
    pub(crate) borders: Borders,
    /// The method of copies that name none.
    pub(crate) method: CopyMethod,
    pub(crate) verify: Verify,
    /// The pages that [`Verify::Sample`] could have checked so far.
    pub(crate) loaded: AtomicU64,
    pub(crate) events: Arc<Hub>,
    /// The contents found in memory that other processes can reach.
    pub(crate) found: Found,
    /// Access of GPUs to the memory is not revoked while this lives.
    pub(crate) _grants: Option<GrantUse>,
}

impl Inner {
    /// Returns at which offsets the memory continues in another allocation, if that is known: copies end there.
    pub(crate) fn borders(&self) -> Option<Arc<[u64]>> {
        self.borders.of(&*self.memory, self.bytes())
    }

    /// Returns the bytes of the tier that are there. They contain each page that was given out.
    pub(crate) fn bytes(&self) -> u64 {
        self.geometry.total.min(self.memory.len())
    }

    /// Returns the number below which pages have memory.
    pub(crate) fn usable(&self) -> u32 {
        match &self.growing {
            Some(memory) => self.geometry.pages_within(memory.progress().done),
            None => self.geometry.pages,
        }
    }

    pub(crate) fn driver(&self) -> &Driver {
        self.memory.driver()
    }

    /// Remembers whether a batch failed because the driver has none.
    pub(crate) fn note_batch_error(&self, error: &MemoryError) {
        use MemoryError::{DriverTooOld, MissingSymbol};
        let is_too_old = matches!(error, DriverTooOld { .. } | MissingSymbol { .. });
        if is_too_old || error.code() == Some(Code::NOT_SUPPORTED) {
            self.no_batches.store(true, Relaxed);
        }
    }

    /// Fails in a forked child, where the lock may be held for ever and the pages are the parent's.
    pub(crate) fn expect_this_process(&self) -> Result<()> {
        Ok(self.driver().expect_this_process("tier")?)
    }

    /// Returns the words of the tier's memory.
    ///
    /// # Errors
    /// Those of the memory's view; [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child.
    #[inline(always)]
    pub(crate) fn words(&self) -> Result<Words<'_>> {
        self.expect_this_process()?;
        Words::new(&self.memory.cpu()?)
    }

    /// Changes the table, or reads it, under the lock. No other process sees a part of the change.
    ///
    /// # Errors
    /// [`Error::Busy`]; [`Error::Damaged`]; those of the memory's view; [`InvalidArgument`](crate::MemoryError::InvalidArgument)
    /// in a forked child, and if another process has taken the tier over.
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut Table<'_>) -> T) -> Result<T> {
        let words = self.words()?;
        // Dropped without the locks: a value that has pages gives them back if the call fails.
        let result;
        let mut own = lock(&self.own);
        let _lock = Lock::acquire(&words, self.member, PATIENCE, false)?;
        let mut table = Table::new(&words, &self.geometry, self.member, &mut own);
        table.begin(self.usable())?;
        result = change(&mut table);
        table.expect_undamaged()?;
        Ok(result)
    }

    /// As [`with`](Self::with), without a wait or a repair. `None` if it needs one, and in a forked child: `change` may have
    /// been called then, in a table that is repaired next.
    pub(crate) fn with_now<T>(&self, change: impl FnOnce(&mut Table<'_>) -> T) -> Option<T> {
        let words = self.words().ok()?;
        let mut own = self.own.try_lock().ok()?;
        let _lock = Lock::try_acquire(&words, self.member)?;
        let mut table = Table::new(&words, &self.geometry, self.member, &mut own);
        if table.is_dirty() {
            return None;
        }
        table.begin(self.usable()).ok()?;
        let result = change(&mut table);
        if words.take_damage() {
            words.put(DIRTY, 1);
            return None;
        }
        Some(result)
    }

    /// Returns the table's counts for a report, which must not wait long. All are 0 if another process keeps the lock, until the next call
    /// if one was killed with it, and in a forked child.
    pub(crate) fn glance(&self) -> Stats {
        for _ in 0..GLANCES {
            if let Some(stats) = self.with_now(|table| table.stats()) {
                return stats;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Stats::default()
    }

    /// Ends a use of pages. What cannot be written now is written with the next change. A forked child does nothing.
    pub(crate) fn end(&self, pages: Vec<PageId>, of: Use) {
        if pages.is_empty() {
            return;
        }
        let end = End { pages, of };
        let mut is_applied = false;
        let done = self.with(|table| {
            is_applied = true;
            table.end(&end);
        });
        if let Err(error) = done
            && self.driver().is_of_this_process()
        {
            tracing::error!(%error, "the table in a tier's memory was not written");
            if !is_applied {
                lock(&self.own).late.push(end);
            }
        }
    }

    /// Returns the CPU's view of a page.
    ///
    /// # Errors
    /// Those of [`expect_page`](Self::expect_page), and of the memory's view;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child, whose parent gives its pages to
    /// other keys.
    pub(crate) fn page_view(&self, page: PageId) -> Result<CpuView<'_>> {
        self.expect_this_process()?;
        self.expect_page(page)?;
        let view = self.memory.cpu()?;
        let bytes = self.geometry.page_bytes_of(page);
        Ok(view.slice(self.geometry.page_at(page), bytes)?)
    }

    /// # Errors
    /// [`Error::WrongState`] for a page that is not of this tier.
    pub(crate) fn expect_page(&self, page: PageId) -> Result<()> {
        let is = if !self.geometry.has(page) {
            "not of this tier"
        } else if page.number() >= self.geometry.pages_within(self.memory.len()) {
            "without memory"
        } else {
            return Ok(());
        };
        Err(Error::WrongState {
            page: page.number(),
            is,
            need: "a page of this tier",
        })
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tier")
            .field("pages", &self.geometry.pages)
            .field("page_bytes", &self.geometry.page_bytes)
            .field("memory", &self.memory.device_ptr())
            .finish_non_exhaustive()
    }
}

impl Drop for Inner {
    /// Ends the membership: no job is left, and so no copy. A forked child does not, since the tier is its parent's.
    fn drop(&mut self) {
        if !self.driver().is_of_this_process() {
            return;
        }
        let leave = || {
            let words = self.words()?;
            // One that has not joined, or was taken over, has nothing.
            words.expect_member(self.member)?;
            // The ends of uses that were not written yet.
            self.with(|_| ())?;
            words.release_member(self.member);
            Ok::<_, Error>(())
        };
        // A member that may hold pages stays until its process ends.
        let _ = leave();
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

impl Inner {
    /// Returns whether pages have checksums.
    pub(crate) fn has_sums(&self) -> bool {
        self.verify != Verify::Never
    }

    /// Returns the indices of damaged pages among some that are pinned. Pages without a checksum are not checked.
    ///
    /// # Errors
    /// Those of [`page_view`](Self::page_view).
    pub(crate) fn damaged(
        &self,
        pages: &[PageId],
        committed: &[Option<u64>],
    ) -> Result<Vec<usize>> {
        let is_next = || match self.verify {
            Verify::Never => false,
            Verify::Sample => self.loaded.fetch_add(1, Relaxed).is_multiple_of(SAMPLE),
            Verify::Always => true,
        };
        let taken = committed.iter().enumerate();
        let taken = taken.filter(|(_, sum)| sum.is_some() && is_next());
        let mut taken: Vec<usize> = taken.map(|(index, _)| index).collect();
        let mut found = sums(&taken, |index| self.page_view(pages[index]))?.into_iter();
        taken.retain(|&index| committed[index] != found.next());
        Ok(taken)
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
mod tests;

#[cfg(test)]
mod sum_tests {
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
