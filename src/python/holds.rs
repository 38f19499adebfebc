//! Captures that callers report, and waits for GPUs, which must not run beside one.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{PoisonError, RwLock, TryLockError};

/// How many captures are under way, as callers report them.
#[derive(Default)]
pub struct Holds {
    count: AtomicU64,
    /// Locked for reading during a wait. [`begin`](Self::begin) locks it for writing, after it has counted.
    waits: RwLock<()>,
}

impl Holds {
    /// Returns whether a capture is under way. Takes no lock.
    pub fn is_held(&self) -> bool {
        self.count.load(SeqCst) > 0
    }

    /// Calls `wait`, unless a capture is under way: `None` then.
    pub fn wait<T>(&self, wait: impl FnOnce() -> T) -> Option<T> {
        // A blocking `read` could deadlock: thread A has the lock and waits for GPU work that needs the GIL, B is
        // queued in `begin`, and C, with the GIL, queues behind B. Only `begin` writes, so a lock that is not free
        // means a capture.
        let _reading = match self.waits.try_read() {
            Ok(reading) => reading,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (!self.is_held()).then(wait)
    }

    /// Notes that a capture begins. Returns after the waits that are under way, and new ones do not begin.
    pub fn begin(&self) {
        self.count.fetch_add(1, SeqCst);
        drop(self.waits.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Notes that a capture has ended. Returns whether no other is under way.
    pub fn end(&self) -> bool {
        let less = |count: u64| Some(count.saturating_sub(1));
        let count = self.count.fetch_update(SeqCst, SeqCst, less);
        count.unwrap_or_else(|count| count) <= 1
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn captures_are_counted() {
        let holds = Holds::default();
        assert_eq!(holds.wait(|| 7), Some(7));
        holds.begin();
        holds.begin();
        assert!(holds.is_held() && holds.wait(|| 7).is_none());
        assert!(!holds.end() && holds.is_held());
        assert!(holds.end() && !holds.is_held());
        assert!(holds.end(), "an end without a begin counts nothing");
        assert_eq!(holds.wait(|| 7), Some(7));
    }

    #[test]
    fn nobody_queues_behind_a_capture_that_waits_for_a_wait() {
        let holds = Holds::default();
        let (started, is_started) = channel();
        let (go_on, may_go_on) = channel::<()>();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                holds.wait(move || {
                    started.send(()).unwrap();
                    may_go_on.recv().unwrap();
                })
            });
            is_started.recv().unwrap();
            let capture = scope.spawn(|| holds.begin());
            while holds.waits.try_read().is_ok() {
                thread::yield_now();
            }
            // A thread that has the GIL, for which the wait above waits.
            assert!(holds.is_held());
            assert!(holds.wait(|| ()).is_none());
            assert!(!capture.is_finished(), "it returns after the wait");
            go_on.send(()).unwrap();
            assert!(waiter.join().unwrap().is_some());
            capture.join().unwrap();
        });
        assert!(holds.end());
    }
}
