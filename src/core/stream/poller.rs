//! Tickets as futures. Wakes tasks whose copies and fills have ended: one thread for each driver, while any task waits.
//!
//! The thread keeps events (which keep the driver) and wakers, but no memory: tickets own that. It queries
//! the oldest event of each stream, so many tickets cost no more than one.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use super::event::{Event, PAUSE, TRIES};
use super::order::{Mark, Order};
use super::transfer::{Progress, Transfer, TransferFailed};
use crate::driver::{Driver, Relaxed};
use crate::per_driver::{PerDriver, lock};
use crate::{Error, Result};

/// The pause between two rounds of queries: at least this, doubled after each round without a result.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);
/// How long the thread stays after the last waiting task: a program that waits for one copy after another
/// does not start a thread for each.
const LINGER: Duration = Duration::from_millis(50);

/// The thread's stack, in bytes: wakers are the executor's code, which expects a thread like others.
const STACK: usize = 2 << 20;

/// The tasks that wait for a driver's work, and the thread that polls for them.
struct Poller {
    state: Mutex<State>,
    added: Condvar,
    /// The thread's stack, in bytes.
    stack: usize,
}

impl Default for Poller {
    fn default() -> Self {
        Self::with_stack(STACK)
    }
}

#[derive(Default)]
struct State {
    /// By the order of their work. A stream without waiting tasks has no entry.
    waiting: HashMap<Order, BTreeMap<u64, Waiting>>,
    /// Whether there is a thread; it checks `waiting` under the lock before it ends.
    running: bool,
    /// Whether a task was added since the thread's last check.
    fresh: bool,
}

struct Waiting {
    event: Arc<Event>,
    waker: Waker,
}

/// A place in the order of work, and the event there.
type Head = ((Order, u64), Arc<Event>);

impl Poller {
    fn with_stack(stack: usize) -> Self {
        Self {
            state: Mutex::default(),
            added: Condvar::new(),
            stack,
        }
    }

    /// Returns the driver's poller.
    fn of(driver: &Driver) -> Arc<Self> {
        static POLLERS: PerDriver<Arc<Poller>> = PerDriver::new();
        POLLERS.of(driver)
    }

    /// Wakes `waker` once the mark has passed, or the driver refuses the query. Replaces the mark's earlier
    /// waker.
    ///
    /// # Errors
    /// [`Error::System`] if no thread can be started; then no task is woken.
    fn wake_after(self: &Arc<Self>, mark: &Mark, waker: &Waker) -> Result<()> {
        let (order, number) = mark.place;
        // Cloned and dropped with no lock held: both run the executor's code.
        let waker = waker.clone();
        let mut state = lock(&self.state);
        let stream = state.waiting.entry(order).or_default();
        if let Some(waiting) = stream.get_mut(&number) {
            let before = std::mem::replace(&mut waiting.waker, waker);
            drop(state);
            drop(before);
            return Ok(());
        }
        let event = Arc::clone(&mark.event);
        stream.insert(number, Waiting { event, waker });
        state.fresh = true;
        if !state.running {
            let this = Arc::clone(self);
            let thread = thread::Builder::new()
                .name("egmem-await".into())
                .stack_size(self.stack);
            if let Err(error) = thread.spawn(move || this.run()) {
                let unheard = state.remove(mark.place);
                drop(state);
                drop(unheard);
                let what = "starting the thread that wakes tasks after GPU work";
                return Err(Error::system(what, &error));
            }
            state.running = true;
        }
        drop(state);
        self.added.notify_one();
        Ok(())
    }

    /// Removes the mark's waker.
    fn forget(&self, mark: &Mark) {
        let waiting = lock(&self.state).remove(mark.place);
        drop(waiting);
    }

    fn run(&self) {
        let _guard = WakeAllOnPanic(self);
        let mut pause = SHORTEST;
        loop {
            pause = if self.round() {
                SHORTEST
            } else {
                LONGEST.min(pause * 2)
            };
            let state = lock(&self.state);
            let idle = state.waiting.is_empty();
            let limit = if idle { LINGER } else { pause };
            let waited = self
                .added
                .wait_timeout_while(state, limit, |all| !all.fresh);
            let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if std::mem::take(&mut state.fresh) {
                pause = SHORTEST;
            } else if state.waiting.is_empty() {
                // The next task, under the lock, starts another thread.
                state.running = false;
                return;
            }
        }
    }

    /// Queries the oldest mark of each stream, and the next ones while they have passed. Returns whether any
    /// task was woken.
    fn round(&self) -> bool {
        let mut woken = false;
        let mut heads = lock(&self.state).heads();
        while !heads.is_empty() {
            let mut wakers = Vec::new();
            let mut refused = false;
            let mut passed = Vec::new();
            for (place, event) in heads {
                match has_passed(&event) {
                    Some(true) => passed.push(place),
                    Some(false) => {}
                    None => {
                        refused = true;
                        wakers.extend(lock(&self.state).remove(place));
                    }
                }
            }
            heads = {
                let mut state = lock(&self.state);
                wakers.extend(passed.iter().filter_map(|&place| state.remove(place)));
                let next = passed.iter().filter_map(|&(order, _)| state.head(order));
                next.collect()
            };
            if refused {
                // The tasks query again: not at once.
                thread::sleep(LONGEST);
            }
            woken |= !wakers.is_empty();
            wakers.into_iter().for_each(wake);
        }
        woken
    }
}

impl State {
    /// Returns the oldest mark of each stream.
    fn heads(&self) -> Vec<Head> {
        let orders = self.waiting.keys();
        orders.filter_map(|&order| self.head(order)).collect()
    }

    fn head(&self, order: Order) -> Option<Head> {
        let (&number, waiting) = self.waiting.get(&order)?.first_key_value()?;
        Some(((order, number), Arc::clone(&waiting.event)))
    }

    fn remove(&mut self, (order, number): (Order, u64)) -> Option<Waiting> {
        let stream = self.waiting.get_mut(&order)?;
        let waiting = stream.remove(&number);
        if stream.is_empty() {
            self.waiting.remove(&order);
        }
        waiting
    }
}

/// Asks the driver; if it refuses, the task asks itself and gets the error.
fn has_passed(event: &Event) -> Option<bool> {
    let _relaxed = Relaxed::new(event.driver());
    match event.is_done() {
        Ok(has_passed) => Some(has_passed),
        // Nothing runs there any more.
        Err(Error::ContextLost { .. }) => Some(true),
        Err(error) => {
            tracing::warn!(%error, "the driver refuses to report GPU work that a task waits for");
            None
        }
    }
}

/// Runs the executor's code, with no lock held.
fn wake(Waiting { waker, event }: Waiting) {
    drop(event);
    if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
        tracing::error!("a task's waker panicked");
    }
}

/// Wakes all tasks if a custom driver or an executor panics: the tasks then query for themselves.
struct WakeAllOnPanic<'a>(&'a Poller);

impl Drop for WakeAllOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let mut state = lock(&self.0.state);
            state.running = false;
            let all = std::mem::take(&mut state.waiting);
            drop(state);
            all.into_values()
                .flat_map(BTreeMap::into_values)
                .for_each(wake);
        }
    }
}

/// Waits for the end of the work as [`wait`](Transfer::wait) does, without blocking the thread. Works in any
/// async runtime.
///
/// A thread of this crate, one for each driver, polls the driver while any task waits, and calls the tasks'
/// wakers. It ends 50 ms after the last of them was woken.
///
/// # Errors
/// As [`wait`](Transfer::wait); [`Error::System`] if the thread cannot be started. Then a ticket that was polled
/// by reference still owns its operands, and [`wait`](Transfer::wait) returns them.
///
/// # Cancel safety
/// Dropping the future drops the ticket: that waits for the end of the work and blocks the thread. A ticket
/// that is polled by reference, as `&mut ticket`, can be polled again later.
impl<T> Future for Transfer<T> {
    type Output = Result<T, TransferFailed<T>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        match this.advance(context) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(())) => Poll::Ready(this.outcome()),
            Err(error) => Poll::Ready(Err(TransferFailed::new(error, None))),
        }
    }
}

/// The operands are never pinned.
impl<T> Unpin for Transfer<T> {}

/// A ticket's state between polls.
#[derive(Default)]
pub(super) struct Polling {
    /// The poller where the task waits, once it does.
    poller: Option<Arc<Poller>>,
    /// The driver's first refusal, and the number of refusals.
    refused: Option<Error>,
    refusals: u32,
    /// When the last of them was counted.
    counted: Option<Instant>,
}

impl Polling {
    /// Interprets the driver's answer; `None` if it is not the last one.
    fn judge(&mut self, asked: Result<bool>) -> Option<Progress> {
        let ended = match asked {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error @ Error::ContextLost { .. }) => Err(error),
            Err(error) => {
                // A task may be polled often for other reasons.
                let now = Instant::now();
                if self.counted.is_none_or(|last| now - last >= PAUSE) {
                    self.refusals += 1;
                    self.counted = Some(now);
                }
                let first = self.refused.get_or_insert(error).clone();
                return (self.refusals >= TRIES).then_some(Progress::Unknown(first));
            }
        };
        // As in a blocking wait: the refusal may be the work's error.
        Some(Progress::Over(self.refused.take().map_or(ended, Err)))
    }
}

impl<T> Transfer<T> {
    /// Queries the driver once, and registers the task if the work is not over.
    fn advance(&mut self, context: &Context<'_>) -> Result<Poll<()>> {
        let Progress::Marked(mark) = &self.progress else {
            return Ok(Poll::Ready(()));
        };
        let driver = self.stream.driver();
        // Before any lock.
        driver.expect_this_process("transfer")?;
        let asked = {
            let _relaxed = Relaxed::new(driver);
            mark.event.is_done()
        };
        if let Some(progress) = self.polling.judge(asked) {
            self.stop_polling();
            self.set(progress);
            return Ok(Poll::Ready(()));
        }
        let poller = &mut self.polling.poller;
        let poller = poller.get_or_insert_with(|| Poller::of(driver));
        poller.wake_after(mark, context.waker())?;
        Ok(Poll::Pending)
    }

    /// Stops waking tasks for this ticket.
    pub(super) fn stop_polling(&mut self) {
        if let Some(poller) = self.polling.poller.take()
            && let Progress::Marked(mark) = &self.progress
            && self.stream.driver().is_of_this_process()
        {
            poller.forget(mark);
        }
    }
}

#[cfg(test)]
mod tests;
