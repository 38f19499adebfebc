//! How an appender is created, and the counters that it shares with kernels.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};

use bytemuck::{AnyBitPattern, NoUninit};

use super::Appender;
use crate::driver::{Access, DevicePtr, Driver, Location};
use crate::growable::{Growable, GrowableOptions};
use crate::ledger::{Label, Site};
use crate::memory::Memory;
use crate::pinned::PinnedHost;
use crate::topology::Topology;
use crate::vmm::Mapping;
use crate::{Error, Placement, Result, Stream, Transfer, check, counter};

/// How much memory is kept mapped ahead of the kernels unless told otherwise, in bytes.
const AHEAD: u64 = 16 << 20;

/// Options for an appender; [`create`](Self::create) creates it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct AppenderOptions<T> {
    records: GrowableOptions<T>,
    cursor: Option<Location>,
    ahead: Option<usize>,
}

impl<T: AnyBitPattern + NoUninit> Appender<T> {
    /// Returns options for records at `location`: a node's id, or any [`Location`]. With records in a GPU's memory, the
    /// counters that the CPU needs are on the GPU's host node.
    pub fn on(location: impl Into<Location>) -> AppenderOptions<T> {
        AppenderOptions {
            records: Growable::on(location),
            cursor: None,
            ahead: None,
        }
    }
}

impl<T: AnyBitPattern + NoUninit> AppenderOptions<T> {
    /// Sets the most records that there can ever be: see [`GrowableOptions::max_len`]. Kernels can make the memory grow to
    /// this.
    pub fn max_len(mut self, records: usize) -> Self {
        self.records = self.records.max_len(records);
        self
    }

    /// Sets how many bytes the memory grows by at least: see [`GrowableOptions::step`].
    pub fn step(mut self, bytes: u64) -> Self {
        self.records = self.records.step(bytes);
        self
    }

    /// Makes the records shareable: see [`GrowableOptions::shareable`]. Another process maps those that were collected, by a
    /// `GrowableExport` of [`Appender::records`]. The counters are not shared.
    pub fn shareable(mut self) -> Self {
        self.records = self.records.shareable();
        self
    }

    /// Sets whether to ask the driver for more memory than the node has free.
    pub fn overcommit(mut self, on: bool) -> Self {
        self.records = self.records.overcommit(on);
        self
    }

    /// Sets for how many records memory is kept mapped beyond those reserved. The default is 16 MiB of them. Too few make
    /// kernels wait for memory: 2 MiB took 0.7 ms on an H100's host node (docs/performance-shapes.md). It is also for how many
    /// records a count that a kernel has damaged can map memory, before it is found out.
    pub const fn ahead(mut self, records: usize) -> Self {
        self.ahead = Some(records);
        self
    }

    /// Sets where the cursor lies that kernels reserve records by. By default beside the other counters, on a host node,
    /// where over PCIe each reservation takes a way there and back. In the memory of the GPU whose kernels append,
    /// reservations are as fast as its other atomic additions.
    pub fn cursor_on(mut self, location: impl Into<Location>) -> Self {
        self.cursor = Some(location.into());
        self
    }

    /// Sets which locations may read and write: see [`GrowableOptions::access_by`].
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.records = self.records.access_by(who);
        self
    }

    /// Sets the name of its memory in the [ledger](egmem_core::ledger).
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.records = self.records.label(label);
        self
    }

    /// Reserves addresses for all records, creates the counters, and maps the first memory.
    ///
    /// # Errors
    /// Those of [`GrowableOptions::create`] and of [`Growable::reserve`]; nothing stays behind then.
    #[track_caller]
    pub fn create(self, driver: &Driver) -> Result<Appender<T>> {
        let placement = self.records.placement.clone();
        let records = self.records.create(driver)?;
        let size = size_of::<T>() as u64;
        let ahead = self.ahead.unwrap_or((AHEAD / size) as usize);
        let ahead = ahead.clamp(1, records.max_len());
        let host = match placement.location {
            Location::Device(gpu) => Topology::of(driver)?.gpu(gpu)?.host_node()?.into(),
            host => host,
        };
        let site = Site::here();
        let map = |location: Location| -> Result<Mapping> {
            let here = Placement {
                location,
                ..placement.clone()
            };
            let mut mapping = here.memory(site.clone()).create(driver, USED)?.map()?;
            mapping.set_access(&here.grants(driver)?)?;
            Ok(mapping)
        };
        let cursor = self.cursor.filter(|location| *location != host);
        // Four reports for the memory mapped ahead; not one for each warp.
        let shift = (ahead as u64 / 4).max(32).ilog2();
        let constants = [records.device_ptr().0, size, shift.into()];
        let host = map(host)?;
        expect_cpu(&host)?;
        let cells = Cells::create(driver, host, cursor.map(map).transpose()?, constants)?;
        let mut appender = Appender {
            cells: Arc::new(cells),
            records,
            ahead,
            confirmed: ConfirmedCursor::default(),
            stopped: None,
            lost: None,
            died: None,
        };
        appender.records.reserve(ahead)?;
        appender.open(0)?;
        Ok(appender)
    }
}

/// Set in a limit that will not grow any more.
pub(super) const CLOSED: u64 = 1 << 63;

/// Where things lie in the host's part, in bytes. `device/egmem_append.cuh` says the same. Each counter has a cache
/// line of its own.
const END: u64 = 0;
const WANTED: u64 = 128;
const CONSTANTS: u64 = 256;
/// Where the cursor's part begins, if it has no memory of its own.
const CURSOR: u64 = 512;
/// Where things lie in the cursor's part.
const NEXT: u64 = 0;
const LIMIT: u64 = 128;
/// The bytes of the cursor's part that mean something.
const CURSOR_USED: usize = 256;
/// Where the pinned memory has a cursor in a GPU's memory as it is while kernels run, behind the one that is copied
/// in both directions.
const SEEN: u64 = CURSOR_USED as u64;

/// The bytes of each part that are used, at most.
const USED: u64 = CURSOR + CURSOR_USED as u64;

/// "EGMAPND1", so that a kernel that gets another address finds it out.
const MAGIC: u64 = u64::from_le_bytes(*b"EGMAPND1");

/// Where the kernels' cursor is.
#[derive(Debug)]
enum Cursor {
    /// In memory that the CPU reads and writes.
    OfCpu {
        address: DevicePtr,
        /// Keeps it mapped, if it is not in the host's part.
        _memory: Option<Mapping>,
    },
    /// In a GPU's own memory: the GPU copies it to and from the pinned memory.
    OfGpu(Arc<Mapping>, Arc<PinnedHost>, Stream),
}

/// A copy of a cursor in a GPU's memory, under way. It keeps both memories.
type Look = Transfer<(Arc<PinnedHost>, Arc<Mapping>)>;

/// How many records kernels have reserved.
enum Reserved {
    /// The cursor's value.
    Now(u64),
    /// A GPU copies it: [`seen`] has it when the copy has ended.
    Later(Box<Look>),
}

/// The counters. `end` is the host's to write, `wanted` the kernels'; the cursor is the kernels' while they run.
#[derive(Debug)]
pub(super) struct Cells {
    cursor: Cursor,
    host: Mapping,
}

/// Fails unless the CPU may read and write.
fn expect_cpu(mapping: &Mapping) -> Result<()> {
    let (have, need) = (mapping.host(), Access::ReadWrite);
    if have == need {
        return Ok(());
    }
    Err(Error::not_accessible(Location::Host, have, need))
}

/// Waits for a copy of the cursor; returns how many records were reserved then.
fn seen(look: Look) -> Result<u64> {
    let (copy, _) = look.wait().map_err(|failed| *failed.error)?;
    copy.cpu().get(SEEN + NEXT)
}

impl Cells {
    /// Takes the memory of the host's part, which the CPU may read and write, and the cursor's, which lies beside it if it has
    /// none. The constants are for the kernels: the address of the first record, the size of a record, and a shift. Kernels
    /// report how far they are at each multiple of 2 to this.
    fn create(
        driver: &Driver,
        host: Mapping,
        cursor: Option<Mapping>,
        [first_record, record, shift]: [u64; 3],
    ) -> Result<Self> {
        let cursor = match cursor {
            None => Cursor::OfCpu {
                address: host.reservation().start().add(CURSOR),
                _memory: None,
            },
            Some(mapping) => match mapping.location() {
                Location::Device(gpu) if mapping.host() != Access::ReadWrite => {
                    let copy = PinnedHost::new(driver, gpu, SEEN + CURSOR_USED as u64)?;
                    let stream = Stream::new(driver, gpu)?;
                    Cursor::OfGpu(Arc::new(mapping), Arc::new(copy), stream)
                }
                _ => {
                    expect_cpu(&mapping)?;
                    Cursor::OfCpu {
                        address: mapping.reservation().start(),
                        _memory: Some(mapping),
                    }
                }
            },
        };
        let cells = Self { cursor, host };
        let cursor = cells.cursor_address().0;
        let words = [MAGIC, first_record, record, cursor, shift];
        let all = cells.host.padded_cpu()?;
        all.fill(0, USED, 0)?;
        all.write_at(CONSTANTS, &words)?;
        // The first copy creates an event, and that call may wait for running kernels. So it is made before any run.
        if let Reserved::Later(look) = cells.reserved()? {
            seen(*look)?;
        }
        Ok(cells)
    }

    fn cursor_address(&self) -> DevicePtr {
        match &self.cursor {
            Cursor::OfCpu { address, .. } => *address,
            Cursor::OfGpu(mapping, ..) => mapping.reservation().start(),
        }
    }

    /// Returns the address that kernels get.
    pub(super) fn address(&self) -> DevicePtr {
        self.host.reservation().start()
    }

    fn host_counter(&self, offset: u64) -> &AtomicU64 {
        // SAFETY:
        // - The offsets are multiples of 8 inside the host's part, which the CPU may read and write since `create`
        //   checked it: no function of this type changes its access, and `self` keeps it mapped.
        // - Safe code of this process reaches the words through this function alone, once `create` has returned.
        unsafe { counter(self.address().add(offset)) }
    }

    /// Returns how many records the kernels have asked for, at least.
    pub(super) fn wanted(&self) -> u64 {
        self.host_counter(WANTED).load(Acquire)
    }

    pub(super) fn set_wanted(&self, records: u64) {
        self.host_counter(WANTED).store(records, Release);
    }

    /// Tells the kernels how many records have memory, with [`CLOSED`] if there will be no more.
    pub(super) fn set_end(&self, end: u64) {
        self.host_counter(END).store(end, Release);
    }

    /// Returns how many records were reserved, and the limit below which they could be written. No kernel may run.
    pub(super) fn cursor(&self) -> Result<(u64, u64)> {
        match &self.cursor {
            Cursor::OfCpu { address, .. } => {
                let [next, limit] = self.both(*address);
                Ok((next.load(Acquire), limit.load(Acquire)))
            }
            Cursor::OfGpu(mapping, copy, stream) => {
                stream.copy(&**copy, 0, &**mapping, 0, CURSOR_USED as u64)?;
                Ok((copy.cpu().get(NEXT)?, copy.cpu().get(LIMIT)?))
            }
        }
    }

    /// Returns how many records were reserved, while kernels run. A GPU that copies the cursor does so on a stream of
    /// its own, but a driver may make the copy wait for kernels: no thread may wait for it.
    fn reserved(&self) -> Result<Reserved> {
        match &self.cursor {
            Cursor::OfCpu { address, .. } => {
                Ok(Reserved::Now(self.both(*address)[0].load(Acquire)))
            }
            Cursor::OfGpu(mapping, copy, stream) => {
                let (to, from) = (Arc::clone(copy), Arc::clone(mapping));
                let look = stream.start_copy((to, SEEN), (from, 0), CURSOR_USED as u64);
                look.map(|look| Reserved::Later(Box::new(look)))
                    .map_err(|failed| *failed.error)
            }
        }
    }

    /// Sets both. No kernel may run.
    pub(super) fn set_cursor(&self, next: u64, limit: u64) -> Result<()> {
        match &self.cursor {
            Cursor::OfCpu { address, .. } => {
                let [next_cell, limit_cell] = self.both(*address);
                next_cell.store(next, Release);
                limit_cell.store(limit, Release);
                Ok(())
            }
            Cursor::OfGpu(mapping, copy, stream) => {
                copy.cpu().put(NEXT, next)?;
                copy.cpu().put(LIMIT, limit)?;
                stream.copy(&**mapping, 0, &**copy, 0, CURSOR_USED as u64)
            }
        }
    }

    /// Returns the cursor's counters, which the CPU may read and write at this address.
    fn both(&self, address: DevicePtr) -> [&AtomicU64; 2] {
        // SAFETY: as for `host_counter`, for the part that has the cursor.
        [NEXT, LIMIT].map(|offset| unsafe { counter(address.add(offset)) })
    }
}

/// The cursor that kernels reserve records by, as far as the host has confirmed it.
///
/// A kernel adds to the cursor before it reports how many records it wants, so a count above the cursor is damaged. A
/// cursor in a GPU's own memory is copied by that GPU. Until the copy comes, a count is believed for as many records above
/// the last known cursor as are kept ahead. So a damaged count maps so many at most.
#[derive(Debug, Default)]
pub(super) struct ConfirmedCursor {
    /// Records that were reserved, at least.
    known: u64,
    /// A copy of the cursor under way, and the count that it is to confirm.
    look: Option<(u64, Box<Look>)>,
}

impl ConfirmedCursor {
    /// Returns the cursor of a host that knows that `len` records were reserved.
    pub(super) fn of(len: u64) -> Self {
        Self {
            known: len,
            look: None,
        }
    }

    /// Returns for how many of the records that kernels `want` the host may map memory now: at least `len`, those that
    /// were collected.
    ///
    /// # Errors
    /// [`Error::CursorDamaged`](crate::Error::CursorDamaged); the driver's, if it refuses the copy.
    pub(super) fn records(
        &mut self,
        cells: &Cells,
        (len, want): (u64, u64),
        ahead: u64,
    ) -> Result<u64> {
        wants(want, (len, CLOSED - 1))?;
        // Not taken before it is done: its drop would wait.
        if let Some((_, look)) = &self.look
            && look.is_done()?
            && let Some((asked, look)) = self.look.take()
        {
            self.learn(asked, seen(*look)?, len)?;
        }
        if want > self.known && self.look.is_none() {
            match cells.reserved()? {
                Reserved::Now(next) => self.learn(want, next, len)?,
                Reserved::Later(look) => self.look = Some((want, look)),
            }
        }
        Ok(want.min(self.known.saturating_add(ahead)))
    }

    /// Compares the cursor with a count that was read before it.
    fn learn(&mut self, want: u64, next: u64, len: u64) -> Result<()> {
        check("the cursor of an appender", next, (len, CLOSED - 1))?;
        self.known = self.known.max(next);
        wants(want, (len, next))
    }
}

fn wants(count: u64, bounds: (u64, u64)) -> Result<()> {
    let what = "the count of records that an appender's kernels want";
    check(what, count, bounds).map(drop)
}
