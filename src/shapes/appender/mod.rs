//! Output of a size that is not known in advance.

mod cells;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, mem, thread};

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::teardown::log_lost;

use crate::driver::DevicePtr;
use crate::growable::Growable;
use crate::memory::Memory;
use crate::{Error, Result, Stream, check};

use cells::{CLOSED, Cells, ConfirmedCursor};

pub use cells::AppenderOptions;

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
    /// Why kernels died before the next `collect`, so that records below the limit may not have been written.
    died: Option<Error>,
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
    /// Records that a kernel had reserved when it died were not written. [`pump_while`](Self::pump_while) notes that; a program that
    /// calls [`pump`](Self::pump) itself calls this only after its stream has said that the kernels ended well.
    ///
    /// # Errors
    /// [`Error::CursorDamaged`] if a counter has a value that it cannot have, and [`Error::ContextLost`] if kernels of a
    /// [`pump_while`](Self::pump_while) died: the records since the last call are lost then. The driver's errors, if the cursor
    /// is in a GPU's memory, and that of a [`pump_while`](Self::pump_while) after which kernels may still run.
    pub fn collect(&mut self) -> Result<Appended> {
        self.records.driver().expect_this_process("appender")?;
        self.expect_ended()?;
        let (next, limit) = self.cells.cursor()?;
        let before = self.records.len();
        let stopped = self.stopped.take();
        let checked = match &self.died {
            Some(error) => Err(error.clone()),
            None => self.check(next, limit & !CLOSED),
        };
        let came = checked.as_ref().map_or(0, |(came, _)| *came);
        if let Err(error) = self.open(before + came) {
            self.stopped = stopped; // the next call finds the same
            return Err(error);
        }
        self.died = None;
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

impl<T: AnyBitPattern + NoUninit> Appender<T> {
    /// Maps memory for the records that kernels have asked for, and for some more ahead of them; tells the kernels.
    /// Returns how many records have memory. It may be called at any time.
    ///
    /// Where memory is refused, where a counter has a value that it cannot have, or where
    /// [`max_len`](AppenderOptions::max_len) is reached, kernels see that there will be no more records.
    pub fn pump(&mut self) -> usize {
        if !self.records.driver().is_of_this_process() {
            return self.records.capacity(); // kernels are the parent's, and so is what they are told
        }
        if self.stopped.is_none() {
            self.stopped = self.map_ahead().err();
        }
        self.cells.set_end(self.end());
        self.records.capacity()
    }

    /// Maps the memory that is missing for the records wanted and for those ahead.
    fn map_ahead(&mut self) -> Result<()> {
        let (wanted, most) = (self.cells.wanted(), self.records.max_len());
        let with_those_ahead = |records: u64| {
            let records = usize::try_from(records).unwrap_or(most);
            records.saturating_add(self.ahead).min(most)
        };
        if with_those_ahead(wanted) <= self.records.capacity() {
            return Ok(());
        }
        let len = self.records.len();
        let (place, ahead) = ((len as u64, wanted), self.ahead as u64);
        let confirmed = self.confirmed.records(&self.cells, place, ahead)?;
        let target = with_those_ahead(confirmed);
        self.records.reserve(target - len).inspect_err(|_| {
            // The records reserved so far may fit without those ahead. The refusal is reported anyway.
            let needed = usize::try_from(confirmed).unwrap_or(most).min(most);
            let _ = self.records.reserve(needed.saturating_sub(len));
        })
    }

    /// Pumps until all work on `stream` has ended. Call it as soon as the kernels are launched there.
    ///
    /// The memory stays mapped until the work has ended, also where this fails or unwinds: kernels are then told that
    /// there will be no more memory, and the thread waits for the stream. If the driver does not say that the work
    /// has ended, the memory is never unmapped, which is logged, and the appender takes no more records.
    ///
    /// # Errors
    /// Those of [`Stream::is_done`]. [`Error::InvalidArgument`] for a stream that is
    /// being captured into a graph, whose kernels run later, and in a forked child: nothing was waited for then.
    pub fn pump_while(&mut self, stream: &Stream) -> Result<()> {
        self.records.driver().expect_this_process("appender")?;
        // An error of the driver does not keep kernels from being waited for.
        if let Err(captured @ Error::InvalidArgument { .. }) = stream.expect_no_capture() {
            return Err(captured);
        }
        let mut running = Running {
            appender: self,
            stream,
            ended: false,
        };
        let result = running.appender.pump_until_ok(|| stream.is_done());
        running.ended = result.is_ok();
        if let Err(error) = &result {
            running.appender.stopped.get_or_insert(error.clone());
        }
        result
    }

    /// Pumps until `done`, for writers that are no kernels. Nothing waits for kernels if `done` panics: see
    /// [`pump_while`](Self::pump_while).
    pub fn pump_until(&mut self, mut done: impl FnMut() -> bool) {
        // `done` has no error.
        let _ = self.pump_until_ok(|| Ok(done()));
    }

    fn pump_until_ok(&mut self, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let mut idle = 0_u32;
        let mut mapped = self.pump();
        while !done()? {
            // Threads of a kernel may wait for this one, so it does not sleep for long.
            match idle {
                0..1000 => thread::yield_now(),
                _ => thread::sleep(Duration::from_micros(20)),
            }
            let now = self.pump();
            idle = if now == mapped {
                idle.saturating_add(1)
            } else {
                0
            };
            mapped = now;
        }
        Ok(())
    }

    /// Waits for kernels that get no more memory. If the driver does not say that they have ended, their memory is
    /// kept for ever.
    fn end_without_memory(&mut self, stream: &Stream) {
        // Threads that wait for memory give up now, and not when their time is over.
        self.cells.set_end(self.records.capacity() as u64 | CLOSED);
        let waited = stream.wait_until_over();
        let Err(error) = waited.result else { return };
        if waited.over {
            if matches!(error, Error::ContextLost { .. }) {
                self.died = Some(error);
            }
            return;
        }
        let cursor = mem::take(&mut self.confirmed); // else its drop would wait, too
        mem::forget((Arc::clone(&self.cells), self.records.chunk_list(), cursor));
        let what = "memory of kernels that append, whose end the driver does not tell";
        log_lost(what, Err(error.clone()));
        self.lost = Some(error);
    }

    /// Fails if kernels may append for ever, as far as the driver says.
    fn expect_ended(&self) -> Result<()> {
        match &self.lost {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }
}

/// Kernels that may use the appender's memory.
struct Running<'a, T: AnyBitPattern + NoUninit> {
    appender: &'a mut Appender<T>,
    stream: &'a Stream,
    ended: bool,
}

impl<T: AnyBitPattern + NoUninit> Drop for Running<'_, T> {
    fn drop(&mut self) {
        if !self.ended {
            self.appender.end_without_memory(self.stream);
        }
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

#[cfg(test)]
mod tests {
    use egmem_core::Machine;

    use super::*;
    use crate::Driver;
    use crate::driver::{Call, Code, NodeId};

    /// The capture may end in another thread after the look at it: the kernels that it has were not waited for all the same.
    #[test]
    fn a_stream_that_was_captured_is_refused_also_if_the_capture_ends() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let sim = driver.sim().unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let mut appender = Appender::<u64>::on(NodeId(0)).max_len(9).create(&driver);
        let appender = appender.as_mut().unwrap();
        sim.begin_capture(stream.handle(), false);
        // A second look would find no capture.
        sim.fail(Call::StreamIsCapturing, 2, Code::NOT_SUPPORTED);
        let refused = appender.pump_while(&stream);
        assert!(
            matches!(refused, Err(Error::InvalidArgument { .. })),
            "{refused:?}"
        );
        assert!(sim.end_capture(stream.handle()));
    }
}
