//! How allocating threads wake the background threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::core::Core;
use crate::per_driver::lock;

/// How allocating threads wake the background thread, and the heap's end its threads.
pub(super) struct Signal {
    /// How many bytes to keep free; 0: there is no thread.
    pub(super) ahead: u64,
    /// Whether the thread is awake or about to be, in which case the lock is not needed.
    pub(super) awake: AtomicBool,
    /// The free bytes when memory was last taken. The thread reads them without blocking allocations.
    pub(super) free: AtomicU64,
    /// Whether the threads are to stop.
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    pub(super) fn new(ahead: u64) -> Self {
        Self {
            ahead,
            awake: AtomicBool::new(true),
            free: AtomicU64::new(0),
            ended: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    /// Records how much is free after an allocation, and wakes the thread if that is too little.
    #[inline]
    pub(super) fn look(&self, core: &Core) {
        if self.ahead > 0 {
            let free = core.free_bytes();
            self.free.store(free, Relaxed);
            if free < self.ahead && !self.awake.swap(true, Relaxed) {
                // So that this comes before the thread looks at `awake`, or after it sleeps.
                drop(lock(&self.ended));
                self.changed.notify_all();
            }
        }
    }

    /// Stops the threads.
    pub(super) fn stop(&self) {
        *lock(&self.ended) = true;
        self.changed.notify_all();
    }

    /// Waits for `pause` or until the thread is to stop; returns `true` if it is to stop.
    pub(super) fn ends_within(&self, pause: Duration) -> bool {
        let lasts = |ended: &mut bool| !*ended;
        let ended = lock(&self.ended);
        let waited = self.changed.wait_timeout_while(ended, pause, lasts);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until memory may be short; returns `false` if the thread is to stop.
    pub(super) fn wait(&self) -> bool {
        let sleeps = |ended: &mut bool| !*ended && !self.awake.load(Relaxed);
        let waited = self.changed.wait_while(lock(&self.ended), sleeps);
        !*waited.unwrap_or_else(PoisonError::into_inner)
    }
}
