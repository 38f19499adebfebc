//! Copies in progress.

use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::kernel::{Kernel, Launch};
use super::{CopyMethod, Plan, may_do_otherwise};
use crate::driver::{Access, Relaxed};
use crate::inner::Inner;
use crate::memory::{Engine, GrantUse};
use crate::page::{Direction, PageId};
use crate::table::Use;
use crate::{Error, GpuPages, MemoryError, Result, Stream};
use egmem_core::Transfer;
use egmem_core::memory::expect_gpu_access;
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
    /// `None` once the end of the work was seen, or waited for in vain.
    ticket: Option<Transfer<Held>>,
    over: Result<(), MemoryError>,
    stream: Stream,
    bytes: u64,
}

/// The objects that the work uses. The use of the pages ends with it.
#[derive(Debug)]
struct Held {
    tier: Arc<Inner>,
    pages: Vec<PageId>,
    /// A load, as long as the pages are as before.
    of: Use,
    gpu: GpuPages,
    grants: Vec<GrantUse>,
    /// Of a kernel, with its GPU.
    list: Option<(i32, Arc<PinnedHost>)>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.tier.driver().is_of_this_process() {
            return;
        }
        if let Some((device, list)) = self.list.take() {
            let _relaxed = Relaxed::new(self.tier.driver()); // it may be freed
            self.tier.kernels.keep(device, list);
        }
        self.tier.end(take(&mut self.pages), self.of);
    }
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
    let mut held = tier.with(|table| {
        table.begin_copy(&pages, direction)?;
        Ok::<_, Error>(Held {
            tier: Arc::clone(tier),
            pages,
            of: Use::Load,
            gpu: gpu.clone(),
            grants: Vec::new(),
            list: None,
        })
    })??;
    // The pages are held: their places and sizes stay.
    let plan = Plan::new(tier, direction, stream, pairs, gpu)?;
    let job = |ticket| Job {
        ticket,
        over: Ok(()),
        stream: stream.clone(),
        bytes: plan.bytes,
    };
    if pairs.is_empty() {
        return Ok(job(None));
    }
    let may_batch = || !tier.no_batches.load(Ordering::Relaxed) && !is_legacy_default(stream);
    let mut refused = None;
    let least = gpu.places().map(|place| place.shape.bytes).min();
    for choice in method.choices(least.unwrap_or_default()) {
        if method == CopyMethod::Auto && choice == CopyMethod::Batch && !may_batch() {
            continue;
        }
        let (back, error) = match submit(choice, &plan, held) {
            Ok(ticket) => return Ok(job(Some(ticket))),
            Err(refusal) => refusal,
        };
        if choice == CopyMethod::Batch {
            tier.note_batch_error(&error);
        }
        // The next method repeats copies that a refused one may have made already. It must not run beside the refused one.
        match back {
            Some(back) if may_do_otherwise(&error) => held = back,
            _ => return Err(error.into()),
        }
        refused = Some(error);
    }
    // The method, where the platform lacks what it needs: another one may do.
    Err(match refused {
        Some(MemoryError::PlatformUnsupported { what, source }) => {
            Error::UnusableMethod { what, source }
        }
        Some(error) => error.into(),
        None => MemoryError::invalid("method", "there is none").into(),
    })
}

/// Checks a method's requirements, and submits the copies by it.
///
/// # Errors
/// Why the method does not work here, or the driver's errors; with what is held if no copy runs. Otherwise that is kept for ever.
#[expect(
    clippy::result_large_err,
    reason = "a box would be an allocation for each job that takes another method"
)]
fn submit(
    method: CopyMethod,
    plan: &Plan<'_>,
    mut held: Held,
) -> Result<Transfer<Held>, (Option<Held>, MemoryError)> {
    let kernel = match prepare(method, plan, &mut held) {
        Ok(kernel) => kernel,
        Err(error) => return Err((Some(held), error)),
    };
    let mut refused = None;
    let put = |held: &mut Held| {
        // Set before the call, because an error does not say whether the driver has begun some of the copies: a store's pages are spoilt.
        held.of = Use::Copy(plan.direction, None);
        let put = match (&kernel, &held.list) {
            (Some((kernel, launch)), Some((_, list))) => {
                // SAFETY: the stream is of the kernel's GPU, for which `prepare` has loaded it, and has access, as it has checked. The
                // pages, the list and the parts are held until the work has ended, and so is the kernel, by the tier; memory of the
                // caller's stays by the promise of `GpuPages::from_raw`. Access is not revoked meanwhile. `launch` has checked that
                // all is aligned, and the list was made for it.
                unsafe { kernel.launch(launch, list) }
            }
            // SAFETY: pages and parts are held, as above.
            _ if method == CopyMethod::Batch => unsafe { plan.copy_batch() },
            // SAFETY: as above.
            _ => unsafe { plan.copy_each() },
        };
        put.inspect_err(|error| refused = Some(error.clone()))
    };
    // SAFETY: everything goes to the plan's stream, which `start` has found not to be captured, and uses what is held, as just said.
    let started = unsafe { Transfer::submit(plan.stream, held, put) };
    match (started, refused) {
        (Ok(ticket), None) => Ok(ticket),
        // The driver does not report an end: the ticket's drop keeps what it holds for ever.
        (Ok(_), Some(error)) => Err((None, error)),
        (Err(not), _) => Err((Some(not.operands), *not.error)),
    }
}

/// Checks a method's requirements, and takes what it needs: a kernel for one.
///
/// # Errors
/// Why the method does not work here; the driver's errors.
fn prepare<'a>(
    method: CopyMethod,
    plan: &'a Plan<'_>,
    held: &mut Held,
) -> Result<Option<(Arc<Kernel>, Launch<'a>)>, MemoryError> {
    let (tier, stream) = (Arc::clone(&held.tier), plan.stream);
    if method == CopyMethod::Batch {
        if tier.borders().is_none() || held.gpu.has_unknown_borders() {
            return Err(unsupported(NO_BORDERS));
        }
        held.gpu.find_borders(tier.driver());
    }
    let engine = match method {
        CopyMethod::Kernel { .. } => Engine::Kernel,
        _ => Engine::Copy,
    };
    let (of_tier, of_gpu) = match plan.direction {
        Direction::Load => (Access::Read, Access::ReadWrite),
        Direction::Store => (Access::ReadWrite, Access::Read),
    };
    // SAFETY: the stream lives, and is of the tier's driver.
    unsafe { tier.memory.ready_on(stream.handle())? };
    let (who, all) = ((stream.device(), engine), (0, tier.bytes()));
    expect_gpu_access(&tier.memory, who, all, of_tier)?;
    held.grants = held.gpu.ready(stream, engine, of_gpu)?;
    let CopyMethod::Kernel { blocks } = method else {
        return Ok(None);
    };
    let kernel = tier.kernels.on(tier.driver(), stream.device())?;
    let launch = plan.launch(blocks);
    let launch = launch.ok_or_else(|| unsupported(UNALIGNED))?;
    let (device, bytes) = (stream.device(), launch.list_bytes());
    held.list = Some((device, tier.kernels.list(tier.driver(), device, bytes)?));
    Ok(Some((kernel, launch)))
}

/// Returns whether a stream is the legacy default stream, which takes no batches: 0, and `CU_STREAM_LEGACY`.
fn is_legacy_default(stream: &Stream) -> bool {
    matches!(stream.handle().raw, 0 | 1)
}

const NO_BORDERS: &str = "a batch needs memory that tells where its allocations border";
const UNALIGNED: &str = "a kernel needs addresses and sizes that are multiples of 16 bytes";

const fn unsupported(what: &'static str) -> MemoryError {
    MemoryError::PlatformUnsupported { what, source: None }
}

impl Job {
    /// Returns whether the copies have ended. Their pages are released then.
    ///
    /// Source: `cuEventQuery`.
    ///
    /// # Errors
    /// The error of the work: [`ContextLost`](crate::MemoryError::ContextLost) after an illegal access. The driver's,
    /// if it refuses the query. [`InvalidArgument`](crate::MemoryError::InvalidArgument) in a forked child.
    pub fn is_done(&mut self) -> Result<bool> {
        // The error of work that has ended must not keep the pages.
        if let Some(ticket) = &self.ticket
            && !ticket.is_over()
            && !ticket.is_done()?
        {
            return Ok(false);
        }
        self.finish();
        Ok(self.over.clone().map(|()| true)?)
    }

    /// Waits for the end of the copies.
    ///
    /// Source: `cuEventSynchronize`.
    ///
    /// # Errors
    /// As [`is_done`](Self::is_done).
    pub fn wait(mut self) -> Result<()> {
        self.finish();
        Ok(self.over.clone()?)
    }

    /// Waits for the end of the work, if the driver reports it, and releases the pages.
    fn finish(&mut self) {
        let Some(ticket) = self.ticket.take() else {
            return;
        };
        self.over = match ticket.wait() {
            Ok(mut held) => {
                if let Use::Copy(_, copied) = &mut held.of {
                    *copied = Some(self.bytes);
                }
                Ok(())
            }
            Err(failed) => Err(*failed.error),
        };
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

impl Drop for Job {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Call, Code};
    use crate::memory::Memory;
    use crate::{Buffer, Driver, Key, Tier};
    use egmem_core::Machine;

    #[test]
    fn a_job_that_has_ended_with_an_error_releases_its_pages() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let sim = driver.sim().unwrap();
        let memory = Arc::new(Buffer::near(&driver, 0, 4096).unwrap());
        let stream = Stream::new(&driver, 0).unwrap();
        let tier = Tier::on(memory.location()).pages(1).page_bytes(4096);
        let tier = tier.create(&driver).unwrap();
        let gpu = GpuPages::over(vec![(memory, 0)], 4096, 4096).unwrap();
        let store = tier.prepare_store(&[Key::new([1; 32])]).unwrap();
        let pairs = store.pairs(&[0]).unwrap();
        // There is no mark, and the wait for the stream is refused once; the query after it reports the end.
        sim.fail(Call::EventRecord, 1, Code::UNKNOWN);
        sim.fail(Call::StreamSynchronize, 1, Code::UNKNOWN);
        let job = tier.store_by(CopyMethod::Loop, &stream, &pairs, &gpu);
        let mut job = job.unwrap();
        drop(store);
        assert_eq!(tier.stats().writing, 1);
        for _ in 0..2 {
            let failed = job.is_done();
            assert!(failed.is_err(), "{failed:?}");
            assert_eq!((tier.stats().free, tier.stats().writing), (1, 0));
        }
    }
}
