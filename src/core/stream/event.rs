//! Events: points in streams' work, and what other processes have of them; waits for the end of work.

use std::io::PipeReader;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::sleep;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::driver::{Driver, EventHandle, IpcEventHandle, Relaxed};
use crate::fork::PerProcess;
use crate::guard::on_gpu;
use crate::per_driver::lock;
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

/// A point in a stream's work, destroyed when dropped. One that is [lent](Self::lend) to other processes is destroyed after
/// they have let go of it.
#[derive(Debug)]
pub struct Event {
    pub(super) driver: Driver,
    pub(super) handle: EventHandle,
    /// How many uses need the mark to stay where it is. Locked while it moves.
    pub(super) held: Mutex<u64>,
    pub(super) sharing: Sharing,
}

impl Event {
    /// Creates an event on GPU `device`; without `timing` it is cheaper.
    ///
    /// Source: `cuEventCreate`.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`](crate::Error::NoSuchGpu), or the driver's error.
    pub fn new(driver: &Driver, device: i32, timing: bool) -> Result<Self> {
        let handle = on_gpu(driver, device, driver.event_create(device, timing))?;
        Ok(Self::of(driver, handle, Sharing::Private))
    }

    /// Takes over a driver's event.
    pub(super) fn of(driver: &Driver, handle: EventHandle, sharing: Sharing) -> Self {
        Self {
            driver: driver.clone(),
            handle,
            held: Mutex::new(0),
            sharing,
        }
    }

    /// Waits until the marked work is done; at once if the event was never recorded. Captures of streams into CUDA graphs are
    /// not disturbed.
    ///
    /// # Errors
    /// As [`Stream::synchronize`](super::Stream::synchronize); CAPTURED_EVENT for an event that was recorded on a stream
    /// during its capture. [`Error::System`](crate::Error::System) with `EOWNERDEAD` for an event of a process that has
    /// ended before the work.
    pub fn synchronize(&self) -> Result<()> {
        if self.is_imported() {
            return self.synchronize_imported();
        }
        let _relaxed = Relaxed::new(&self.driver);
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.driver.event_synchronize(self.handle) }
    }

    /// Returns whether the marked work is done. Captures of streams into CUDA graphs are not disturbed.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    pub fn is_done(&self) -> Result<bool> {
        let exporter = self.expect_exporter();
        let _relaxed = Relaxed::new(&self.driver);
        // SAFETY: `self` keeps the handle alive.
        let is_done = unsafe { self.driver.event_query(self.handle)? };
        if !is_done {
            exporter?;
        }
        Ok(is_done)
    }

    /// Waits until the marked work has ended, for a caller that must not unmap the work's memory before. As
    /// [`Stream::wait_until_over`](super::Stream::wait_until_over), and also right for work that another thread submitted to
    /// `CU_STREAM_PER_THREAD`, which is another stream in each thread.
    pub fn wait_until_over(&self) -> Waited {
        wait_until_over(|| self.synchronize(), || self.is_done())
    }

    /// Returns the milliseconds from `start` to this event, both created with timing and done; 0 on the
    /// simulator.
    ///
    /// # Errors
    /// The driver's errors: NOT_READY before both are done, INVALID_HANDLE without timing.
    pub fn elapsed_ms_since(&self, start: &Self) -> Result<f32> {
        self.driver.expect_same(&start.driver, "event")?;
        // SAFETY: the borrows keep both handles alive.
        unsafe { self.driver.event_elapsed_ms(start.handle, self.handle) }
    }

    /// Returns the driver's handle.
    pub const fn handle(&self) -> EventHandle {
        self.handle
    }

    /// Returns the event's driver.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Keeps the mark where it is while the result lives: the event cannot be recorded again.
    pub fn hold(self: Arc<Self>) -> Held {
        *lock(&self.held) += 1;
        Held(self)
    }
}

/// An event that is not recorded again while this lives.
#[derive(Debug)]
pub struct Held(Arc<Event>);

impl Deref for Held {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // In a forked child this lock may never be released.
        if self.0.driver.is_of_this_process() {
            *lock(&self.0.held) -= 1;
        }
    }
}

/// Returns the events that this process has dropped while other processes held them. Each keeps its driver alive.
pub(super) fn kept() -> MutexGuard<'static, Vec<Event>> {
    static KEPT: PerProcess<Mutex<Vec<Event>>> = PerProcess::new();
    lock(KEPT.get(|_| Mutex::default()))
}

impl Drop for Event {
    fn drop(&mut self) {
        // In a forked child this lock may never be released.
        if let Sharing::Lent(holders) = &self.sharing
            && self.driver.is_of_this_process()
        {
            let mut holders = std::mem::take(&mut *lock(holders));
            holders.retain(|holder| !is_closed(holder));
            let is_held = !holders.is_empty();
            if is_held {
                let sharing = Sharing::Lent(Mutex::new(holders));
                kept().push(Self::of(&self.driver, self.handle, sharing));
            }
            sweep();
            if is_held {
                return;
            }
        }
        give_back_or_log(&self.driver, "an event", || {
            // SAFETY: owned by `self`, and no other process holds it; the driver keeps an event that work still waits for.
            unsafe { self.driver.event_destroy(self.handle) }
        });
    }
}

/// What other processes have of an event.
#[derive(Debug)]
pub(super) enum Sharing {
    /// Nothing: they cannot open it.
    Private,
    /// The other ends of these pipes, one for each time that it was lent.
    Lent(Mutex<Vec<PipeReader>>),
    /// It is another process's, which keeps it while this end of its pipe is open. `None`: the caller sees to that.
    Imported(Option<OwnedFd>),
}

/// An event for another process.
#[derive(Debug)]
pub struct LentEvent {
    /// The event.
    pub handle: IpcEventHandle,
    /// An end of a pipe: the lender keeps its event until all duplicates of it are closed, in every process.
    pub tether: OwnedFd,
}

/// Destroys events that no other process holds any more.
pub(super) fn sweep() {
    let is_returned = |event: &mut Event| match &event.sharing {
        Sharing::Lent(holders) => {
            lock(holders).retain(|holder| !is_closed(holder));
            lock(holders).is_empty()
        }
        Sharing::Private | Sharing::Imported(_) => false,
    };
    let mut returned: Vec<Event> = kept().extract_if(.., is_returned).collect();
    // Their drops look for no others.
    for event in &mut returned {
        event.sharing = Sharing::Private;
    }
    // Outside the lock, because a driver call takes time.
    drop(returned);
}

/// Returns whether all duplicates of a pipe's other end are closed. If the kernel does not tell, they are not.
pub(super) fn is_closed(pipe: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(pipe, PollFlags::empty())];
    // A reader sees HUP, a writer ERR. The call does not wait.
    let ready = poll(&mut fds, Some(&Timespec::default()));
    ready.is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// How often a driver may refuse both the wait and the query before it counts as silent.
pub(super) const TRIES: u32 = 16;
/// How long after one refusal the driver is asked again.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// The driver's answer about the end of work.
#[derive(Debug)]
#[must_use = "the work may still run"]
pub struct Waited {
    /// The driver's first error: of the work, or only of the wait.
    pub result: Result<()>,
    /// Whether the work has certainly ended.
    pub over: bool,
}

/// Waits for the end of work with `wait`, and queries it with `is_done` if the wait is refused.
///
/// A refused wait says nothing about the work, so the wait is repeated while the driver says that work is
/// still running. Gives up after some refusals of both the wait and the query. CUDA returns the error of a
/// lost context from every later call, and the work of such a context has ended.
pub(super) fn wait_until_over(
    wait: impl Fn() -> Result<()>,
    is_done: impl Fn() -> Result<bool>,
) -> Waited {
    let result = wait();
    let mut last = result.clone();
    let mut refusals = 0;
    let over = loop {
        let Err(error) = &last else { break true };
        if matches!(error, Error::ContextLost { .. }) {
            break true;
        }
        if refusals == TRIES {
            break false;
        }
        tracing::warn!(%error, "waiting for GPU work is refused: trying once more");
        match is_done() {
            Ok(true) => break true,
            Ok(false) => {}
            Err(_) => refusals += 1,
        }
        sleep(PAUSE);
        last = wait();
    };
    Waited { result, over }
}
