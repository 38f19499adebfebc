//! The state that a tier's handles, its stores, loads and jobs share.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, Ordering::Relaxed};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use egmem_core::GrowingBuffer;
use egmem_core::per_driver::lock;

use crate::copy::{CopyMethod, Kernels};
use crate::driver::{Access, Code, DevicePtr, Location};
use crate::events::Hub;
use crate::geometry::Geometry;
use crate::gpu::Borders;
use crate::header::DIRTY;
use crate::lock::{End, Held, Lock, OwnState, Patience, Use};
use crate::members::{Members, Own};
use crate::memory::{CpuMemory, CpuView, GrantUse, Memory, is_of_one_kind};
use crate::page::PageId;
use crate::table::{Found, Table};
use crate::verify::{Checks, Verify};
use crate::words::Words;
use crate::{Driver, Error, Member, MemoryError, Result, Stats, header};

/// The time for which a call waits for a process that holds the lock and does not go on.
pub(crate) const PATIENCE: Patience = Patience {
    time: Duration::from_millis(if cfg!(test) { 50 } else { 5000 }),
    is_for_steps: true,
};

/// The same time, for a report.
const GLANCE: Patience = Patience {
    time: Duration::from_millis(50),
    is_for_steps: false,
};

/// Memory that a tier can lie in: of this library, with a view of the CPU, usable from every thread. A
/// [`Buffer`](egmem_core::Buffer), or memory that `egmem serve` keeps (`exchange::RemoteBuffer`).
pub trait TierMemory: Memory + CpuMemory + Send + Sync {}

impl<M: Memory + CpuMemory + Send + Sync + ?Sized> TierMemory for M {}

/// A tier's memory and its table. It lives as long as a handle, a store, a load or a job does.
pub(crate) struct Inner {
    /// Taken before the lock in the memory, by one thread of this process at a time.
    own: Mutex<OwnState>,
    member: Own,
    pub(crate) geometry: Geometry,
    pub(crate) memory: Arc<dyn TierMemory>,
    /// The memory, if it grows in the background.
    pub(crate) growing: Option<Arc<GrowingBuffer>>,
    /// The bytes of that memory that are there.
    grown: Option<Arc<AtomicU64>>,
    pub(crate) kernels: Kernels,
    no_batches: AtomicBool,
    /// Where the memory continues in another allocation, if that is known. No copy goes over such a border: a batch
    /// was not tried there.
    borders: Borders,
    /// The method of copies that name none.
    pub(crate) method: CopyMethod,
    pub(crate) checks: Checks,
    pub(crate) events: Arc<Hub>,
    /// The contents found in memory that other processes can reach.
    pub(crate) found: Found,
    /// Access of GPUs to the memory is not revoked while this lives.
    _grants: Option<GrantUse>,
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
    fn usable(&self) -> u32 {
        match &self.grown {
            Some(grown) => self.geometry.pages_within(grown.load(Ordering::Acquire)),
            None => self.geometry.pages,
        }
    }

    pub(crate) fn driver(&self) -> &Driver {
        self.memory.driver()
    }

    /// Returns whether the driver is known to have no batches of copies.
    pub(crate) fn has_no_batches(&self) -> bool {
        self.no_batches.load(Relaxed)
    }

    /// Remembers whether a batch failed because the driver has none.
    pub(crate) fn note_batch_error(&self, error: &Error) {
        let Some(error) = error.memory() else { return };
        let is_too_old = matches!(
            error,
            MemoryError::DriverTooOld { .. } | MemoryError::MissingSymbol { .. }
        );
        if is_too_old || error.code() == Some(Code::NOT_SUPPORTED) {
            self.no_batches.store(true, Relaxed);
        }
    }

    /// Fails in a forked child, where the lock may be held for ever and the pages are the parent's.
    pub(crate) fn expect_this_process(&self) -> Result<()> {
        Ok(self.driver().expect_this_process("tier")?)
    }

    /// Changes the table, or reads it, under the lock. No other process sees a part of the change.
    ///
    /// # Errors
    /// [`Error::Busy`]; [`Error::Damaged`]; those of the memory's view; [`InvalidArgument`](crate::MemoryError::InvalidArgument)
    /// in a forked child, and if another process has taken the tier over.
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut Table<'_>) -> T) -> Result<T> {
        self.expect_this_process()?;
        let view = self.memory.cpu()?;
        let words = Words::new(&view)?;
        // Dropped without the locks: a value that has pages gives them back if the call fails.
        let result;
        let mut held = self.hold(&words, PATIENCE)?;
        let (mut table, late) = held.table();
        table.repair_if_dirty()?;
        table.grow_to(self.usable());
        late.drain(..).for_each(|end| end.apply(&mut table));
        result = change(&mut table);
        table.expect_undamaged()?;
        Ok(result)
    }

    /// As [`with`](Self::with), if that waits for nobody and repairs nothing: `None` otherwise, and `change` may have been called only in a
    /// table that is repaired next.
    pub(crate) fn with_now<T>(&self, change: impl FnOnce(&mut Table<'_>) -> T) -> Option<T> {
        self.expect_this_process().ok()?;
        let view = self.memory.cpu().ok()?;
        let words = Words::new(&view).ok()?;
        let own = self.own.try_lock().ok()?;
        let held = Lock::try_acquire(&words, self.member)?;
        let mut held = Held::new(own, held, &words, (&self.geometry, self.member)).ok()?;
        let (mut table, late) = held.table();
        if table.is_dirty() {
            return None;
        }
        table.grow_to(self.usable());
        late.drain(..).for_each(|end| end.apply(&mut table));
        let result = change(&mut table);
        if words.take_damage() {
            words.put(DIRTY, 1);
            return None;
        }
        Some(result)
    }

    /// Returns the table's counts for a report, which must not wait long. All are 0 if another process keeps the lock, and in a
    /// forked child.
    pub(crate) fn glance(&self) -> Stats {
        let look = || {
            self.expect_this_process()?;
            if matches!(self.own.try_lock(), Err(TryLockError::WouldBlock)) {
                return Ok::<_, Error>(Stats::default());
            }
            let view = self.memory.cpu()?;
            Ok(self.hold(&Words::new(&view)?, GLANCE)?.table().0.stats())
        };
        look().unwrap_or_default()
    }

    // As `Held::new`.
    #[inline(always)]
    fn hold<'a>(&'a self, words: &'a Words<'a>, patience: Patience) -> Result<Held<'a>> {
        let own = lock(&self.own);
        let held = Lock::acquire(words, self.member, patience)?;
        Held::new(own, held, words, (&self.geometry, self.member))
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
            end.apply(table);
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

    /// Returns the members that have the tier. None in a forked child.
    pub(crate) fn members(&self) -> Vec<Member> {
        let list = || {
            self.expect_this_process()?;
            let view = self.memory.cpu()?;
            Ok::<_, Error>(Members::of(&Words::new(&view)?).list(self.member))
        };
        list().unwrap_or_default()
    }

    /// Returns the address of a page.
    ///
    /// # Errors
    /// [`Error::WrongState`] for a page that is not of this tier.
    pub(crate) fn page_ptr(&self, page: PageId) -> Result<DevicePtr> {
        self.expect_page(page)?;
        Ok(self.memory.device_ptr().add(self.geometry.page_at(page)))
    }

    /// Returns the CPU's view of a page.
    ///
    /// # Errors
    /// As [`page_ptr`](Self::page_ptr); those of the memory's view;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child, whose parent gives its pages to
    /// other keys.
    pub(crate) fn page_view(&self, page: PageId) -> Result<CpuView<'_>> {
        self.expect_this_process()?;
        self.expect_page(page)?;
        let view = self.memory.cpu()?;
        let (at, bytes) = (
            self.geometry.page_at(page),
            self.geometry.page_bytes_of(page),
        );
        Ok(view.slice(at, bytes)?)
    }

    fn expect_page(&self, page: PageId) -> Result<()> {
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
            self.with(|table| {
                if table.holds_pages() {
                    table.sweep(self.member.bit());
                }
            })?;
            let view = self.memory.cpu()?;
            Members::of(&Words::new(&view)?).release(self.member);
            Ok::<_, Error>(())
        };
        // A member that may hold pages stays until its process ends.
        let _ = leave();
    }
}

#[cfg(test)]
mod tests;

/// A tier in formatted memory, before this process is a member of it.
pub(crate) struct Opening {
    pub(crate) memory: Arc<dyn TierMemory>,
    pub(crate) geometry: Geometry,
    /// The memory that grows in the background, with its bytes that are there.
    pub(crate) growing: Option<(Arc<GrowingBuffer>, Arc<AtomicU64>)>,
    pub(crate) method: CopyMethod,
    pub(crate) verify: Verify,
    /// Members elsewhere have ended.
    pub(crate) take_over: bool,
}

impl Opening {
    /// Becomes a member.
    ///
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the CPU may read and write the memory;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) if it is too small; those of [`Members::claim`] and
    /// [`Lock::acquire`].
    pub(crate) fn open(self) -> Result<Inner> {
        let Self {
            memory,
            geometry,
            growing,
            method,
            verify,
            take_over,
        } = self;
        let front = match growing {
            Some(_) => geometry.front(),
            None => geometry.total,
        };
        expect_room(memory.len(), front)?;
        let grants = memory.hold_grants();
        let view = memory.cpu()?;
        expect_writable(&view)?;
        view.slice(0, front)?;
        if !is_of_one_kind(&*memory, 0, front) {
            // The driver crashes the process when one copy touches both.
            let why = "it has memory of the CPU and of a GPU";
            return Err(MemoryError::invalid("memory", why).into());
        }
        let words = Words::new(&view)?;
        let member = Members::of(&words).claim(take_over)?;
        let (growing, grown) = growing.unzip();
        let mut tier = Inner {
            own: Mutex::default(),
            member,
            checks: Checks::new(verify),
            events: Hub::new(memory.driver().clone()),
            geometry,
            borders: Borders::default(),
            memory: Arc::clone(&memory),
            growing,
            grown,
            kernels: Kernels::default(),
            no_batches: AtomicBool::new(false),
            method,
            found: Found::default(),
            _grants: grants,
        };
        // If this fails, dropping the tier gives the membership up.
        let usable = tier.usable();
        let found = {
            let mut held = tier.hold(&words, PATIENCE)?;
            let (mut table, _) = held.table();
            let found = table.join(usable, take_over)?;
            table.expect_undamaged()?;
            found
        };
        tier.found = found;
        tier.found.generation = header::next_generation(&view)?;
        Ok(tier)
    }
}

/// Checks that memory of `bytes` bytes has room for the `needed` bytes of a tier.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument).
pub(crate) fn expect_room(bytes: u64, needed: u64) -> Result<()> {
    if bytes >= needed {
        return Ok(());
    }
    let why = format!("it has {bytes} bytes");
    let valid = format!("{needed} bytes or more for this tier");
    Err(MemoryError::invalid_of("memory", why, valid).into())
}

/// # Errors
/// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the CPU may write.
pub(crate) fn expect_writable(view: &CpuView<'_>) -> Result<()> {
    if view.is_writable() {
        return Ok(());
    }
    let (have, need) = (Access::Read, Access::ReadWrite);
    Err(MemoryError::not_accessible(Location::Host, have, need).into())
}
