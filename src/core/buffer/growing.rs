//! Memory that grows in a thread of its own while the program uses its front.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::BufferOptions;
use super::allocate::Plan;
use crate::backing::Chosen;
use crate::driver::{Access, DevicePtr, Driver, Location};
use crate::growth::{GrowthState, Progress};
use crate::memory::{AccessChecks, CpuView, Engine, check_range, impl_cpu_memory, impl_memory};
use crate::per_driver::lock;
use crate::vmm::{Adjacent, Mapped, MappedPart, MappedRange, Mapping, Reservation};
use crate::{Error, Result, ledger};

impl BufferOptions {
    /// Reserves the addresses of the whole memory, creates the chunks that have its first `front` bytes, and starts a
    /// thread that creates the chunks behind them. Without such chunks there is no thread.
    ///
    /// `progress` is called after each chunk as by [`allocate_with`](Self::allocate_with): for the front by the calling
    /// thread, and for the rest by the new one. If it breaks, a front is given back, and later memory stays and grows
    /// no further.
    ///
    /// # Errors
    /// As `allocate_with`, for the front; [`Error::System`] if the thread cannot be started. Errors of the thread are
    /// [`GrowingBuffer::error`]'s.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use egmem::driver::NodeId;
    /// use egmem::{Buffer, Driver, Growth, GrowthState, Machine, Memory};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let options = Buffer::on(NodeId(0)).bytes(64 << 20).growth(Growth::steady().chunk(4 << 20));
    /// let buffer = options.allocate_in_background(&driver, 4096, |_| ControlFlow::Continue(()))?;
    /// buffer.cpu()?.put(0, 1_u64)?; // the front is there
    /// assert!(buffer.len() >= 4096);
    /// buffer.wait()?;
    /// assert_eq!((buffer.len(), buffer.growth()), (64 << 20, GrowthState::Complete));
    /// # Ok::<(), egmem::Error>(())
    /// ```
    #[track_caller]
    pub fn allocate_in_background(
        mut self,
        driver: &Driver,
        front: u64,
        mut progress: impl FnMut(Progress) -> ControlFlow<()> + Send + 'static,
    ) -> Result<GrowingBuffer> {
        let mut plan = Plan::default();
        plan.decide(&mut self, driver, ledger::Site::here())?;
        let shared = Arc::new(Shared::new(
            plan.addresses(&self, driver)?,
            plan.chunks.len(),
        ));
        let resting = Arc::clone(&shared);
        let mut after = move |made, rest: Option<Duration>| {
            progress(made)?;
            rest.map_or(ControlFlow::Continue(()), |time| resting.rest(time))
        };
        let front = front.min(plan.padded);
        let push = |part| shared.push(part);
        if let Err(error) = plan.grow(&mut self, driver, front, push, &mut after) {
            // Given back first, as by `allocate_with`.
            drop((after, shared));
            return Err(plan.with_all_requested(driver, error));
        }
        let mut buffer = GrowingBuffer {
            driver: driver.clone(),
            location: plan.location(),
            len: self.len(),
            padded: plan.padded,
            shared,
            chosen: self.memory.decision().clone(),
            thread: None,
        };
        if buffer.shared.done() < plan.padded {
            buffer.start(self, plan, after)?;
        } else {
            buffer.shared.end(Ok(()));
        }
        Ok(buffer)
    }
}

/// Memory that grows in a thread of its own, until it has all its bytes. [`BufferOptions::allocate_in_background`] creates it.
///
/// Its address does not change. [`len`](crate::Memory::len) and the CPU's view have the bytes that are there: chunks that are
/// mapped and granted, side by side from the start on. A shared reference is enough to see more of them come.
///
/// Dropped, it ends the growth, waits for the chunk under way, and gives everything back. Before that, GPU work that uses
/// it must have finished. Dropped by the progress function, it leaves the last two to the thread.
#[derive(Debug)]
pub struct GrowingBuffer {
    driver: Driver,
    location: Location,
    /// The bytes requested.
    len: u64,
    /// Those bytes in whole granules.
    padded: u64,
    /// The thread has it too, and keeps the memory until it ends.
    shared: Arc<Shared>,
    chosen: Chosen,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    start: DevicePtr,
    /// Parts are only added, and their access does not change. Locked for moments, and for one query of the driver.
    range: RwLock<MappedRange>,
    /// Keeps the addresses, also while there are no parts.
    _addresses: Arc<Reservation>,
    /// Bytes that have parts, mapped and granted.
    done: AtomicU64,
    /// The flags of the least that the host may do with a part. Stored before `done`.
    host: AtomicU32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_cancelled: bool,
    /// The result of the growth once it has ended.
    end: Option<Result<()>>,
}

impl Shared {
    fn new(addresses: Arc<Reservation>, chunks: usize) -> Self {
        Self {
            start: addresses.start(),
            range: RwLock::new(MappedRange::with_capacity(chunks)),
            _addresses: addresses,
            done: AtomicU64::new(0),
            host: AtomicU32::new(Access::ReadWrite.flags()),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Adds a part, which is mapped behind those before it and granted.
    fn push(&self, part: MappedPart) {
        let mut range = self.range.write().unwrap_or_else(PoisonError::into_inner);
        let (done, host) = (part.mapping().range().end, part.mapping().host());
        range.push(part);
        self.host.fetch_and(host.flags(), Ordering::Relaxed);
        self.done.store(done, Ordering::Release);
    }

    /// Calls `look` with the parts so far. A thread that adds a part waits meanwhile.
    fn look<T>(&self, look: impl FnOnce(Adjacent<'_, Mapping>) -> T) -> T {
        let range = self.range.read().unwrap_or_else(PoisonError::into_inner);
        look(range.all())
    }

    fn cancel(&self) {
        lock(&self.state).is_cancelled = true;
        self.changed.notify_all();
    }

    /// Waits for `time`, or until the growth is cancelled.
    fn rest(&self, time: Duration) -> ControlFlow<()> {
        let goes_on = |state: &mut State| !state.is_cancelled;
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.state), time, goes_on);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.is_cancelled {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// Ends the growth, unless it has ended.
    fn end(&self, result: Result<()>) {
        lock(&self.state).end.get_or_insert(result);
        self.changed.notify_all();
    }
}

impl GrowingBuffer {
    fn start(
        &mut self,
        mut options: BufferOptions,
        mut plan: Plan,
        mut after: impl FnMut(Progress, Option<Duration>) -> ControlFlow<()> + Send + 'static,
    ) -> Result<()> {
        let (driver, shared) = (self.driver.clone(), Arc::clone(&self.shared));
        let grow = move || {
            // Also a panic of the progress function ends the growth.
            let ended = catch_unwind(AssertUnwindSafe(|| {
                let all = plan.padded;
                let push = |part| shared.push(part);
                let result = plan.grow(&mut options, &driver, all, push, &mut after);
                // A break after the last chunk leaves nothing out.
                let is_complete = shared.done() == all;
                // The chunks that were made ahead are given back before waiting callers return.
                drop(plan);
                // The caller's function may own this buffer.
                drop(after);
                if is_complete { Ok(()) } else { result }
            }));
            let (result, panic) = match ended {
                Ok(result) => (result, None),
                Err(panic) => {
                    let failed = Error::failed("growth in the background", "the thread panicked");
                    (Err(failed), Some(panic))
                }
            };
            shared.end(result);
            // Only now: its own drop may panic.
            drop(panic);
        };
        let thread = thread::Builder::new().name("egmem-growth".into());
        let thread = thread.spawn(grow);
        self.thread =
            Some(thread.map_err(|error| Error::system("starting a thread for growth", &error))?);
        Ok(())
    }

    /// Returns what the memory is, and why.
    pub const fn backing(&self) -> &Chosen {
        &self.chosen
    }

    /// Returns the bytes requested, which [`len`](crate::Memory::len) is once the growth is complete.
    pub const fn total(&self) -> u64 {
        self.len
    }

    /// Returns how many bytes are there, padding included, and how many there are to be.
    pub fn progress(&self) -> Progress {
        Progress::new(self.shared.done(), self.padded)
    }

    /// Returns whether the memory grows. A forked child sees it as stopped.
    pub fn growth(&self) -> GrowthState {
        match self.end() {
            None => GrowthState::Growing,
            Some(Ok(())) => GrowthState::Complete,
            Some(Err(_)) => GrowthState::Stopped,
        }
    }

    /// Returns the error that ended the growth: the driver's, or [`Error::Cancelled`]. A shortage is that of one chunk.
    pub fn error(&self) -> Option<Error> {
        self.end()?.err()
    }

    /// Returns the result of the growth if it has ended. A forked child, where the lock may be held for ever, has no thread.
    fn end(&self) -> Option<Result<()>> {
        match self.driver.expect_this_process("growing memory") {
            Ok(()) => lock(&self.shared.state).end.clone(),
            Err(error) => Some(Err(error)),
        }
    }

    /// Ends the growth after the chunk under way. The memory until then stays. Returns at once, and has no effect in a
    /// forked child.
    pub fn cancel(&self) {
        if self.driver.is_of_this_process() {
            self.shared.cancel();
        }
    }

    /// Waits until the growth has ended.
    ///
    /// # Errors
    /// [`error`](Self::error)'s; [`Error::InvalidArgument`] if the progress function calls this, and in a forked child.
    pub fn wait(&self) -> Result<()> {
        loop {
            if let Some(result) = self.wait_timeout(Duration::MAX) {
                return result;
            }
        }
    }

    /// As [`wait`](Self::wait), for at most `time`. `None` if the memory still grows then.
    ///
    /// # Errors
    /// As `wait`.
    pub fn wait_timeout(&self, time: Duration) -> Option<Result<()>> {
        if let Some(result) = self.end() {
            return Some(result);
        }
        let own = self.thread.as_ref().map(|thread| thread.thread().id());
        if own == Some(thread::current().id()) {
            let why = "the progress function would wait for itself";
            return Some(Err(Error::invalid("wait", why)));
        }
        let grows = |state: &mut State| state.end.is_none();
        let state = lock(&self.shared.state);
        let waited = self.shared.changed.wait_timeout_while(state, time, grows);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.end.clone()
    }

    /// Looks at the mappings so far, unless a forked child asks, which must not take the lock.
    fn look<T>(&self, look: impl FnOnce(Adjacent<'_, Mapping>) -> T) -> Option<T> {
        let is_here = self.driver.is_of_this_process();
        is_here.then(|| self.shared.look(look))
    }

    /// Returns the CPU's view of the bytes that are there.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read all of them.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        let len = self.shared.done().min(self.len);
        // Later parts may allow less than those that are viewed.
        let have = Access::from_flags(self.shared.host.load(Ordering::Relaxed).into());
        // SAFETY: `done` bytes from the start on are mapped side by side, with at least this access. Parts stay, and their
        // access does not change, until the last of this value and the thread is dropped. Safe code reaches the bytes
        // through atomic views only.
        unsafe { CpuView::granted(self.shared.start, len, have.unwrap_or(Access::None)) }
    }
}

impl Drop for GrowingBuffer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if !self.driver.is_of_this_process() {
            // A forked child does not have the thread, and unmaps nothing.
            return std::mem::forget(thread);
        }
        self.shared.cancel();
        if thread.thread().id() != thread::current().id() {
            // A panic of the progress function was caught, and is `error`'s.
            let _ = thread.join();
        }
    }
}

impl_cpu_memory!(GrowingBuffer);

impl_memory! {
    /// Returns the location of the first part.
    for GrowingBuffer, |this| &this.driver, this.shared.start, this.shared.done().min(this.len), this.location
}

// SAFETY:
// - The driver answers for the mappings, and the range for the bytes that it has: `done` counts them after they were mapped
//   and granted, and only grows. The address is that of the reservation, made before the value.
// - The memory lives as long as the value, which shares it with the thread, and for ever if the value is forgotten. The
//   thread only adds mappings, and nothing changes their grants.
// - Safe code reaches the bytes by a `CpuView` alone.
// - A forked child takes no lock, and its answers allow nothing.
unsafe impl AccessChecks for GrowingBuffer {
    fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> Result<Access> {
        self.driver.expect_this_process("growing memory")?;
        check_range(offset, len, self.shared.done())?;
        let (mut at, end, mut least) = (offset, offset + len, Access::ReadWrite);
        while at < end {
            // One at a time: the thread can add a chunk in between.
            let (have, bytes) = self.shared.look(|parts| {
                let bytes = parts.of_one_mapping(at, end - at).unwrap_or(end - at);
                (parts.gpu_access(gpu, engine, at, bytes), bytes)
            });
            least = least.min(have?);
            at += bytes.max(1);
        }
        Ok(least)
    }

    fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
        let answer = self.look(|parts| parts.is_read_only_for_cpu(offset, len));
        answer.unwrap_or(true)
    }

    fn may_be_on_host(&self, offset: u64, len: u64) -> bool {
        let answer = self.look(|parts| parts.may_be_on_host(offset, len));
        answer.unwrap_or(true)
    }

    fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
        let answer = self.look(|parts| parts.of_one_copy(offset, len));
        answer.unwrap_or(len)
    }

    fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
        self.look(|parts| parts.of_one_mapping(offset, len))?
    }
}

#[cfg(test)]
mod tests;
