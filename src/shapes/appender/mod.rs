//! Output of a size that is not known in advance.

mod cells;
mod pump;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use crate::counters::check;
use crate::driver::{DevicePtr, Location};
use crate::growable::{Growable, GrowableOptions, Placement};
use crate::ledger::{Label, Site};
use crate::memory::Memory;
use crate::topology::Topology;
use crate::{Driver, Error, Result};

use cells::{CLOSED, Cells, ConfirmedCursor, Constants};

/// The records of kernels that cannot say before how many there will be, at one range of addresses that grows.
///
/// ```text
///               0          collected      wanted    wanted + ahead       max_len
/// addresses     │ records  │ being written │ mapped  │ reserved, no memory │
///                                          ▲         ▲
/// kernels reserve records by one cursor ───┘         └── the host maps more while they run: pump
/// ```
/// A kernel's threads reserve records by adding to a cursor, and write those that lie below a limit: the records that have
/// memory. The host raises the limit while kernels run, by [`pump_while`](Self::pump_while) or
/// [`pump`](Self::pump). A thread that has reserved a record above the limit waits for it, as long as it was
/// told to. Then it closes the limit for all, and the record is *missed*: it is counted, and never written. There are no
/// holes: all records below the limit were written, and each missed one was above it.
///
/// When the kernels have ended, [`collect`](Self::collect) says which records came and how many are missed, and opens the
/// limit again. The device functions tell each thread whether its record was written, so a kernel can be launched again
/// for the items whose records were not. The program remembers which items these are.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::shapes::Appender;
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let mut output = Appender::<[u32; 4]>::on(NodeId(0)).max_len(1 << 28).create(&driver)?;
///
/// // Launch kernels with `output.device_ptr()`; while they run, map ahead of them:
/// # let stream = egmem::Stream::new(&driver, 0)?;
/// output.pump_while(&stream)?;
/// let batch = output.collect()?;
/// println!("{} records, {} did not fit", batch.records.len(), batch.missed);
///
/// // The CPU appends between kernels.
/// assert_eq!(output.append(&[[1, 2, 3, 4]; 100])?, 100);
/// assert_eq!(output.records().get(99)?, [1, 2, 3, 4]);
/// let vector = output.into_growable();
/// assert_eq!(vector.len(), 100);
/// # Ok::<(), egmem::Error>(())
/// ```
///
/// # On a GPU
/// The device functions are `egmem_append.cuh` in [`device::HEADERS`](crate::device::HEADERS). A warp reserves together, by
/// one addition for its 32 threads.
///
/// The appender keeps the memory mapped that kernels may write; it grows and never shrinks. Kernels that have its address
/// must have ended before it, or the vector that it becomes, is dropped or made smaller: the unsafe call that launches
/// them promises that. [`pump_while`](Self::pump_while) keeps the promise: it returns, also with an error, when they have
/// ended. A [`Prefix`](crate::Prefix) of [`records`](Self::records) keeps records that were collected for other work.
///
/// # Order
/// Records are the CPU's to read when they are collected, after the kernels that wrote them. The host stores the limit
/// with release order after the memory is mapped and granted, and a kernel loads it with acquire order of system scope.
/// While kernels run, only GPU threads add to the cursor: an addition by a GPU to host memory over PCIe is not atomic for
/// the CPU.
///
/// # Damaged counters
/// A kernel can write anything into the counters. The CPU checks each: a value that cannot be is
/// [`Error::CursorDamaged`], and nothing beyond the mapped records is ever read. A count of wanted records above the cursor is
/// found out before memory is mapped, if the CPU can read the cursor. If the cursor is in a GPU's memory, that GPU copies
/// it for the CPU, and the count is believed until then for [`ahead`](AppenderOptions::ahead) records at most. The cursor
/// itself is believed up to [`max_len`](AppenderOptions::max_len): a kernel may reserve any number of records.
pub struct Appender<T> {
    cells: Arc<Cells>,
    records: Growable<T>,
    ahead: usize,
    confirmed: ConfirmedCursor,
    /// Why no memory is added any more before the next `collect`.
    stopped: Option<Error>,
    /// Why the driver does not say whether kernels have ended. No record is appended any more then.
    lost: Option<Error>,
}

/// The outcome of kernels that appended: see [`Appender::collect`].
#[derive(Clone, Debug, PartialEq)]
#[must_use = "records may have been missed"]
pub struct Appended {
    /// The records that came, by index.
    pub records: Range<usize>,
    /// How many records were reserved, but had no memory, and so were not written.
    pub missed: u64,
    /// Why no more memory was mapped: the driver's refusal, [`Error::CursorDamaged`], or the error that
    /// [`pump_while`](Appender::pump_while) returned. Without this, records were missed because there are
    /// [`max_len`](AppenderOptions::max_len), or because threads waited for too short a time.
    pub stopped: Option<Error>,
}

impl<T: AnyBitPattern + NoUninit> Appender<T> {
    /// Returns the limit that the host knows.
    fn end(&self) -> u64 {
        let capacity = self.records.capacity();
        let is_last = self.stopped.is_some() || capacity == self.records.max_len();
        capacity as u64 | if is_last { CLOSED } else { 0 }
    }

    /// Returns the records that kernels have appended since the last call, and opens the limit for the next ones. All kernels that
    /// append must have ended; if one runs, records may be overwritten, but nothing else.
    ///
    /// # Errors
    /// [`Error::CursorDamaged`] if a counter has a value that it cannot have: the records since the last call are lost
    /// then. The driver's errors, if the cursor is in a GPU's memory; those that say that a GPU's context is lost; and that
    /// of a [`pump_while`](Self::pump_while) after which kernels may still run.
    pub fn collect(&mut self) -> Result<Appended> {
        self.records.driver().expect_this_process("appender")?;
        self.expect_ended()?;
        let (next, limit) = self.cells.cursor()?;
        let before = self.records.len();
        let stopped = self.stopped.take();
        let checked = self.check(next, limit & !CLOSED);
        let came = checked.as_ref().map_or(0, |(came, _)| *came);
        if let Err(error) = self.open(before + came) {
            self.stopped = stopped; // the next call finds the same
            return Err(error);
        }
        let (came, missed) = checked?;
        self.records.extend_unwritten(came)?; // they have memory
        Ok(Appended {
            records: before..before + came,
            missed,
            stopped,
        })
    }

    /// Returns how many records came and were missed.
    fn check(&self, next: u64, limit: u64) -> Result<(usize, u64)> {
        let (len, capacity) = (self.records.len() as u64, self.records.capacity() as u64);
        check("the cursor of an appender", next, (len, CLOSED - 1))?;
        check("the limit of an appender", limit, (len, capacity))?;
        let end = next.min(limit);
        Ok(((end - len) as usize, next - end))
    }

    /// Lets kernels append behind the records.
    fn open(&mut self, len: usize) -> Result<()> {
        let len = len as u64;
        self.confirmed = ConfirmedCursor::of(len);
        self.cells.set_wanted(len);
        self.cells.set_end(self.end());
        self.cells.set_cursor(len, self.end())
    }

    /// Appends records by the CPU, between kernels. Returns how many: fewer than all if there are
    /// [`max_len`](AppenderOptions::max_len) then.
    ///
    /// # Errors
    /// [`Error::StillHeld`] if kernels have appended records that were not [collected](Self::collect); those of
    /// [`Growable::extend_from_slice`]; that of a [`pump_while`](Self::pump_while) after which kernels may still run.
    pub fn append(&mut self, records: &[T]) -> Result<usize> {
        self.records.driver().expect_this_process("appender")?;
        self.expect_ended()?;
        if self.cells.cursor()?.0 != self.records.len() as u64 {
            return Err(Error::StillHeld {
                name: "an appender's cursor".into(),
                holders: vec!["records of kernels that were not collected".into()],
            });
        }
        let room = self.records.max_len() - self.records.len();
        let fits = &records[..records.len().min(room)];
        self.records.extend_from_slice(fits)?;
        self.open(self.records.len())?;
        Ok(fits.len())
    }
}

impl<T> Appender<T> {
    /// Returns the address of the counters, which a kernel's argument is and the device functions take.
    pub fn device_ptr(&self) -> DevicePtr {
        self.cells.address()
    }

    /// Returns the records that were collected. They stay where they are.
    pub const fn records(&self) -> &Growable<T> {
        &self.records
    }

    /// Returns the records that were collected, and ends the appender. No kernel may append any more.
    ///
    /// Nothing is unmapped: the vector keeps the counters, one granule or two, until it is dropped.
    pub fn into_growable(self) -> Growable<T> {
        let mut records = self.records;
        records.keep(self.cells);
        records
    }
}

impl<T> fmt::Debug for Appender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Appender")
            .field("counters", &self.device_ptr())
            .field("records", &self.records)
            .field("ahead", &self.ahead)
            .field("stopped", &self.stopped)
            .finish_non_exhaustive()
    }
}

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
        let memory = |location: Location| {
            let here = Placement {
                location,
                ..placement.clone()
            };
            Ok::<_, Error>((location, here.memory(site.clone()), here.grants(driver)?))
        };
        let cursor = match self.cursor {
            Some(location) if location != host => Some(memory(location)?),
            _ => None,
        };
        let constants = Constants {
            first_record: records.device_ptr(),
            record: size,
            // Four reports for the memory mapped ahead; not one for each warp.
            shift: (ahead as u64 / 4).max(32).ilog2(),
        };
        let cells = Cells::create(driver, memory(host)?, cursor, constants)?;
        let mut appender = Appender {
            cells: Arc::new(cells),
            records,
            ahead,
            confirmed: ConfirmedCursor::default(),
            stopped: None,
            lost: None,
        };
        appender.records.reserve(ahead)?;
        appender.open(0)?;
        Ok(appender)
    }
}
