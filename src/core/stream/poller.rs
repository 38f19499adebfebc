//! Wakes tasks whose copies and fills have ended: one thread for each driver, while any task waits.
//!
//! The thread keeps events (which keep the driver) and wakers, but no memory: tickets own that. It queries
//! the oldest event of each stream, so many tickets cost no more than one.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::task::Waker;
use std::thread;
use std::time::Duration;

use super::Event;
use super::marks::{Mark, Order};
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
pub(super) struct Poller {
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

/// The oldest mark of a stream.
struct Head {
    place: (Order, u64),
    event: Arc<Event>,
}

/// The driver's answer about a head.
enum Answer {
    Ahead,
    Passed,
    /// The task queries the driver itself and gets the error.
    Refused,
}

impl Poller {
    pub(super) fn with_stack(stack: usize) -> Self {
        Self {
            state: Mutex::default(),
            added: Condvar::new(),
            stack,
        }
    }

    /// Returns the driver's poller.
    pub(super) fn of(driver: &Driver) -> Arc<Self> {
        static POLLERS: PerDriver<Arc<Poller>> = PerDriver::new();
        POLLERS.of(driver)
    }

    /// Wakes `waker` once the mark has passed, or the driver refuses the query. Replaces the mark's earlier
    /// waker.
    ///
    /// # Errors
    /// [`Error::System`] if no thread can be started; then no task is woken.
    pub(super) fn wake_after(self: &Arc<Self>, mark: &Mark, waker: &Waker) -> Result<()> {
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
    pub(super) fn forget(&self, mark: &Mark) {
        let waiting = lock(&self.state).remove(mark.place);
        drop(waiting);
    }

    fn run(&self) {
        let _guard = WakeAllOnPanic(self);
        let mut pause = SHORTEST;
        loop {
            pause = match self.round() {
                true => SHORTEST,
                false => LONGEST.min(pause * 2),
            };
            let mut state = lock(&self.state);
            let limit = match state.waiting.is_empty() {
                true => LINGER,
                false => pause,
            };
            if !state.fresh {
                state = match self
                    .added
                    .wait_timeout_while(state, limit, |all| !all.fresh)
                {
                    Ok((state, _)) => state,
                    Err(poisoned) => poisoned.into_inner().0,
                };
            }
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
            for head in heads {
                match head.ask() {
                    Answer::Ahead => {}
                    Answer::Passed => passed.push(head.place),
                    Answer::Refused => {
                        refused = true;
                        wakers.extend(lock(&self.state).remove(head.place));
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
    fn heads(&self) -> Vec<Head> {
        let orders = self.waiting.keys();
        orders.filter_map(|&order| self.head(order)).collect()
    }

    fn head(&self, order: Order) -> Option<Head> {
        let (&number, waiting) = self.waiting.get(&order)?.first_key_value()?;
        Some(Head {
            place: (order, number),
            event: Arc::clone(&waiting.event),
        })
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

impl Head {
    fn ask(&self) -> Answer {
        let _relaxed = Relaxed::new(self.event.driver());
        match self.event.is_done() {
            Ok(true) => Answer::Passed,
            Ok(false) => Answer::Ahead,
            // Nothing runs there any more.
            Err(Error::ContextLost { .. }) => Answer::Passed,
            Err(error) => {
                tracing::warn!(%error, "the driver refuses to report GPU work that a task waits for");
                Answer::Refused
            }
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

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::task::{Context, Poll, Wake};
    use std::time::Instant;

    use super::*;
    use crate::driver::{Call, Code};
    use crate::{Buffer, Machine, Stream, Transfer};

    struct Tell(Sender<()>);

    impl Wake for Tell {
        fn wake(self: Arc<Self>) {
            let _over = self.0.send(());
        }
    }

    fn waker() -> (Waker, Receiver<()>) {
        let (send, receive) = channel();
        (Arc::new(Tell(send)).into(), receive)
    }

    fn busy(driver: &Driver, questions: u64) {
        let sim = driver.sim().unwrap();
        for nth in 1..=questions {
            sim.fail(Call::EventQuery, nth, Code::NOT_READY);
        }
    }

    fn poll<T>(ticket: &mut Transfer<T>, waker: &Waker) -> bool {
        matches!(
            Pin::new(ticket).poll(&mut Context::from_waker(waker)),
            Poll::Ready(Ok(_))
        )
    }

    fn fill(driver: &Driver) -> Transfer<Buffer> {
        let stream = Stream::new(driver, 0).unwrap();
        let memory = Buffer::near(driver, 0, 4096).unwrap();
        stream.start_fill((memory, 0), 4096, 7).unwrap()
    }

    /// Waits until only the registry and the test have the poller.
    fn ends(poller: &Arc<Poller>) {
        let end = Instant::now() + Duration::from_secs(300);
        while Arc::strong_count(poller) > 2 {
            assert!(Instant::now() < end, "the thread does not end");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_thread_ends_when_nobody_waits_and_another_starts() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let poller = Poller::of(&driver);
        for _ in 0..2 {
            let mut ticket = fill(&driver);
            let (waker, woken) = waker();
            busy(&driver, 3);
            assert!(!poll(&mut ticket, &waker));
            woken.recv().unwrap();
            assert!(poll(&mut ticket, &waker));
            ends(&poller);
            assert!(lock(&poller.state).waiting.is_empty());
        }
    }

    #[test]
    fn who_no_longer_waits_is_forgotten() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let poller = Poller::of(&driver);
        let mut ticket = fill(&driver);
        let (waker, woken) = waker();
        busy(&driver, 1_000_000);
        assert!(!poll(&mut ticket, &waker));
        assert_eq!(lock(&poller.state).waiting.len(), 1);
        drop(waker);
        drop(ticket);
        assert!(lock(&poller.state).waiting.is_empty());
        assert!(woken.recv().is_err(), "nobody has the waker");
        ends(&poller);
    }

    /// A stream's work ends in order, so one query serves many tickets.
    #[test]
    fn the_oldest_of_a_stream_is_asked() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let memory = Arc::new(Buffer::near(&driver, 0, 4096).unwrap());
        let fill = |n| stream.start_fill((Arc::clone(&memory), n), 1, 7).unwrap();
        let mut tickets: Vec<_> = (0..100).map(fill).collect();
        let poller = Arc::new(Poller::with_stack(STACK));
        let (waker, _woken) = waker();
        // Prevents a thread from starting, so that the test runs the rounds itself.
        lock(&poller.state).running = true;
        for ticket in tickets.iter_mut().rev() {
            ticket.register(&poller, &waker);
        }
        let sim = driver.sim().unwrap();
        sim.reset_counts();
        busy(&driver, 1);
        assert!(!poller.round());
        assert_eq!(sim.count(Call::EventQuery), 1);
        assert!(poller.round());
        assert_eq!(sim.count(Call::EventQuery), 101);
        assert!(lock(&poller.state).waiting.is_empty());
    }
}
