//! Copies in progress.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use crate::driver::{Code, Relaxed};
use crate::inner::Inner;
use crate::memory::GrantUse;
use crate::stream::Waited;
use crate::table::{Direction, PageId};
use crate::{Event, GpuPages, MemoryError, Result, Stream};

/// Copies in progress, and a ticket for them.
///
/// The job keeps the tier, its pages, and memory of [`GpuPages::over`] until the work has ended: no page is evicted, and nothing is
/// unmapped. [`is_done`](Self::is_done) asks, [`wait`](Self::wait) waits, and so does dropping the job. A job that is
/// [forgotten](std::mem::forget) keeps everything for ever, and so does one whose end the driver does not tell.
#[must_use = "dropped, it waits for the end of the copies"]
pub struct Job {
    /// `None` once the work has ended.
    held: Option<Held>,
    progress: Progress,
    event: Event,
    stream: Stream,
    direction: Direction,
    bytes: u64,
}

/// What the work uses.
struct Held {
    tier: Arc<Inner>,
    pages: Vec<PageId>,
    _gpu: GpuPages,
    _grants: Vec<GrantUse>,
}

#[derive(Clone, Debug)]
enum Progress {
    /// It ends before the event's mark passes.
    Marked,
    /// It has ended, or never began.
    Over(Result<(), MemoryError>),
    /// It may run for ever, as far as the driver says.
    Unknown(MemoryError),
}

impl Job {
    /// Takes the pages. Nothing is submitted yet.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState); the driver's errors.
    pub(crate) fn begin(
        tier: &Arc<Inner>,
        stream: &Stream,
        direction: Direction,
        pages: Vec<PageId>,
        (gpu, grants): (&GpuPages, Vec<GrantUse>),
        bytes: u64,
    ) -> Result<Self> {
        let event = Event::new(stream.driver(), stream.device(), false)?;
        tier.look(|table| table.begin_copy(&pages, direction))??;
        Ok(Self {
            held: Some(Held {
                tier: Arc::clone(tier),
                pages,
                _gpu: gpu.clone(),
                _grants: grants,
            }),
            progress: Progress::Over(Ok(())),
            event,
            stream: stream.clone(),
            direction,
            bytes,
        })
    }

    /// Submits work, and a mark behind it.
    ///
    /// # Errors
    /// Those of `put`, if no work has begun or it has ended again.
    ///
    /// # Safety
    /// The work uses the tier's pages and the memory of the job alone, or memory that the caller keeps until it has ended.
    pub(crate) unsafe fn submit(mut self, put: impl FnOnce() -> Result<()>) -> Result<Self> {
        // Should `put` unwind, the drop waits for the stream.
        self.progress = Progress::Unknown(MemoryError::failed("copies", "they were not submitted"));
        let put = put();
        self.progress = match (&put, self.event.record(&self.stream)) {
            (Ok(()), Ok(())) => Progress::Marked,
            // The error may be of earlier work, with some of this work on the stream.
            _ => after(self.stream.wait_until_over()),
        };
        match put {
            Err(error) if matches!(self.progress, Progress::Over(_)) => {
                self.progress = Progress::Over(Err(not_done(&error)));
                self.settle();
                Err(error)
            }
            _ => {
                self.settle();
                Ok(self)
            }
        }
    }

    /// Returns whether the copies have ended. Their pages are released then.
    ///
    /// Source: `cuEventQuery`.
    ///
    /// # Errors
    /// The error of the work: [`ContextLost`](crate::MemoryError::ContextLost) after an illegal access. The driver's, if it
    /// refuses the query. [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child.
    pub fn is_done(&mut self) -> Result<bool> {
        match &self.progress {
            Progress::Over(result) => Ok(result.clone().map(|()| true)?),
            Progress::Unknown(error) => Err(error.clone().into()),
            Progress::Marked => {
                self.stream.driver().expect_this_process("job")?;
                if !self.query()? {
                    return Ok(false);
                }
                self.progress = Progress::Over(Ok(()));
                self.settle();
                Ok(true)
            }
        }
    }

    fn query(&self) -> Result<bool, MemoryError> {
        let _relaxed = Relaxed::new(self.stream.driver());
        self.event.is_done()
    }

    /// Waits for the end of the copies.
    ///
    /// Source: `cuEventSynchronize`.
    ///
    /// # Errors
    /// As [`is_done`](Self::is_done).
    pub fn wait(mut self) -> Result<()> {
        self.finish();
        match &self.progress {
            Progress::Over(result) => Ok(result.clone()?),
            Progress::Unknown(error) => Err(error.clone().into()),
            Progress::Marked => Ok(self.stream.driver().expect_this_process("job")?),
        }
    }

    /// Waits for the end of the work, if the driver reports it.
    fn finish(&mut self) {
        if !matches!(self.progress, Progress::Marked) || !self.stream.driver().is_of_this_process()
        {
            return;
        }
        let first = {
            let _relaxed = Relaxed::new(self.stream.driver());
            self.event.synchronize()
        };
        self.progress = match first {
            Ok(()) => Progress::Over(Ok(())),
            // A refused wait says nothing about the work.
            Err(error) => self.after_refusal(error),
        };
        self.settle();
    }

    /// Asks again, by query and by the whole stream, after the driver refused a wait.
    fn after_refusal(&self, error: MemoryError) -> Progress {
        if matches!(error, MemoryError::ContextLost { .. }) {
            return Progress::Over(Err(error)); // a lost context runs nothing
        }
        for _ in 0..16 {
            match self.query() {
                Ok(true) => return Progress::Over(Err(error)),
                Ok(false) => {}
                Err(_) => break,
            }
            sleep(Duration::from_millis(1));
        }
        match after(self.stream.wait_until_over()) {
            Progress::Over(_) => Progress::Over(Err(error)),
            unknown => unknown,
        }
    }

    /// Releases the pages if the work has ended.
    fn settle(&mut self) {
        let Progress::Over(result) = &self.progress else {
            return;
        };
        let copied = result.is_ok().then_some((self.direction, self.bytes));
        if let Some(held) = self.held.take() {
            held.tier.unpin(&held.pages, copied);
        }
    }

    /// Returns the bytes that the job copies.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the stream of the copies.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }
}

fn after(waited: Waited) -> Progress {
    match waited {
        Waited { result, over: true } => Progress::Over(result),
        Waited { result, .. } => {
            let silent = || MemoryError::failed("copies", "the driver does not tell their end");
            Progress::Unknown(result.err().unwrap_or_else(silent))
        }
    }
}

/// Returns the error of copies of which not all were submitted.
fn not_done(error: &crate::Error) -> MemoryError {
    let other = || MemoryError::failed("copies", error.to_string());
    error.memory().cloned().unwrap_or_else(other)
}

impl Drop for Job {
    fn drop(&mut self) {
        self.finish();
        let Some(held) = self.held.take() else { return };
        // The GPU may still use it.
        mem::forget(held);
        if self.stream.driver().is_of_this_process()
            && let Progress::Unknown(error) = &self.progress
            && error.code() != Some(Code::DEINITIALIZED)
        {
            tracing::error!(%error, "the driver does not say whether copies of a tier have ended: the tier's memory is lost until the process ends");
        }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("progress", &self.progress)
            .field("direction", &self.direction)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}
