//! Copies in progress.

use std::mem;
use std::sync::Arc;

use super::Plan;
use super::{CopyMethod, may_do_otherwise};
use crate::driver::{Access, Code, Location, Relaxed};
use crate::inner::Inner;
use crate::table::Use;
use crate::memory::{Engine, GrantUse};
use crate::page::{Direction, PageId};
use crate::stream::Waited;
use crate::{Event, GpuPages, MemoryError, Result, Stream};
use egmem_core::pinned::PinnedHost;

/// Copies in progress, and a ticket for them.
///
/// The job keeps the tier, its pages, and memory of [`GpuPages::over`] until the work has ended: no page is evicted,
/// and nothing is unmapped. [`is_done`](Self::is_done) queries the job; [`wait`](Self::wait) and dropping the job
/// wait for it. A job that is [forgotten](std::mem::forget) keeps everything for ever, and so does one whose end the
/// driver does not report.
#[derive(Debug)]
#[must_use = "dropped, it waits for the end of the copies"]
pub struct Job {
    /// `None` once the work has ended.
    held: Option<Held>,
    progress: Progress,
    /// Some of the copies may have begun.
    is_submitted: bool,
    event: Event,
    stream: Stream,
    direction: Direction,
    bytes: u64,
}

/// The objects that the work uses.
#[derive(Debug)]
struct Held {
    tier: Arc<Inner>,
    pages: Vec<PageId>,
    gpu: GpuPages,
    _grants: Vec<GrantUse>,
    /// Of a kernel.
    list: Option<Arc<PinnedHost>>,
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

/// Starts the copies of `pairs`.
///
/// # Errors
/// Those of [`Tier::load_by`](crate::Tier::load_by).
pub(crate) fn start(
    tier: &Arc<Inner>,
    (direction, method): (Direction, CopyMethod),
    stream: &Stream,
    pairs: &[(PageId, u64)],
    gpu: &GpuPages,
) -> Result<Job> {
    tier.expect_this_process()?;
    tier.driver().expect_same(stream.driver(), "stream")?;
    method.check()?;
    // Lists, modules and waits in the thread's own mode would end captures of other threads.
    let _relaxed = Relaxed::new(stream.driver());
    stream.expect_no_capture()?;
    let pages: Vec<PageId> = pairs.iter().map(|&(page, _)| page).collect();
    let mut job = Job::begin(tier, stream, direction, pages, gpu)?;
    // The job has the pages: their places and sizes stay.
    let plan = Plan::new(tier, direction, stream, pairs, gpu)?;
    job.bytes = plan.bytes;
    if pairs.is_empty() {
        job.progress = Progress::Over(Ok(()));
        job.settle();
        return Ok(job);
    }
    let is_auto = method == CopyMethod::Auto;
    let mut refused = None;
    for method in method.choices(gpu.least_part_bytes()) {
        if method == CopyMethod::Batch {
            if tier.borders().is_none() || gpu.has_unknown_borders() {
                refused.get_or_insert_with(|| unsupported(NO_BORDERS));
                continue;
            }
            if is_auto && (tier.has_no_batches() || is_legacy_default(stream)) {
                continue;
            }
            gpu.find_borders(tier.driver());
        }
        match job.try_method(method, &plan) {
            Ok(()) => return Ok(job),
            // The next method repeats copies that a refused one may have made already. It must not run beside the
            // refused one: the resources that the job keeps are for one method, and its end is that of the last one.
            Err(error) if may_do_otherwise(&error) && job.is_over() => refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    // Dropping the job releases the pages.
    let none = || MemoryError::invalid("method", "there is none").into();
    Err(refused.map_or_else(none, of_method))
}

/// Returns whether a stream is the legacy default stream, which takes no batches: 0, and `CU_STREAM_LEGACY`.
fn is_legacy_default(stream: &Stream) -> bool {
    matches!(stream.handle().raw, 0 | 1)
}

/// Refuses a tier that `engine` of the stream's GPU may not use.
///
/// # Errors
/// [`NotAccessible`](crate::MemoryError::NotAccessible); the driver's errors.
fn expect_tier_access(tier: &Inner, stream: &Stream, engine: Engine, need: Access) -> Result<()> {
    // SAFETY: the stream lives, and is of the tier's driver.
    unsafe { tier.memory.ready_on(stream.handle())? };
    let device = stream.device();
    let have = tier.memory.gpu_access(device, engine, 0, tier.bytes())?;
    if have < need {
        let who = Location::Device(device);
        return Err(MemoryError::not_accessible(who, have, need).into());
    }
    Ok(())
}

const NO_BORDERS: &str = "a batch needs memory that tells where its allocations border";
const UNALIGNED: &str = "a kernel needs addresses and sizes that are multiples of 16 bytes";

fn not_submitted() -> MemoryError {
    MemoryError::failed("copies", "they were not submitted")
}

fn unsupported(what: &'static str) -> crate::Error {
    MemoryError::PlatformUnsupported { what, source: None }.into()
}

/// Names the method where the platform lacks what it needs: another one may do.
fn of_method(error: crate::Error) -> crate::Error {
    match error {
        crate::Error::Memory(MemoryError::PlatformUnsupported { what, source }) => {
            crate::Error::UnusableMethod { what, source }
        }
        other => other,
    }
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
        gpu: &GpuPages,
    ) -> Result<Self> {
        let event = Event::new(stream.driver(), stream.device(), false)?;
        tier.with(|table| {
            table.begin_copy(&pages, direction)?;
            Ok(Self {
                held: Some(Held {
                    tier: Arc::clone(tier),
                    pages,
                    gpu: gpu.clone(),
                    _grants: Vec::new(),
                    list: None,
                }),
                progress: Progress::Over(Err(not_submitted())),
                is_submitted: false,
                event,
                stream: stream.clone(),
                direction,
                bytes: 0,
            })
        })?
    }

    /// Checks a method's requirements, and submits the copies by it.
    ///
    /// # Errors
    /// Why the method does not work here, or the driver's errors: the copies that were submitted have ended then, or
    /// the pages are kept for ever.
    fn try_method(&mut self, method: CopyMethod, plan: &Plan<'_>) -> Result<()> {
        let engine = match method {
            CopyMethod::Kernel { .. } => Engine::Kernel,
            _ => Engine::Copy,
        };
        let (of_tier, of_gpu) = match self.direction {
            Direction::Load => (Access::Read, Access::ReadWrite),
            Direction::Store => (Access::ReadWrite, Access::Read),
        };
        let is_over = self.is_over();
        let Some(held) = self.held.as_mut().filter(|_| is_over) else {
            return Err(MemoryError::failed("copies", "an earlier method's have no end").into());
        };
        let tier = Arc::clone(&held.tier);
        expect_tier_access(&tier, &self.stream, engine, of_tier)?;
        held._grants = held.gpu.ready(&self.stream, engine, of_gpu)?;
        // SAFETY, for each: the plan is of the job's tier, stream, pages and parts. The job keeps the tier's memory, its pages,
        // the list and the parts until the work has ended; memory of the caller's stays by the promise of
        // `GpuPages::from_raw`. Access was checked, and is not
        // revoked meanwhile.
        match method {
            CopyMethod::Kernel { blocks } => {
                let device = self.stream.device();
                let kernel = tier.kernels.on(tier.driver(), device)?;
                let launch = plan.launch(blocks);
                let launch = launch.ok_or_else(|| unsupported(UNALIGNED))?;
                let list = tier
                    .kernels
                    .list(tier.driver(), device, launch.list_bytes())?;
                held.list = Some(Arc::clone(&list));
                // SAFETY: as said above.
                self.submit(|| unsafe { kernel.launch(&launch, &list) })
            }
            CopyMethod::Batch => {
                // SAFETY: as said above.
                self.submit(|| unsafe { plan.copy_batch() })
                    .inspect_err(|error| tier.note_batch_error(error))
            }
            _ => {
                // SAFETY: as said above.
                self.submit(|| unsafe { plan.copy_each() })
            }
        }
    }

    /// Submits work that uses only the resources that the job keeps, and a mark behind it.
    ///
    /// # Errors
    /// Those of `put`.
    fn submit(&mut self, put: impl FnOnce() -> Result<(), MemoryError>) -> Result<()> {
        // If `put` unwinds, the job keeps everything for ever.
        self.progress = Progress::Unknown(not_submitted());
        self.is_submitted = true;
        let put = put();
        self.progress = match (&put, self.event.record(&self.stream)) {
            (Ok(()), Ok(())) => Progress::Marked,
            // The error may be of earlier work, with some of this work on the stream.
            _ => after(self.stream.wait_until_over()),
        };
        match put {
            Ok(()) => {
                self.settle();
                Ok(())
            }
            Err(error) => {
                // Another method may follow.
                if let Progress::Over(_) = self.progress {
                    self.progress = Progress::Over(Err(error.clone()));
                }
                Err(error.into())
            }
        }
    }

    /// Returns whether no copy runs.
    const fn is_over(&self) -> bool {
        matches!(self.progress, Progress::Over(_))
    }

    /// Returns whether the copies have ended. Their pages are released then.
    ///
    /// Source: `cuEventQuery`.
    ///
    /// # Errors
    /// The error of the work: [`ContextLost`](crate::MemoryError::ContextLost) after an illegal access. The driver's,
    /// if it refuses the query. [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child.
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
        // Not for the stream: its handle may be that of another stream in this thread.
        self.progress = after({
            let _relaxed = Relaxed::new(self.stream.driver());
            self.event.wait_until_over()
        });
        self.settle();
    }

    /// Releases the pages if the work has ended.
    fn settle(&mut self) {
        let Progress::Over(result) = &self.progress else {
            return;
        };
        let copied = result.is_ok().then_some(self.bytes);
        if let Some(mut held) = self.held.take() {
            if let Some(list) = held.list.take() {
                let _relaxed = Relaxed::new(self.stream.driver()); // it may be freed
                held.tier.kernels.keep(list);
            }
            let of = match copied {
                // The pages are as before.
                None if !self.is_submitted => Use::Load,
                copied => Use::Copy(self.direction, copied),
            };
            held.tier.end(held.pages, of);
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

impl Drop for Job {
    fn drop(&mut self) {
        self.finish();
        if self.stream.driver().is_of_this_process() {
            self.settle(); // a job that was refused
        }
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
