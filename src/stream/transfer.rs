//! Copies and fills that go on while the caller does something else.

mod errors;
#[cfg(feature = "async")]
mod future;

use std::fmt;

pub use errors::{NotStarted, TransferFailed};

use super::marks::Mark;
use super::over::{self, Waited};
use super::work::{Grants, Prepared};
use super::{Event, Stream};
use crate::driver::{Code, Relaxed};
use crate::memory::Memory;
use crate::{Error, Result};

/// A ticket for a copy or a fill that a GPU works on. It owns the operands `T`, and gives them back once the
/// work has ended.
///
/// [`is_done`](Self::is_done) asks, [`wait`](Self::wait) waits, and dropping the ticket waits too. With the
/// feature `async` a ticket is a future.
///
/// Memory that is to be used meanwhile is passed as an `Arc`. Nothing orders the CPU's accesses against the
/// GPU's: see [`CpuView`](crate::memory::CpuView).
///
/// ```
/// use std::sync::Arc;
/// use egmem::{Buffer, Driver, Machine, Stream};
///
/// let driver = Driver::simulated(Machine::gh200())?;
/// let stream = Stream::new(&driver, 0)?;
/// let from = Arc::new(Buffer::near(&driver, 0, 4096)?);
/// let to = Buffer::near(&driver, 0, 4096)?;
/// from.fill(7)?;
///
/// let copy = stream.start_copy((to, 0), (Arc::clone(&from), 0), 4096)?;
/// let first: u8 = from.get(0)?; // while the GPU copies
/// let (to, _) = copy.wait()?;
/// assert_eq!(to.get::<u8>(4095)?, first);
/// # Ok::<(), egmem::Error>(())
/// ```
///
/// # Why this is safe
/// - **Mapped**: the ticket owns the operands, which borrow nothing (`'static`). They are dropped or given back
///   only once an event behind the work has passed, or the driver reports the context as lost, which ends its
///   work. Where the driver never says so, and in a forked child, they are leaked. A ticket that is passed to
///   [`mem::forget`](std::mem::forget) never drops them.
/// - **In bounds and granted**: checked before the work is put on the stream. Mappings' grants change only
///   through `&mut`, which nobody has while the ticket owns the memory or an `Arc` of it. Pools' grants change
///   through `&self`: [`Pool::set_access`](crate::Pool::set_access) takes none away while the ticket lives.
/// - **Not lent as slices**: safe code reads and writes the bytes through [`CpuView`](crate::memory::CpuView)
///   alone. [`Buffer::exclusive_slice`](crate::Buffer::exclusive_slice) refuses memory that was granted to a GPU,
///   and a ticket needs such a grant. The contracts of `as_slice` and the like name work in flight.
/// - **Run once, now**: a stream that is being captured into a graph is refused.
#[must_use = "dropped, it waits for the end of the work"]
pub struct Transfer<T> {
    /// `None` once they are given back.
    operands: Option<T>,
    progress: Progress,
    #[cfg(feature = "async")]
    polling: future::Polling,
    grants: Grants,
    stream: Stream,
}

/// A ticket, or why there is none.
pub type Started<T> = Result<Transfer<T>, NotStarted<T>>;

#[derive(Debug)]
enum Progress {
    /// The work has ended, or there was none.
    Over(Result<()>),
    /// It ends before the mark passes.
    Marked(Mark),
    /// It may run for ever, as far as the driver says.
    Unknown(Error),
    /// It is being put on the stream.
    Beginning,
}

impl Stream {
    /// Puts a copy of `bytes` on the stream, to a memory and an offset in bytes from another, and returns a ticket
    /// that owns both. Memory of a pool may belong to another stream: the copy comes after its allocation and all
    /// that is on that stream by now.
    ///
    /// The copy of 0 bytes is done at once.
    ///
    /// Source: `cuMemcpyAsync`, `cuEventRecord`.
    ///
    /// # Errors
    /// As [`copy`](Self::copy). The operands are in the error.
    pub fn start_copy<D, S>(&self, to: (D, u64), from: (S, u64), bytes: u64) -> Started<(D, S)>
    where
        D: Memory + 'static,
        S: Memory + 'static,
    {
        let prepared = self.prepare_copy((&to.0, to.1), (&from.0, from.1), bytes);
        // SAFETY: the operands are the memory of the copy.
        unsafe { Transfer::start(self, prepared, (to.0, from.0)) }
    }

    /// Puts a fill on the stream, which sets `bytes` bytes from an offset in bytes into a memory on to `byte`, and
    /// returns a ticket that owns the memory. Otherwise as [`start_copy`](Self::start_copy).
    ///
    /// Source: `cuMemsetD8Async`, `cuEventRecord`.
    ///
    /// # Errors
    /// As [`copy`](Self::copy). The memory is in the error.
    pub fn start_fill<M: Memory + 'static>(
        &self,
        to: (M, u64),
        bytes: u64,
        byte: u8,
    ) -> Started<M> {
        let prepared = self.prepare_fill((&to.0, to.1), bytes, byte);
        // SAFETY: the operand is the memory of the fill.
        unsafe { Transfer::start(self, prepared, to.0) }
    }
}

impl<T> Transfer<T> {
    /// # Safety
    /// The work's memory lives as long as `operands` do.
    unsafe fn start(
        stream: &Stream,
        prepared: Result<Option<Prepared>>,
        operands: T,
    ) -> Started<T> {
        let begun = prepared.and_then(|work| match work {
            Some(work) => Ok(Some((work, stream.spare_event()?))),
            None => Ok(None),
        });
        let begun = match begun {
            Ok(begun) => begun,
            Err(error) => return Err(NotStarted::new(error, operands)),
        };
        let mut ticket = Self {
            operands: Some(operands),
            progress: Progress::Over(Ok(())),
            #[cfg(feature = "async")]
            polling: future::Polling::default(),
            grants: [None, None],
            stream: stream.clone(),
        };
        if let Some((work, event)) = begun {
            // SAFETY: the caller's promise; the ticket owns the operands.
            let put = unsafe { ticket.put(work, event) };
            if let Err(error) = put
                && let Some(operands) = ticket.operands.take()
            {
                return Err(NotStarted::new(error, operands));
            }
        }
        Ok(ticket)
    }

    /// Puts the work on the stream, and a mark behind it.
    ///
    /// # Errors
    /// The driver's, where no work has begun, or it has ended again.
    ///
    /// # Safety
    /// The work's memory lives as long as the operands.
    unsafe fn put(&mut self, work: Prepared, event: Event) -> Result<()> {
        self.progress = Progress::Beginning;
        // SAFETY: the operands stay until the work has ended, by `drop`.
        let put = unsafe { self.stream.put(&work) };
        self.grants = work.grants;
        let Err(error) = put else {
            self.progress = match self.stream.mark(event) {
                Ok(mark) => Progress::Marked(mark),
                // This thread can still wait for all of the stream.
                Err(_) => Progress::after(self.stream.wait_until_over()),
            };
            return Ok(());
        };
        // What is refused may be earlier work's failure, and this work on the stream.
        self.progress = Progress::after(self.stream.wait_until_over());
        match self.progress {
            Progress::Over(_) => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns whether the work has ended: [`wait`](Self::wait) then returns at once.
    ///
    /// Source: `cuEventQuery`.
    ///
    /// # Errors
    /// What the work failed with: [`Error::ContextLost`] after an illegal access. The driver's, where it does not
    /// say. [`Error::InvalidArgument`] in a forked child.
    pub fn is_done(&self) -> Result<bool> {
        match &self.progress {
            Progress::Over(result) => result.clone().map(|()| true),
            Progress::Marked(mark) => {
                self.stream.driver().expect_this_process("transfer")?;
                let _relaxed = Relaxed::new(self.stream.driver());
                mark.event.is_done()
            }
            Progress::Unknown(error) => Err(error.clone()),
            Progress::Beginning => Ok(false),
        }
    }

    /// Waits for the end of the work, and returns the operands.
    ///
    /// Source: `cuEventSynchronize`.
    ///
    /// # Errors
    /// As [`is_done`](Self::is_done). The operands are in the error where the work has ended. Otherwise they are
    /// leaked.
    pub fn wait(mut self) -> Result<T, TransferFailed<T>> {
        self.finish();
        self.outcome()
    }

    /// The stream that the work is on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits for the end of the work, if the driver tells of it.
    fn finish(&mut self) {
        #[cfg(feature = "async")]
        self.stop_polling();
        let driver = self.stream.driver();
        let Progress::Marked(Mark { event, .. }) = &self.progress else {
            return;
        };
        if !driver.is_of_this_process() {
            return;
        }
        let waited = {
            let _relaxed = Relaxed::new(driver);
            over::wait(|| event.synchronize(), || event.is_done())
        };
        self.set(Progress::after(waited));
    }

    /// Ends the wait for the mark.
    fn set(&mut self, progress: Progress) {
        let over = matches!(progress, Progress::Over(_));
        if let Progress::Marked(mark) = std::mem::replace(&mut self.progress, progress)
            && over
        {
            self.stream.keep_event(mark);
        }
        if over {
            self.grants = [None, None];
        }
    }

    /// What came of the work, as far as it is known. The operands are given back where it is over.
    fn outcome(&mut self) -> Result<T, TransferFailed<T>> {
        let (error, operands) = match &self.progress {
            Progress::Over(result) => match (result, self.operands.take()) {
                (Ok(()), Some(operands)) => return Ok(operands),
                (Ok(()), None) => (errors::given_back(), None),
                (Err(error), operands) => (error.clone(), operands),
            },
            Progress::Unknown(error) => (error.clone(), None),
            Progress::Marked(_) | Progress::Beginning => {
                let elsewhere = self.stream.driver().expect_this_process("transfer");
                (elsewhere.err().unwrap_or_else(errors::given_back), None)
            }
        };
        Err(TransferFailed::new(error, operands))
    }
}

impl Progress {
    fn after(waited: Waited) -> Self {
        match waited {
            Waited { result, over: true } => Self::Over(result),
            Waited { result, .. } => Self::Unknown(result.err().unwrap_or_else(errors::silent)),
        }
    }
}

impl<T> Drop for Transfer<T> {
    fn drop(&mut self) {
        self.finish();
        if let Progress::Over(_) = self.progress {
            return;
        }
        let Some(operands) = self.operands.take() else {
            return;
        };
        // The GPU may still use them.
        std::mem::forget((operands, std::mem::take(&mut self.grants)));
        if self.stream.driver().is_of_this_process()
            && let Progress::Unknown(error) = &self.progress
            && error.code() != Some(Code::DEINITIALIZED)
        {
            tracing::error!(%error, "the driver does not say whether a copy or a fill has ended: its memory is lost until the process ends");
        }
    }
}

impl<T> fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("progress", &self.progress)
            .field("stream", &self.stream.handle())
            .finish_non_exhaustive()
    }
}
