//! The state that a tier's handles, its stores, loads and jobs share.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use crate::borders::Borders;
use crate::copy::{CopyMethod, Kernels};
use crate::driver::{Access, Code, DevicePtr, Location};
use crate::events::Hub;
use crate::found::Found;
use crate::geometry::Geometry;
use crate::memory::{CpuView, GrantUse, is_of_one_kind};
use crate::owner;
use crate::page::{Change, Direction, PageId};
use crate::persist;
use crate::table::Table;
use crate::verify::{Checks, Verify};
use crate::{Driver, Error, MemoryError, Result, TierMemory};
use egmem_core::GrowingBuffer;
use egmem_core::per_driver::lock;

/// A tier's memory and its slots. It lives as long as a handle, a store, a load or a job does.
pub(crate) struct Inner {
    /// The thread that grows the memory has it too.
    table: Arc<Mutex<Table>>,
    pub(crate) geometry: Geometry,
    pub(crate) memory: Arc<dyn TierMemory>,
    /// The memory, if it grows in the background.
    pub(crate) growing: Option<Arc<GrowingBuffer>>,
    pub(crate) kernels: Kernels,
    no_batches: AtomicBool,
    /// Where the memory continues in another allocation, if that is known. No copy goes over such a border: a batch
    /// was not tried there.
    borders: Borders,
    /// The method of copies that name none.
    pub(crate) method: CopyMethod,
    pub(crate) checks: Checks,
    pub(crate) events: Arc<Hub>,
    /// The word of the owner, in memory that other processes can reach, and the contents found there.
    owned: Option<(u64, Found)>,
    /// Access of GPUs to the memory is not revoked while this lives.
    _grants: Option<GrantUse>,
}

/// Checks that memory of `bytes` bytes has room for a tier.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument).
pub(crate) fn expect_room(bytes: u64, geometry: &Geometry) -> Result<()> {
    if bytes >= geometry.total {
        return Ok(());
    }
    let why = format!("it has {bytes} bytes");
    let valid = format!("{} bytes or more for this tier", geometry.total);
    Err(MemoryError::invalid_of("memory", why, valid).into())
}

impl Inner {
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the CPU may read and write the memory;
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) if it is too small.
    pub(crate) fn new(
        memory: Arc<dyn TierMemory>,
        geometry: Geometry,
        table: Table,
    ) -> Result<Self> {
        expect_room(memory.len(), &geometry)?;
        Self::over(
            memory,
            geometry,
            Arc::new(Mutex::new(table)),
            geometry.total,
        )
    }

    /// As [`new`](Self::new), for memory of which `front` bytes are there.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn over(
        memory: Arc<dyn TierMemory>,
        geometry: Geometry,
        table: Arc<Mutex<Table>>,
        front: u64,
    ) -> Result<Self> {
        let grants = memory.hold_grants();
        let view = memory.cpu()?;
        expect_writable(&view)?;
        view.slice(0, front)?;
        if !is_of_one_kind(&*memory, 0, front) {
            // The driver crashes the process when one copy touches both.
            let why = "it has memory of the CPU and of a GPU";
            return Err(MemoryError::invalid("memory", why).into());
        }
        Ok(Self {
            checks: Checks::default(),
            events: Hub::new(memory.driver().clone()),
            table,
            geometry,
            borders: Borders::default(),
            memory,
            growing: None,
            kernels: Kernels::default(),
            no_batches: AtomicBool::new(false),
            method: CopyMethod::Auto,
            owned: None,
            _grants: grants,
        })
    }

    /// Records that this process has claimed the memory, and the contents found there.
    pub(crate) fn owned(mut self, own: u64, found: Found) -> Self {
        self.owned = Some((own, found));
        self
    }

    /// Returns at which offsets the memory continues in another allocation, if that is known: copies end there.
    pub(crate) fn borders(&self) -> Option<Arc<[u64]>> {
        self.borders.of(&*self.memory, self.bytes())
    }

    /// Returns the bytes of the tier that are there. They contain each page that was given out.
    pub(crate) fn bytes(&self) -> u64 {
        self.geometry.total.min(self.memory.len())
    }

    /// Sets how copies are made that name no method.
    pub(crate) fn copying_by(mut self, method: CopyMethod) -> Self {
        self.method = method;
        self
    }

    /// Sets which pages have checksums, and are checked.
    pub(crate) fn verifying(mut self, verify: Verify) -> Self {
        self.checks = Checks::new(verify);
        self
    }

    pub(crate) fn found(&self) -> Option<Found> {
        self.owned.map(|(_, found)| found)
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

    /// Changes slots by `change`, and writes the changed slots to the memory's table.
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut Table) -> (T, Vec<Change>)) -> Result<T> {
        self.expect_this_process()?;
        let view = self.memory.cpu()?;
        let mut table = lock(&self.table);
        let (result, changes) = change(&mut table);
        for change in changes {
            persist::write(&view, &self.geometry, change)?;
        }
        Ok(result)
    }

    /// Changes the table as [`with`](Self::with) does, for the end of a use. The table changes even if the memory cannot
    /// be written. Until the next change of these pages, the memory then shows free pages as being written, or an older
    /// order of use.
    fn end(&self, change: impl FnOnce(&mut Table) -> Vec<Change>) -> Result<()> {
        self.expect_this_process()?;
        let view = self.memory.cpu();
        let mut table = lock(&self.table);
        let changes = change(&mut table);
        let view = view?;
        for change in changes {
            persist::write(&view, &self.geometry, change)?;
        }
        Ok(())
    }

    /// Looks at the slots, with nothing to be written.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&mut Table) -> T) -> Result<T> {
        self.expect_this_process()?;
        Ok(look(&mut lock(&self.table)))
    }

    /// Ends the use of pages by a load, or by a copy that was not submitted. A forked child does nothing.
    pub(crate) fn unpin(&self, pages: &[PageId]) {
        self.log(self.end(|table| table.unpin(pages)));
    }

    /// Ends the use of pages by a copy of some bytes, or by one that has failed. A forked child does nothing.
    pub(crate) fn end_copy(&self, pages: &[PageId], direction: Direction, bytes: Option<u64>) {
        let done = self.end(|table| {
            match (bytes, direction) {
                (Some(bytes), _) => table.count_copy(direction, bytes),
                (None, Direction::Store) => table.fail(pages),
                (None, Direction::Load) => {}
            }
            table.unpin(pages)
        });
        self.log(done);
    }

    /// Frees pages that a store has not committed. A forked child does nothing.
    pub(crate) fn abort(&self, pages: &[PageId]) {
        let done = self.end(|table| table.abort(pages));
        self.log(done);
    }

    fn log(&self, result: Result<()>) {
        if let Err(error) = result
            && self.driver().is_of_this_process()
        {
            tracing::error!(%error, "the table in a tier's memory was not written");
        }
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
        Ok(view.slice(
            self.geometry.page_at(page),
            self.geometry.page_bytes_of(page),
        )?)
    }

    fn expect_page(&self, page: PageId) -> Result<()> {
        let is = if page.number() >= self.geometry.pages {
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

impl Drop for Inner {
    /// Gives the tier up: no job is left, and so no copy. A forked child does not, since the tier is its parent's.
    fn drop(&mut self) {
        if let Some((own, _)) = self.owned
            && self.driver().is_of_this_process()
            && let Ok(view) = self.memory.cpu()
        {
            owner::release(&view, own);
        }
    }
}

/// # Errors
/// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the CPU may write.
pub(crate) fn expect_writable(view: &CpuView<'_>) -> Result<()> {
    if view.is_writable() {
        return Ok(());
    }
    let (who, have, need) = (Location::Host, Access::Read, Access::ReadWrite);
    Err(MemoryError::NotAccessible { who, have, need }.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{AccessChecks, CpuMemory, Engine, Memory};
    use crate::{Buffer, Tier};
    use egmem_core::Machine;

    /// Memory that says that its second half is of another kind.
    struct Mixed(Buffer);

    // SAFETY: the buffer answers, and the kinds allow less than it does.
    unsafe impl AccessChecks for Mixed {
        fn gpu_access(
            &self,
            gpu: i32,
            engine: Engine,
            offset: u64,
            len: u64,
        ) -> Result<Access, MemoryError> {
            self.0.gpu_access(gpu, engine, offset, len)
        }

        fn of_one_copy(&self, _offset: u64, len: u64) -> u64 {
            len / 2
        }

        fn may_be_on_host(&self, offset: u64, _len: u64) -> bool {
            offset == 0
        }
    }

    impl Memory for Mixed {
        fn driver(&self) -> &Driver {
            self.0.driver()
        }
        fn device_ptr(&self) -> DevicePtr {
            self.0.device_ptr()
        }
        fn len(&self) -> u64 {
            self.0.len()
        }
        fn location(&self) -> Location {
            self.0.location()
        }
    }

    impl CpuMemory for Mixed {
        fn cpu(&self) -> Result<CpuView<'_>, MemoryError> {
            self.0.cpu()
        }
    }

    #[test]
    fn a_tier_lies_in_memory_of_one_kind() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let buffer = Buffer::near(&driver, 0, 1 << 20).unwrap();
        let refused = Tier::attach(Arc::new(Mixed(buffer)))
            .page_bytes(4096)
            .open();
        let is_refused = matches!(
            refused,
            Err(Error::Memory(MemoryError::InvalidArgument {
                what: "memory",
                ..
            }))
        );
        assert!(is_refused, "{refused:?}");
    }
}
