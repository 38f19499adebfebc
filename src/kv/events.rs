//! Changes of a tier's keys, for those who watch them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use egmem_core::per_driver::lock;

use crate::{Driver, Key};

/// The change of an event's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TierEventKind {
    /// A commit made them ready.
    Stored,
    /// They made room for others.
    Evicted,
    /// [`Tier::remove`](crate::Tier::remove) freed their pages.
    Removed,
    /// Their pages had other bytes than were committed ([`Verify`](crate::Verify)).
    Damaged,
}

/// A change of keys of a group that one call of this process made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierEvent {
    /// The event's place in the order of the changes. The events since a subscription have consecutive numbers.
    pub number: u64,
    /// The change.
    pub kind: TierEventKind,
    /// The group of the keys.
    pub group: u32,
    /// The keys, in the order of the call's list; evicted ones in the order in which they were used.
    pub keys: Vec<Key>,
}

/// Events of a tier, in a queue of their own: those of [`Tier::events`](crate::Tier::events). Dropping it ends the subscription.
///
/// As an iterator it waits for the next event, and ends when the tier's last handle, store, load and job is gone and all events
/// were taken. In a forked child there is none.
#[derive(Debug)]
#[must_use = "dropped, it receives nothing"]
pub struct Events {
    queue: Arc<Queue>,
    _subscription: Subscription,
}

/// A function's subscription to events, from [`Tier::on_event`](crate::Tier::on_event). Dropping it ends the subscription: calls
/// that other threads have begun may still run.
#[derive(Debug)]
#[must_use = "dropped, the function is not called any longer"]
pub struct Subscription {
    hub: Weak<Hub>,
    id: u64,
    driver: Driver,
}

impl Events {
    /// Locks the queue. `None` in a forked child, where the lock may be held for ever.
    fn queued(&self) -> Option<MutexGuard<'_, Queued>> {
        let is_here = self._subscription.driver.is_of_this_process();
        is_here.then(|| lock(&self.queue.queued))
    }

    /// Returns the next event if there is one, without waiting.
    pub fn try_next(&self) -> Option<TierEvent> {
        self.next_timeout(Duration::ZERO)
    }

    /// Waits for the next event for at most `time`. `None` after that time, and at once when the tier is gone.
    pub fn next_timeout(&self, time: Duration) -> Option<TierEvent> {
        let queued = self.queued()?;
        let waited = self
            .queue
            .changed
            .wait_timeout_while(queued, time, |queued| queued.is_waiting());
        waited.unwrap_or_else(PoisonError::into_inner).0.take()
    }

    /// Returns whether all events were taken and no more come: the tier is gone. In a forked child it is.
    pub fn is_over(&self) -> bool {
        let queued = self.queued();
        queued.is_none_or(|queued| queued.is_over && queued.events.is_empty())
    }

    /// Returns how many keys of events did not fit into the queue. Those keys, or whole events, are missing: compare with
    /// [`Tier::keys`](crate::Tier::keys) after that.
    pub fn lost(&self) -> u64 {
        self.queued().map_or(0, |queued| queued.lost)
    }
}

impl Iterator for Events {
    type Item = TierEvent;

    fn next(&mut self) -> Option<TierEvent> {
        // More than 500 billion years.
        self.next_timeout(Duration::MAX)
    }
}

/// The events that a subscriber has not taken yet.
struct Queue {
    /// The most keys.
    capacity: usize,
    queued: Mutex<Queued>,
    changed: Condvar,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the queue's lock, which threads that change the tier need.
        let mut queue = f.debug_struct("Queue");
        queue
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Queued {
    events: VecDeque<TierEvent>,
    /// Of all events.
    keys: usize,
    lost: u64,
    /// No more events come.
    is_over: bool,
}

impl Queued {
    fn is_waiting(&self) -> bool {
        self.events.is_empty() && !self.is_over
    }

    fn take(&mut self) -> Option<TierEvent> {
        let event = self.events.pop_front()?;
        self.keys -= event.keys.len();
        Some(event)
    }
}

impl Queue {
    /// Appends as many of an event's keys as there is room for.
    fn push(&self, event: &TierEvent) {
        let mut queued = lock(&self.queued);
        let (fitting, lost) = event
            .keys
            .split_at(event.keys.len().min(self.capacity - queued.keys));
        queued.lost += lost.len() as u64;
        if fitting.is_empty() {
            return;
        }
        queued.keys += fitting.len();
        let keys = fitting.to_vec();
        queued.events.push_back(TierEvent { keys, ..*event });
        self.changed.notify_one();
    }
}

type Function = Arc<dyn Fn(&TierEvent) + Send + Sync>;

enum Listener {
    Queue(Arc<Queue>),
    Function(Function),
}

/// The subscribers of a tier.
pub(crate) struct Hub {
    driver: Driver,
    /// The number of listeners.
    count: AtomicUsize,
    listeners: Mutex<Listeners>,
}

#[derive(Default)]
struct Listeners {
    all: Vec<(u64, Listener)>,
    next_id: u64,
    next_number: u64,
}

impl Hub {
    pub(crate) fn new(driver: Driver) -> Arc<Self> {
        Arc::new(Self {
            driver,
            count: AtomicUsize::new(0),
            listeners: Mutex::default(),
        })
    }

    /// Subscribes a queue for `capacity` keys.
    pub(crate) fn subscribe(self: &Arc<Self>, capacity: usize) -> Events {
        let queue = Arc::new(Queue {
            capacity,
            queued: Mutex::default(),
            changed: Condvar::new(),
        });
        Events {
            _subscription: self.add(Listener::Queue(Arc::clone(&queue))),
            queue,
        }
    }

    /// Subscribes a function.
    pub(crate) fn call(
        self: &Arc<Self>,
        function: impl Fn(&TierEvent) + Send + Sync + 'static,
    ) -> Subscription {
        self.add(Listener::Function(Arc::new(function)))
    }

    fn add(self: &Arc<Self>, listener: Listener) -> Subscription {
        let id = if self.driver.is_of_this_process() {
            let mut listeners = lock(&self.listeners);
            let id = listeners.next_id;
            listeners.next_id += 1;
            listeners.all.push((id, listener));
            self.count.store(listeners.all.len(), Relaxed);
            id
        } else {
            u64::MAX
        };
        Subscription {
            hub: Arc::downgrade(self),
            id,
            driver: self.driver.clone(),
        }
    }

    /// Queues an event of some keys, and returns what remains to be done without locks. Called with the table locked, so
    /// that events have the order of the changes.
    pub(crate) fn note(&self, kind: TierEventKind, keys: impl FnOnce() -> Vec<Key>) -> Noted {
        if self.count.load(Relaxed) == 0 {
            return Noted::default();
        }
        let mut listeners = lock(&self.listeners);
        let mut groups = BTreeMap::<u8, Vec<Key>>::new();
        for key in keys() {
            groups.entry(key.group()).or_default().push(key);
        }
        let events = groups.into_iter().zip(listeners.next_number..);
        let events = events.map(|((group, keys), number)| TierEvent {
            number,
            kind,
            group: group.into(),
            keys,
        });
        let events: Vec<TierEvent> = events.collect();
        listeners.next_number += events.len() as u64;
        let mut functions = Vec::new();
        for (_, listener) in &listeners.all {
            match listener {
                Listener::Queue(queue) => events.iter().for_each(|event| queue.push(event)),
                Listener::Function(function) => functions.push(Arc::clone(function)),
            }
        }
        Noted { events, functions }
    }
}

/// Events that functions are told when this is dropped, by a caller that holds no lock.
#[derive(Default)]
#[must_use = "functions are told when it is dropped"]
pub(crate) struct Noted {
    events: Vec<TierEvent>,
    functions: Vec<Function>,
}

impl Drop for Noted {
    fn drop(&mut self) {
        for event in &self.events {
            self.functions.iter().for_each(|function| function(event));
        }
    }
}

/// The tier is gone: no thread waits for its events any longer.
impl Drop for Hub {
    fn drop(&mut self) {
        if !self.driver.is_of_this_process() {
            return;
        }
        let listeners = self.listeners.get_mut();
        for (_, listener) in &listeners.unwrap_or_else(PoisonError::into_inner).all {
            if let Listener::Queue(queue) = listener {
                lock(&queue.queued).is_over = true;
                queue.changed.notify_all();
            }
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if !self.driver.is_of_this_process() {
            return;
        }
        let Some(hub) = self.hub.upgrade() else {
            return;
        };
        let mut listeners = lock(&hub.listeners);
        let at = listeners.all.iter().position(|(id, _)| *id == self.id);
        let ended = at.map(|at| listeners.all.remove(at));
        hub.count.store(listeners.all.len(), Relaxed);
        drop(listeners);
        // A function may have values whose drop uses the tier.
        drop(ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egmem_core::Machine;

    #[test]
    fn an_event_has_keys_of_one_group() {
        let hub = Hub::new(Driver::simulated(Machine::gh200()).unwrap());
        let events = hub.subscribe(10);
        let key = |number: u8, group| Key::from_bytes(&[number]).in_group(group);
        let keys = vec![key(1, 2), key(2, 0), key(3, 2)];
        drop(hub.note(TierEventKind::Stored, || keys));
        let found = [0, 1].map(|_| events.try_next().unwrap());
        let told = found.map(|event| (event.number, event.group, event.keys));
        let expected = [(0, 0, vec![key(2, 0)]), (1, 2, vec![key(1, 2), key(3, 2)])];
        assert_eq!(told, expected);
        assert_eq!(events.try_next(), None);
    }
}
