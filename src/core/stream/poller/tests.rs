//! Tasks that wait for GPU work.

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

impl<T> Transfer<T> {
    /// Waits like a polled ticket, at a poller of the test's own.
    fn register(&mut self, poller: &Arc<Poller>, waker: &std::task::Waker) -> bool {
        self.polling.poller = Some(Arc::clone(poller));
        match &self.progress {
            Progress::Marked(mark) => poller.wake_after(mark, waker).is_ok(),
            _ => false,
        }
    }
}

#[test]
fn a_thread_that_cannot_be_started_is_an_error_and_the_ticket_stays() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let memory = Buffer::near(&driver, 0, 4096).unwrap();
    let mut fill = stream.start_fill((memory, 0), 4096, 7).unwrap();
    // No address space has room for this.
    fill.polling.poller = Some(Arc::new(Poller::with_stack(1 << 62)));
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..2 {
        driver
            .sim()
            .unwrap()
            .fail(Call::EventQuery, 1, Code::NOT_READY);
        let Poll::Ready(Err(failed)) = Pin::new(&mut fill).poll(&mut context) else {
            panic!("nobody would wake the task");
        };
        assert!(matches!(*failed.error, Error::System { .. }), "{failed}");
        assert!(failed.operands.is_none());
    }
    assert_eq!(fill.wait().unwrap().get::<u8>(4095).unwrap(), 7);
}
