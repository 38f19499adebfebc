//! Connections that have not been greeted yet: a limited number for each address, and the oldest gives way.
//!
//! Their peers are unknown, so no limit of a peer applies to them. If the server refused newcomers instead, a
//! few silent connections would keep all clients out for the time of a handshake; this way, an attacker must
//! reconnect all the time. The oldest gives way, because a correct client finishes within a few round trips.
//! A burst of correct clients does not evict itself: each connection has a grace period, in which newcomers
//! wait to be accepted.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use crate::Limits;
use crate::per_driver::lock;

/// The longest grace period of a connection.
const LONGEST_GRACE: Duration = Duration::from_secs(1);
/// How long to wait before checking again whether the process has an fd for a connection.
const BACK_OFF: Duration = Duration::from_millis(100);

/// The connections at an address that have not been greeted yet.
#[derive(Debug)]
pub(super) struct Handshakes {
    slots: Arc<Semaphore>,
    queue: Arc<Mutex<Queue>>,
    grace: Duration,
    /// Woken when a connection at any address no longer waits for its greeting.
    left: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Queue {
    last: u64,
    /// Oldest first.
    waiting: BTreeMap<u64, (Instant, oneshot::Sender<()>)>,
}

/// A connection that has not been greeted yet, until dropped.
#[derive(Debug)]
pub(super) struct Handshake {
    id: u64,
    queue: Arc<Mutex<Queue>>,
    left: Arc<Notify>,
    _slot: OwnedSemaphorePermit,
}

/// `Ok` when the connection is to give way; an error once it has been greeted.
pub(super) type GiveWay = oneshot::Receiver<()>;

impl Handshakes {
    /// Creates one for each address.
    pub fn at_each(limits: &Limits, addresses: usize) -> Vec<Self> {
        let most = limits.handshakes.clamp(1, Semaphore::MAX_PERMITS);
        let left = Arc::<Notify>::default();
        let one = || Self {
            slots: Arc::new(Semaphore::new(most)),
            queue: Arc::default(),
            grace: (limits.handshake / 10).min(LONGEST_GRACE),
            left: Arc::clone(&left),
        };
        std::iter::repeat_with(one).take(addresses).collect()
    }

    /// Frees an fd for a connection: the oldest one at any address gives way, once its grace period is over.
    /// Waits until there may be an fd.
    pub async fn make_way(all: &[Self]) {
        let Some(first) = all.first() else {
            return;
        };
        let left = first.left.notified();
        tokio::pin!(left);
        left.as_mut().enable();
        let oldest = |one: &Self| {
            let queue = lock(&one.queue);
            let (&id, &(since, _)) = queue.waiting.first_key_value()?;
            (since + one.grace <= Instant::now()).then_some((since, id))
        };
        let each = all.iter().filter_map(|one| Some((oldest(one)?, one)));
        if let Some(((_, id), one)) = each.min_by_key(|(oldest, _)| *oldest)
            && let Some((_, tell)) = lock(&one.queue).waiting.remove(&id)
        {
            // It may be ending by itself.
            let _ = tell.send(());
        }
        // Other code of the process may also close fds.
        let _ = timeout(BACK_OFF, left).await;
    }

    /// Enters a connection, after the oldest of too many has given way.
    pub async fn enter(&self) -> Option<(Handshake, GiveWay)> {
        let slot = loop {
            let slot = Arc::clone(&self.slots).acquire_owned();
            match self.make_room() {
                // Its task has yet to end.
                None => break slot.await,
                Some(later) => match timeout_at(later, slot).await {
                    Ok(slot) => break slot,
                    Err(_) => continue,
                },
            }
        };
        let slot = slot.ok()?;
        let (tell, give_way) = oneshot::channel();
        let mut queue = lock(&self.queue);
        queue.last += 1;
        let id = queue.last;
        queue.waiting.insert(id, (Instant::now(), tell));
        drop(queue);
        let handshake = Handshake {
            id,
            queue: Arc::clone(&self.queue),
            left: Arc::clone(&self.left),
            _slot: slot,
        };
        Some((handshake, give_way))
    }

    /// Tells the oldest to give way if there is no room, or returns when that is possible.
    fn make_room(&self) -> Option<Instant> {
        if self.slots.available_permits() > 0 {
            return None;
        }
        let mut queue = lock(&self.queue);
        let oldest = queue.waiting.first_entry()?;
        let until = oldest.get().0 + self.grace;
        if until > Instant::now() {
            return Some(until);
        }
        let (_, tell) = oldest.remove();
        drop(queue);
        // It may be ending by itself.
        let _ = tell.send(());
        None
    }
}

impl Handshake {
    /// Returns whether it was greeted before it was told to give way.
    pub fn finish(self) -> bool {
        lock(&self.queue).waiting.remove(&self.id).is_some()
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        lock(&self.queue).waiting.remove(&self.id);
        self.left.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two at once, and a grace period of a second.
    fn two() -> Handshakes {
        at_each(1).remove(0)
    }

    fn at_each(addresses: usize) -> Vec<Handshakes> {
        let limits = Limits {
            handshakes: 2,
            ..Limits::default()
        };
        Handshakes::at_each(&limits, addresses)
    }

    async fn enter(all: &Handshakes) -> (Handshake, GiveWay) {
        all.enter().await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_gives_way_after_a_moment_of_its_own() {
        let all = two();
        let begun = Instant::now();
        let (a, a_goes) = enter(&all).await;
        let (b, mut b_goes) = enter(&all).await;
        assert_eq!(begun.elapsed(), Duration::ZERO);
        let ends = tokio::spawn(async move {
            a_goes.await.unwrap();
            assert!(!a.finish(), "it has been told");
        });
        let (c, mut c_goes) = enter(&all).await;
        assert!(begun.elapsed() >= LONGEST_GRACE);
        ends.await.unwrap();
        assert!(b_goes.try_recv().is_err() && c_goes.try_recv().is_err());
        assert!(b.finish() && c.finish());
        assert!(lock(&all.queue).waiting.is_empty());
        assert_eq!(all.slots.available_permits(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_greeted_connection_makes_room_at_once() {
        let all = two();
        let begun = Instant::now();
        let (a, a_goes) = enter(&all).await;
        let (_b, _b_goes) = enter(&all).await;
        let third = async { enter(&all).await };
        let (_c, greeted) = tokio::join!(third, async { a.finish() });
        assert!(greeted);
        assert!(a_goes.await.is_err(), "it stays");
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn without_fds_the_oldest_of_all_addresses_gives_way() {
        let all = at_each(2);
        let (young, mut young_goes) = enter(&all[0]).await;
        let begun = Instant::now();
        Handshakes::make_way(&all).await;
        assert_eq!(begun.elapsed(), BACK_OFF);
        assert!(young_goes.try_recv().is_err(), "it has a moment of its own");
        drop(young);
        let (old, old_goes) = enter(&all[1]).await;
        tokio::time::advance(LONGEST_GRACE).await;
        let (_a, mut a_goes) = enter(&all[0]).await;
        tokio::time::advance(LONGEST_GRACE).await;
        let begun = Instant::now();
        let goes = async {
            old_goes.await.unwrap();
            assert!(!old.finish(), "it has been told");
        };
        tokio::join!(Handshakes::make_way(&all), goes);
        assert_eq!(begun.elapsed(), Duration::ZERO, "its fd is free");
        assert!(a_goes.try_recv().is_err(), "only one had to go");
        Handshakes::make_way(&all).await;
        assert!(a_goes.try_recv().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn one_newcomer_pushes_one_out() {
        let all = two();
        let (a, a_goes) = enter(&all).await;
        let (_b, mut b_goes) = enter(&all).await;
        tokio::time::advance(LONGEST_GRACE * 2).await;
        let slow = async {
            a_goes.await.unwrap();
            // However long its task takes to end.
            tokio::time::sleep(LONGEST_GRACE * 5).await;
            drop(a);
        };
        let (_c, ()) = tokio::join!(enter(&all), slow);
        assert!(b_goes.try_recv().is_err(), "only one had to go");
    }
}
