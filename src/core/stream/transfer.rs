//! Copies and fills that run while the caller does something else.
//!
//! # Design
//! `Stream::start_copy` and `start_fill` take their memory by value and return a ticket, `Transfer`, that owns it until an
//! event behind the work has passed. A borrow instead would be unsound: `mem::forget` ends a borrow without running `Drop`.
//! Memory that the caller uses meanwhile is shared by `Arc`. The type's documentation has the whole argument.
//!
//! Access is checked before the work begins, so it must not be taken away before the end. Mappings' grants change through
//! `&mut` alone. A pool is shared by its allocations, and its grants change through `&self`: the pool counts the work that
//! relies on them, and refuses to take access away while there is any. The count covers all GPUs of a pool, because a
//! driver may make a copy between GPUs by the engine of either.
//!
//! A task that awaits a ticket is woken by a thread of this crate, not by a host function on the stream
//! (`cuLaunchHostFunc`): the driver runs such functions on a thread of its own, one after the other, where a waker that
//! blocks would hold up the stream, and a waker that calls CUDA is forbidden. The thread asks the oldest event of each
//! stream, first after 20 µs, then after twice as long each time, up to 1 ms. It takes no part in ownership: it has events
//! and wakers. It starts with the first task that waits and ends 50 ms after the last one.

use std::fmt;

use super::Stream;
use super::event::{Event, Waited};
use super::order::Mark;
#[cfg(feature = "async")]
use super::poller::Polling;
use super::work::{BatchCopy, Grants, Prepared};
use crate::driver::{Code, Relaxed};
use crate::memory::Memory;
use crate::{Error, Result};

/// A ticket for a copy or a fill in progress. It owns the operands `T`, and returns them once the work has
/// ended.
///
/// [`is_done`](Self::is_done) queries the work, [`wait`](Self::wait) waits for it, and so does dropping the
/// ticket. With the feature `async` a ticket is a future.
///
/// Pass memory that the program uses meanwhile as an `Arc`. Nothing orders the CPU's accesses against the
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
/// - **Mapped**: the ticket owns the operands, which borrow nothing (`'static`). They are dropped or returned
///   only once an event behind the work has passed, or the driver reports the context as lost, which ends its
///   work. If the driver never does, and in a forked child, they are leaked. A ticket that is passed to
///   [`mem::forget`](std::mem::forget) never drops them.
/// - **In bounds and granted**: checked before the work is submitted to the stream. Mappings' grants change
///   only through `&mut`, which does not exist while the ticket owns the memory or an `Arc` of it. Pools'
///   grants change through `&self`: [`Pool::set_access`](crate::Pool::set_access) revokes none while the
///   ticket lives.
/// - **Not lent as slices**: safe code reads and writes the bytes only through
///   [`CpuView`](crate::memory::CpuView). [`Buffer::exclusive_slice`](crate::Buffer::exclusive_slice) refuses
///   memory that was granted to a GPU, and a ticket needs such a grant. The contracts of `as_slice` and
///   similar functions exclude work in flight.
/// - **Run once, now**: a stream that is being captured into a graph is refused.
#[must_use = "dropped, it waits for the end of the work"]
pub struct Transfer<T> {
    /// `None` once they are returned.
    operands: Option<T>,
    pub(super) progress: Progress,
    #[cfg(feature = "async")]
    pub(super) polling: Polling,
    grants: Grants,
    pub(super) stream: Stream,
}

/// A ticket, or the reason why there is none.
pub type Started<T> = Result<Transfer<T>, NotStarted<T>>;

#[derive(Debug)]
pub(super) enum Progress {
    /// The work has ended, or there was none.
    Over(Result<()>),
    /// It ends before the mark passes.
    Marked(Mark),
    /// It may run forever, as far as the driver says.
    Unknown(Error),
    /// It is being submitted.
    Beginning,
}

impl Stream {
    /// Submits a copy of `bytes`, to a memory and an offset in bytes from another, and returns a ticket that
    /// owns both. Memory of a pool may belong to another stream: the copy comes after its allocation and
    /// everything submitted to that stream so far.
    ///
    /// A copy of 0 bytes is done at once.
    ///
    /// Source: `cuMemcpyAsync`, `cuEventRecord`.
    ///
    /// # Errors
    /// As [`copy`](Self::copy). The error contains the operands.
    pub fn start_copy<D, S>(&self, to: (D, u64), from: (S, u64), bytes: u64) -> Started<(D, S)>
    where
        D: Memory + 'static,
        S: Memory + 'static,
    {
        let [to_at, from_at] = [to.1, from.1];
        let copy = BatchCopy {
            to: to_at,
            from: from_at,
            bytes,
        };
        let prepared = self.prepare_copies(&to.0, &from.0, &[copy], false);
        // SAFETY: the operands are the memory of the copy.
        unsafe { Transfer::start(self, prepared, (to.0, from.0)) }
    }

    /// Submits a fill, which sets `bytes` bytes from an offset in a memory on to `byte`, and returns a ticket
    /// that owns the memory. Otherwise as [`start_copy`](Self::start_copy).
    ///
    /// Source: `cuMemsetD8Async`, `cuEventRecord`.
    ///
    /// # Errors
    /// As [`copy`](Self::copy). The error contains the memory.
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

    /// Submits many copies, and returns a ticket that owns the destination and the source. Otherwise as
    /// [`copy_batch`](Self::copy_batch) and [`start_copy`](Self::start_copy).
    ///
    /// # Errors
    /// As `copy_batch`. The error contains the operands.
    pub fn start_copy_batch<D, S>(&self, to: D, from: S, copies: &[BatchCopy]) -> Started<(D, S)>
    where
        D: Memory + 'static,
        S: Memory + 'static,
    {
        let prepared = self.prepare_copies(&to, &from, copies, true);
        // SAFETY: the operands are the memory of the copies.
        unsafe { Transfer::start(self, prepared, (to, from)) }
    }
}

impl<T> Transfer<T> {
    /// # Safety
    /// The work's memory lives as long as `operands`.
    pub(super) unsafe fn start(
        stream: &Stream,
        prepared: Result<Option<Prepared>>,
        operands: T,
    ) -> Started<T> {
        let work = match prepared {
            Ok(work) => work,
            Err(error) => return Err(NotStarted::new(error, operands)),
        };
        let mut ticket = Self::new(stream, operands);
        let Some(mut work) = work else {
            return Ok(ticket);
        };
        ticket.grants = std::mem::take(&mut work.grants);
        // SAFETY: the caller's promise; the ticket owns the operands until the work has ended.
        ticket.begin(|_| unsafe { stream.put(&work) })
    }

    /// Submits work of the caller's by `put`, and returns a ticket that owns the operands, which `put` is given.
    ///
    /// # Errors
    /// Those of `put`, if no work has begun, or it has ended again. If the driver does not say so, there is a ticket, whose
    /// [`wait`](Self::wait) fails.
    ///
    /// # Safety
    /// `put` submits work to `stream` alone, which is not being captured into a graph, and the work uses only memory that lives as long
    /// as `operands`.
    pub unsafe fn submit(
        stream: &Stream,
        operands: T,
        put: impl FnOnce(&mut T) -> Result<()>,
    ) -> Started<T> {
        Self::new(stream, operands).begin(put)
    }

    fn new(stream: &Stream, operands: T) -> Self {
        Self {
            operands: Some(operands),
            progress: Progress::Over(Ok(())),
            #[cfg(feature = "async")]
            polling: Polling::default(),
            grants: [None, None],
            stream: stream.clone(),
        }
    }

    /// Submits the work, and a mark behind it.
    fn begin(mut self, put: impl FnOnce(&mut T) -> Result<()>) -> Started<T> {
        let event = self.stream.spare_event();
        if let Err(error) = event.and_then(|event| self.put(event, put))
            && let Some(operands) = self.operands.take()
        {
            return Err(NotStarted::new(error, operands));
        }
        Ok(self)
    }

    /// # Errors
    /// The driver's errors, if no work has begun, or it has ended again.
    fn put(&mut self, event: Event, put: impl FnOnce(&mut T) -> Result<()>) -> Result<()> {
        // If `put` unwinds, the operands are kept for ever.
        self.progress = Progress::Beginning;
        let put = self.operands.as_mut().map_or(Ok(()), put);
        let Err(error) = put else {
            self.set(match self.stream.mark(event) {
                Ok(mark) => Progress::Marked(mark),
                // This thread can still wait for the whole stream.
                Err(_) => Progress::after(self.stream.wait_until_over()),
            });
            return Ok(());
        };
        // The error may be of earlier work, with this work on the stream.
        self.set(Progress::after(self.stream.wait_until_over()));
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
    /// The work's error: [`Error::ContextLost`] after an illegal access. The driver's, if it refuses the
    /// query. [`Error::InvalidArgument`] in a forked child.
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

    /// Returns whether the ticket knows, without a query of the driver, that the work has ended: [`wait`](Self::wait) then returns the
    /// operands at once, and its error contains them. `false` says nothing about the work.
    pub const fn is_over(&self) -> bool {
        matches!(self.progress, Progress::Over(_))
    }

    /// Waits for the end of the work, and returns the operands.
    ///
    /// Source: `cuEventSynchronize`.
    ///
    /// # Errors
    /// As [`is_done`](Self::is_done). The error contains the operands if the work has ended. Otherwise they
    /// are leaked.
    pub fn wait(mut self) -> Result<T, TransferFailed<T>> {
        self.finish();
        self.outcome()
    }

    /// Returns the stream of the work.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits for the end of the work, if the driver reports it.
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
            event.wait_until_over()
        };
        self.set(Progress::after(waited));
    }

    /// Ends the wait for the mark.
    pub(super) fn set(&mut self, progress: Progress) {
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

    /// Returns the work's result, as far as it is known, with the operands if the work is over.
    pub(super) fn outcome(&mut self) -> Result<T, TransferFailed<T>> {
        let (error, operands) = match &self.progress {
            Progress::Over(result) => match (result, self.operands.take()) {
                (Ok(()), Some(operands)) => return Ok(operands),
                (Ok(()), None) => (given_back(), None),
                (Err(error), operands) => (error.clone(), operands),
            },
            Progress::Unknown(error) => (error.clone(), None),
            Progress::Marked(_) | Progress::Beginning => {
                let elsewhere = self.stream.driver().expect_this_process("transfer");
                (elsewhere.err().unwrap_or_else(given_back), None)
            }
        };
        Err(TransferFailed::new(error, operands))
    }
}

impl Progress {
    fn after(waited: Waited) -> Self {
        match waited {
            Waited { result, over: true } => Self::Over(result),
            Waited { result, .. } => Self::Unknown(result.err().unwrap_or_else(silent)),
        }
    }
}

impl<T> Drop for Transfer<T> {
    fn drop(&mut self) {
        self.finish();
        if self.is_over() {
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

/// Why a copy or a fill was not started, and its operands. If the driver refused the work itself, the destination's bytes
/// are undefined.
pub type NotStarted<T> = TransferError<T>;

/// Why a copy or a fill failed, and its operands with unspecified bytes in the destination. `None` if the driver does
/// not say whether the work has ended: then the [ticket](Transfer) has leaked them, or leaks them when it is
/// dropped.
pub type TransferFailed<T> = TransferError<Option<T>>;

/// Why a copy or a fill was not started or failed, and its operands.
pub struct TransferError<O> {
    /// The driver's error, that of the work, or that of the wait for it.
    pub error: Box<Error>,
    /// The operands.
    pub operands: O,
}

/// The operands were taken before.
#[cold]
fn given_back() -> Error {
    Error::invalid("transfer", "it has ended and its operands were given back")
}

/// A driver that refused without an error.
#[cold]
fn silent() -> Error {
    Error::failed(
        "waiting for GPU work",
        "the driver does not say how it ended",
    )
}

impl<O> TransferError<O> {
    pub(super) fn new(error: Error, operands: O) -> Self {
        let error = Box::new(error);
        Self { error, operands }
    }
}

impl<O> fmt::Display for TransferError<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a copy or a fill did not complete: {}", self.error)
    }
}

impl<O> fmt::Debug for TransferError<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferError")
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl<O> std::error::Error for TransferError<O> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.error)
    }
}

/// Returns only the error; drops the operands.
impl<O> From<TransferError<O>> for Error {
    fn from(failed: TransferError<O>) -> Self {
        *failed.error
    }
}
