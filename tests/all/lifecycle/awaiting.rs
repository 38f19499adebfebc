//! Tickets as futures, without a runtime and with tokio.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use egmem::driver::{Access, Call, Code, Location, NodeId};
use egmem::{Buffer, Driver, Error, Stream, Transfer};

use crate::lifecycle::{MIB, grace, last, nothing_held};

/// A task is woken within milliseconds; a lost wakeup never comes.
const PATIENCE: Duration = Duration::from_secs(300);

/// Wakes a thread, and counts how often.
struct Unpark(Thread, AtomicU64);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.fetch_add(1, SeqCst);
        self.0.unpark();
    }
}

fn unpark() -> Arc<Unpark> {
    Arc::new(Unpark(thread::current(), AtomicU64::new(0)))
}

fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(unpark());
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => {
                let begun = Instant::now();
                thread::park_timeout(PATIENCE);
                assert!(begun.elapsed() < PATIENCE, "nobody wakes the task");
            }
        }
    }
}

fn poll<T>(ticket: &mut Transfer<T>, waker: &Arc<Unpark>) -> Poll<Result<T, Error>> {
    let waker = Waker::from(Arc::clone(waker));
    let polled = Pin::new(ticket).poll(&mut Context::from_waker(&waker));
    polled.map_err(Error::from)
}

/// Lets the simulated GPU be busy for so many questions.
fn busy(driver: &Driver, questions: u64) {
    if let Some(sim) = driver.sim() {
        for nth in 1..=questions {
            sim.fail(Call::EventQuery, nth, Code::NOT_READY);
        }
    }
}

fn fill(driver: &Driver, bytes: u64) -> Transfer<Buffer> {
    let stream = Stream::new(driver, 0).unwrap();
    let memory = Buffer::near(driver, 0, bytes).unwrap();
    stream.start_fill((memory, 0), bytes, 7).unwrap()
}

fn shared_fill(driver: &Driver) -> (Arc<Buffer>, Transfer<Arc<Buffer>>) {
    let stream = Stream::new(driver, 0).unwrap();
    let memory = Arc::new(Buffer::near(driver, 0, MIB).unwrap());
    let fill = stream.start_fill((Arc::clone(&memory), 0), MIB, 7);
    (memory, fill.unwrap())
}

pub fn a_task_awaits_copies_and_fills(driver: &Driver) {
    busy(driver, 10);
    let stream = Stream::new(driver, last(driver)).unwrap();
    let memory = block_on(async {
        let filled = fill(driver, 64 * MIB).await?;
        let to = Buffer::near(driver, 0, 64 * MIB)?;
        let (to, _) = stream.start_copy((to, 0), (filled, 0), 64 * MIB)?.await?;
        Ok::<_, Error>(to)
    });
    assert_eq!(memory.unwrap().get::<u8>(64 * MIB - 1).unwrap(), 7);
}

/// Each in a task of its own, on several threads.
pub fn many_tasks_are_woken(driver: &Driver) {
    const TASKS: u64 = 500;
    busy(driver, 2 * TASKS);
    let streams = [0, last(driver), 0].map(|gpu| Stream::new(driver, gpu).unwrap());
    let memory = Arc::new(Buffer::near(driver, 0, MIB).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    runtime.block_on(async {
        let tasks: Vec<_> = (0..TASKS)
            .map(|n| {
                let stream = &streams[n as usize % streams.len()];
                let to = (Arc::clone(&memory), n * 64);
                tokio::spawn(stream.start_fill(to, 64, n as u8).unwrap())
            })
            .collect();
        for task in tasks {
            task.await.unwrap().unwrap();
        }
    });
    for n in 0..TASKS {
        assert_eq!(memory.get::<[u8; 64]>(n * 64).unwrap(), [n as u8; 64]);
    }
    assert_eq!(Arc::strong_count(&memory), 1);
}

/// By reference, beside something that ends before it.
pub fn a_ticket_can_be_polled_and_waited_for_later(driver: &Driver) {
    let mut fill = fill(driver, 64 * MIB);
    busy(driver, 1_000_000);
    let polled = block_on(std::future::poll_fn(|context| {
        Poll::Ready(Pin::new(&mut fill).poll(context).is_pending())
    }));
    assert!(polled || driver.sim().is_none());
    if let Some(sim) = driver.sim() {
        sim.cancel_all();
    }
    if polled {
        assert_eq!(fill.wait().unwrap().get::<u8>(64 * MIB - 1).unwrap(), 7);
    }
}

#[test]
fn a_future_that_is_dropped_waits() {
    let driver = grace();
    let (memory, mut fill) = shared_fill(&driver);
    busy(&driver, 1_000_000);
    let waker = unpark();
    assert!(poll(&mut fill, &waker).is_pending());
    assert_eq!(memory.get::<u8>(0).unwrap(), 0);
    drop(fill);
    assert_eq!(memory.get::<u8>(MIB - 1).unwrap(), 7);
    assert_eq!(waker.1.load(SeqCst), 0, "nobody is left to wake");
}

#[test]
fn the_task_that_polled_last_is_woken() {
    let driver = grace();
    let mut fill = fill(&driver, MIB);
    busy(&driver, 1_000_000);
    let (first, second) = (unpark(), unpark());
    assert!(poll(&mut fill, &first).is_pending());
    assert!(poll(&mut fill, &second).is_pending());
    driver.sim().unwrap().cancel_all();
    let begun = Instant::now();
    while second.1.load(SeqCst) == 0 {
        thread::park_timeout(PATIENCE);
        assert!(begun.elapsed() < PATIENCE, "nobody wakes the task");
    }
    assert!(poll(&mut fill, &second).is_ready());
    assert_eq!(first.1.load(SeqCst), 0);
    let Poll::Ready(Err(again)) = poll(&mut fill, &second) else {
        panic!("it has ended");
    };
    assert!(matches!(again, Error::InvalidArgument { .. }), "{again}");
}

#[test]
fn a_lost_context_wakes_and_gives_the_operands_back() {
    let driver = grace();
    let read_only = Buffer::on(NodeId(0))
        .access(Location::Device(0), Access::Read)
        .bytes(MIB)
        .allocate(&driver)
        .unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    // SAFETY: the memory outlives the work, which faults.
    unsafe { stream.memset_async(egmem::Memory::device_ptr(&read_only), 1, 8) }.unwrap();
    let memory = Buffer::near(&driver, 0, MIB).unwrap();
    let fill = stream.start_fill((memory, 0), MIB, 7).unwrap();
    busy(&driver, 5);
    let failed = block_on(fill).unwrap_err();
    assert!(
        matches!(*failed.error, Error::ContextLost { .. }),
        "{failed}"
    );
    assert!(failed.operands.is_some());
}

/// A driver that refuses a query does not end the wait, unless it keeps refusing; `known`: whether it answers at
/// last.
pub fn refused(refusals: u64, known: bool) {
    let driver = grace();
    let (memory, mut fill) = shared_fill(&driver);
    let sim = driver.sim().unwrap();
    for nth in 1..=refusals {
        sim.fail(Call::EventQuery, nth, Code::UNKNOWN);
    }
    let failed = block_on(&mut fill).unwrap_err();
    assert_eq!(failed.error.code(), Some(Code::UNKNOWN));
    assert_eq!(failed.operands.is_some(), known);
    drop((failed, fill));
    assert_eq!(Arc::strong_count(&memory), if known { 1 } else { 2 });
}

#[test]
fn a_driver_that_refuses_to_tell_is_asked_again() {
    refused(5, true);
}

/// Calls a function when it is woken.
struct OnWake<F>(Mutex<Option<F>>);

impl<F: FnOnce() + Send + 'static> Wake for OnWake<F> {
    fn wake(self: Arc<Self>) {
        let call = self.0.lock().unwrap().take();
        if let Some(call) = call {
            call();
        }
    }
}

fn on_wake(call: impl FnOnce() + Send + 'static) -> Waker {
    Arc::new(OnWake(Mutex::new(Some(call)))).into()
}

#[test]
fn wakers_may_panic_and_use_tickets() {
    let driver = grace();
    busy(&driver, 20);
    let (mut first, mut second) = (fill(&driver, MIB), fill(&driver, MIB));
    let panics = on_wake(|| panic!("a waker of the test's own"));
    let pending = |fill: &mut Transfer<Buffer>, waker: &Waker| {
        let context = &mut Context::from_waker(waker);
        assert!(Pin::new(fill).poll(context).is_pending());
    };
    pending(&mut first, &panics);
    let (send, receive) = std::sync::mpsc::channel();
    let here = driver.clone();
    let reenters = on_wake(move || {
        // A task that is run by its waker: it polls, drops and starts others.
        let mut third = fill(&here, MIB);
        busy(&here, 3);
        pending(&mut third, Waker::noop());
        drop(third);
        send.send(first).unwrap();
    });
    let context = &mut Context::from_waker(&reenters);
    assert!(Pin::new(&mut second).poll(context).is_pending());
    let first = receive
        .recv_timeout(PATIENCE)
        .expect("nobody wakes the task");
    driver.sim().unwrap().cancel_all();
    block_on(first).unwrap();
    block_on(second).unwrap();
    // The same thread or another still serves.
    busy(&driver, 5);
    block_on(fill(&driver, MIB)).unwrap();
}

/// The panic is the polling task's. The ticket is as before.
#[test]
fn a_panicking_waker_clone_changes_nothing() {
    use std::task::{RawWaker, RawWakerVTable};
    const VTABLE: RawWakerVTable = RawWakerVTable::new(
        |_| panic!("a clone of the test's own"),
        |_| (),
        |_| (),
        |_| (),
    );
    let driver = grace();
    let mut fill = fill(&driver, MIB);
    busy(&driver, 1);
    // SAFETY: the functions use no data.
    let waker = unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &VTABLE)) };
    let polled = catch_unwind(AssertUnwindSafe(|| {
        Pin::new(&mut fill)
            .poll(&mut Context::from_waker(&waker))
            .is_pending()
    }));
    assert!(polled.is_err());
    busy(&driver, 3);
    block_on(fill).unwrap();
}

#[test]
fn nothing_is_left_after_futures() {
    let driver = grace();
    busy(&driver, 100);
    for _ in 0..10 {
        block_on(fill(&driver, MIB)).unwrap();
    }
    // The thread may have asked just now.
    let held = || !driver.sim().unwrap().held().is_empty();
    for _ in 0..300_000 {
        if !held() {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    nothing_held(&driver);
}
