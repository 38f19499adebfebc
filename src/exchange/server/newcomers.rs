//! Connections that have not been greeted yet are a limited number, and the oldest is closed for a newer one. Their peers are
//! unknown, so no limit of a peer applies to them. If the server refused newer ones instead, a few silent connections would keep
//! all clients out for the time of a handshake. Each has a grace period, in which newer ones wait to be accepted, so that a burst
//! of correct clients does not close its own connections.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};

use crate::per_driver::lock;

/// How long each connection stays, even if newer ones wait.
const GRACE: Duration = Duration::from_millis(250);

/// The connections at all addresses that have not been greeted yet.
#[derive(Debug)]
pub(super) struct Newcomers {
    limit: usize,
    slots: Arc<Semaphore>,
    queue: Arc<Mutex<Queue>>,
}

#[derive(Debug, Default)]
struct Queue {
    last: u64,
    /// Oldest first.
    waiting: BTreeMap<u64, (Instant, oneshot::Sender<()>)>,
}

/// A connection that has not been greeted yet, until dropped.
#[derive(Debug)]
pub(super) struct Newcomer {
    id: u64,
    queue: Arc<Mutex<Queue>>,
    _slot: OwnedSemaphorePermit,
}

/// `Ok` when the connection is to be closed; an error once it has been greeted.
pub(super) type Closing = oneshot::Receiver<()>;

impl Newcomers {
    /// Returns room for so many.
    pub fn new(most: usize) -> Self {
        let limit = most.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            limit,
            slots: Arc::new(Semaphore::new(limit)),
            queue: Arc::default(),
        }
    }

    /// Returns how many there are.
    pub fn count(&self) -> usize {
        self.limit - self.slots.available_permits()
    }

    /// Closes the oldest connection to make room, or returns when to try that again.
    pub fn close_oldest(&self) -> Result<(), Instant> {
        let mut queue = lock(&self.queue);
        let now = Instant::now();
        let Some(oldest) = queue.waiting.first_entry() else {
            // All are being closed, for others that wait.
            return Err(now + GRACE);
        };
        let until = oldest.get().0 + GRACE;
        if until > now {
            return Err(until);
        }
        let (_, close) = oldest.remove();
        drop(queue);
        // It may be ending by itself.
        let _ = close.send(());
        Ok(())
    }

    /// Returns whether the task of a closed connection has yet to end.
    fn is_one_ending(&self) -> bool {
        lock(&self.queue).waiting.len() < self.count()
    }

    /// Enters a connection, after the oldest of too many was closed.
    pub async fn enter(&self) -> (Newcomer, Closing) {
        let mut has_closed = false;
        let slot = loop {
            if let Ok(slot) = Arc::clone(&self.slots).try_acquire_owned() {
                break slot;
            }
            let slot = Arc::clone(&self.slots).acquire_owned();
            let mut until = Instant::now() + GRACE;
            // Closes one more only if another newcomer took the place of the last one.
            if !(has_closed && self.is_one_ending()) {
                match self.close_oldest() {
                    Ok(()) => has_closed = true,
                    Err(later) => until = later,
                }
            }
            // The semaphore is never closed.
            if let Ok(Ok(slot)) = timeout_at(until, slot).await {
                break slot;
            }
        };
        let (close, closing) = oneshot::channel();
        let mut queue = lock(&self.queue);
        queue.last += 1;
        let id = queue.last;
        queue.waiting.insert(id, (Instant::now(), close));
        drop(queue);
        let newcomer = Newcomer {
            id,
            queue: Arc::clone(&self.queue),
            _slot: slot,
        };
        (newcomer, closing)
    }
}

impl Drop for Newcomer {
    fn drop(&mut self) {
        lock(&self.queue).waiting.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::{Pin, pin};
    use std::task::Poll;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_oldest_is_closed_after_its_grace_period() {
        let all = Newcomers::new(2);
        let begun = Instant::now();
        let (a, a_closes) = all.enter().await;
        let (b, mut b_closes) = all.enter().await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        let ends = tokio::spawn(async move {
            a_closes.await.unwrap();
            drop(a);
        });
        let (c, mut c_closes) = all.enter().await;
        assert!(begun.elapsed() >= GRACE);
        ends.await.unwrap();
        assert!(b_closes.try_recv().is_err() && c_closes.try_recv().is_err());
        drop((b, c));
        assert!(lock(&all.queue).waiting.is_empty());
        assert_eq!(all.count(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_greeted_connection_makes_room_at_once() {
        let all = Newcomers::new(2);
        let begun = Instant::now();
        let (a, a_closes) = all.enter().await;
        let (_b, _b_closes) = all.enter().await;
        let third = async { all.enter().await };
        let (_c, ()) = tokio::join!(third, async { drop(a) });
        assert!(a_closes.await.is_err(), "it stays");
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    /// With the room that 1024 fds leave.
    #[tokio::test(start_paused = true)]
    async fn two_thousand_silent_connections_keep_nobody_out() {
        let all = Newcomers::new(128);
        let begun = Instant::now();
        for _ in 0..2000 {
            let (silent, closes) = all.enter().await;
            tokio::spawn(async move {
                let _ = closes.await;
                drop(silent);
            });
        }
        let (_newcomer, mut closes) = all.enter().await;
        let elapsed = begun.elapsed();
        assert!(elapsed < Duration::from_secs(5), "{elapsed:?}");
        assert!(closes.try_recv().is_err());
    }

    /// Connections at several addresses wait for one place.
    #[tokio::test(start_paused = true)]
    async fn a_place_that_another_takes_is_waited_for_no_longer_than_a_grace_period() {
        let all = Newcomers::new(1);
        let begun = Instant::now();
        let silent = async || {
            let (silent, closes) = all.enter().await;
            tokio::spawn(async move {
                let _ = closes.await;
                // While its task ends, all others wait.
                tokio::task::yield_now().await;
                drop(silent);
            });
        };
        tokio::join!(silent(), silent(), silent(), silent());
        assert!(begun.elapsed() < GRACE * 8, "{:?}", begun.elapsed());
    }

    /// A newcomer closes a connection whose place another newcomer takes, and then that one.
    #[tokio::test(start_paused = true)]
    async fn a_newcomer_whose_place_another_takes_closes_again() {
        let all = Newcomers::new(1);
        let (a, mut a_closes) = all.enter().await;
        let mut other = pin!(all.enter());
        assert!(poll_once(other.as_mut()).await.is_pending());
        tokio::time::advance(GRACE * 2).await;
        let mut newcomer = pin!(all.enter());
        assert!(poll_once(newcomer.as_mut()).await.is_pending());
        assert!(a_closes.try_recv().is_ok());
        drop(a);
        let (b, b_closes) = other.await;
        let ends = async {
            b_closes.await.unwrap();
            drop(b);
        };
        let both = async { tokio::join!(newcomer, ends) };
        assert!(tokio::time::timeout(GRACE * 8, both).await.is_ok());
    }

    async fn poll_once<T>(mut work: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await
    }

    #[tokio::test(start_paused = true)]
    async fn one_newcomer_closes_one() {
        let all = Newcomers::new(2);
        let (a, a_closes) = all.enter().await;
        let (_b, mut b_closes) = all.enter().await;
        tokio::time::advance(GRACE * 2).await;
        let slow = async {
            a_closes.await.unwrap();
            // However long its task takes to end.
            tokio::time::sleep(GRACE * 5).await;
            drop(a);
        };
        let (_c, ()) = tokio::join!(all.enter(), slow);
        assert!(b_closes.try_recv().is_err(), "only one was closed");
    }
}
