//! How allocating threads tell the background thread that memory runs short.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::core::Core;
use crate::per_driver::lock;

/// How allocating threads wake the background thread.
pub(crate) struct Signal {
    /// How many bytes to keep free; 0: there is no thread.
    pub(super) ahead: u64,
    /// Whether the thread is awake already, in which case the lock is not needed.
    pub(super) awake: AtomicBool,
    /// The free bytes and spare nodes when memory was last taken. The thread reads them without blocking
    /// allocations.
    pub(super) free: AtomicU64,
    pub(super) spare: AtomicUsize,
    wish: Mutex<Wish>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    Rest,
    Grow,
    End,
}

impl Signal {
    pub(crate) fn new(ahead: u64) -> Self {
        Self {
            ahead,
            awake: AtomicBool::new(true),
            free: AtomicU64::new(0),
            spare: AtomicUsize::new(0),
            wish: Mutex::new(Wish::Grow),
            changed: Condvar::new(),
        }
    }

    /// Records how much is free after an allocation, and wakes the thread if that is too little.
    #[inline]
    pub(crate) fn look(&self, core: &Core) {
        if self.ahead > 0 {
            let free = core.free_bytes();
            self.free.store(free, Relaxed);
            self.spare.store(core.spare_nodes(), Relaxed);
            if free < self.ahead && !self.awake.swap(true, Relaxed) {
                self.set(Wish::Grow);
            }
        }
    }

    /// Stops the thread.
    pub(crate) fn stop(&self) {
        self.set(Wish::End);
    }

    fn set(&self, wish: Wish) {
        let mut current = lock(&self.wish);
        if *current != Wish::End {
            *current = wish;
        }
        self.changed.notify_all();
    }

    /// Waits for `pause` or until the thread is to stop; returns `true` if it is to stop.
    pub(super) fn ends_within(&self, pause: Duration) -> bool {
        let is_on = |wish: &mut Wish| *wish != Wish::End;
        let waited = self
            .changed
            .wait_timeout_while(lock(&self.wish), pause, is_on);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == Wish::End
    }

    /// Waits for `pause` if there is one, then until the thread is to grow the heap; returns `false` if it is to stop.
    pub(super) fn wait(&self, pause: Option<Duration>) -> bool {
        if pause.is_some_and(|pause| self.ends_within(pause)) {
            return false;
        }
        let rests = |wish: &mut Wish| *wish == Wish::Rest;
        let waited = self.changed.wait_while(lock(&self.wish), rests);
        let mut wish = waited.unwrap_or_else(PoisonError::into_inner);
        let grows = *wish == Wish::Grow;
        if grows {
            *wish = Wish::Rest;
        }
        grows
    }
}
