//! Memory for kernels that append while they run.

use std::sync::Arc;
use std::time::Duration;
use std::{mem, thread};

use bytemuck::{AnyBitPattern, NoUninit};
use egmem_core::teardown::log_lost;

use super::Appender;
use super::cells::CLOSED;
use crate::memory::Memory;
use crate::{Result, Stream};

impl<T: AnyBitPattern + NoUninit> Appender<T> {
    /// Maps memory for the records that kernels have asked for, and for some more ahead of them; tells the kernels.
    /// Returns how many records have memory. It may be called at any time.
    ///
    /// Where memory is refused, where a counter has a value that it cannot have, or where
    /// [`max_len`](super::AppenderOptions::max_len) is reached, kernels see that there will be no more records.
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
    /// Those of [`Stream::is_done`]. [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a stream that is
    /// being captured into a graph, whose kernels run later, and in a forked child: nothing was waited for then.
    pub fn pump_while(&mut self, stream: &Stream) -> Result<()> {
        self.records.driver().expect_this_process("appender")?;
        if stream.is_capturing() == Ok(true) {
            return stream.expect_no_capture();
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
            return;
        }
        let cursor = mem::take(&mut self.confirmed); // else its drop would wait, too
        mem::forget((Arc::clone(&self.cells), self.records.chunk_list(), cursor));
        let what = "memory of kernels that append, whose end the driver does not tell";
        log_lost(what, Err(error.clone()));
        self.lost = Some(error);
    }

    /// Fails if kernels may append for ever, as far as the driver says.
    pub(super) fn expect_ended(&self) -> Result<()> {
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
