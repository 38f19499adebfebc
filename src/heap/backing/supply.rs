//! The backing under its lock, and growth chunk by chunk: between two chunks other threads, and other processes, get
//! the driver.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Backing, Order, Want};
use crate::per_driver::lock;
use crate::{Error, Growth, Result};

/// Where a heap's memory comes from.
///
/// The only lock is `backing`. It comes after the deferral's turns, and before `members`, a cache, the debug mode's
/// table and the core. Chunks are created and given back under it.
pub(crate) struct Supply {
    /// `None` once all memory is given back.
    backing: Mutex<Option<Backing>>,
    /// How many threads wait for the lock.
    waiting: AtomicUsize,
    /// How many threads sleep until growth has ended, and wait for the lock from then on. Changes only under the lock.
    sleeping: AtomicUsize,
    /// Growth that other threads may wait for has ended.
    grown: Condvar,
    /// How often growth has ended. Changes only under the lock.
    endings: AtomicUsize,
    pub(crate) growth: Growth,
}

/// The backing, locked. The lock is released while growth rests.
pub(crate) struct Locked<'a> {
    supply: &'a Supply,
    /// `None` only within [`release`](Self::release).
    guard: Option<MutexGuard<'a, Option<Backing>>>,
}

/// Growth that was begun by the thread that has the lock. When dropped, also by a panic, the growth has ended: its claim would
/// keep other threads waiting.
struct Growing<'l, 's, 'w> {
    locked: &'l mut Locked<'s>,
    /// `None` once its chunks are memory of the heap.
    order: Option<Order<'w>>,
}

impl Growing<'_, '_, '_> {
    /// Makes all chunks, and returns the new ranges.
    fn finish(mut self) -> Result<Vec<Range<u64>>> {
        while let Some(order) = &mut self.order {
            let began = Instant::now();
            if !self.locked.backing()?.step(order)? {
                break;
            }
            if !order.is_made() {
                self.locked.release(began.elapsed());
            }
        }
        let backing = self.locked.backing()?;
        Ok(self
            .order
            .take()
            .map_or_else(Vec::new, |order| backing.deliver(order)))
    }
}

impl Drop for Growing<'_, '_, '_> {
    fn drop(&mut self) {
        if let (Some(mut order), Ok(backing)) = (self.order.take(), self.locked.backing()) {
            backing.cancel(&mut order);
        }
        self.locked.growth_ended();
    }
}

impl Supply {
    pub(crate) fn new(backing: Backing, growth: Growth) -> Self {
        Self {
            backing: Mutex::new(Some(backing)),
            waiting: AtomicUsize::new(0),
            sleeping: AtomicUsize::new(0),
            grown: Condvar::new(),
            endings: AtomicUsize::new(0),
            growth,
        }
    }

    /// Locks the backing, to look at it. It is `None` once all memory is given back. Waits while a chunk is created.
    pub(crate) fn backing(&self) -> MutexGuard<'_, Option<Backing>> {
        self.waiting.fetch_add(1, Relaxed);
        let guard = lock(&self.backing);
        self.waiting.fetch_sub(1, Relaxed);
        guard
    }

    /// Locks the backing, to add memory or give it back.
    pub(crate) fn locked(&self) -> Locked<'_> {
        Locked {
            supply: self,
            guard: Some(self.backing()),
        }
    }
}

impl Locked<'_> {
    /// Returns the backing; an error if its memory was given back.
    pub(crate) fn backing(&mut self) -> Result<&mut Backing> {
        let backing = self.guard.as_mut().and_then(|guard| guard.as_mut());
        backing.ok_or_else(|| Error::invalid("heap", "its memory was given back"))
    }

    /// Adds memory so that `want` fits, until all has at most `most` bytes. Returns the new ranges; none if the caller has
    /// to look again, because growth of another thread has ended. Returns `None` if `want` would exceed `most`.
    ///
    /// Releases the lock between two chunks. Other threads see nothing of the new memory until all of it is there.
    ///
    /// # Errors
    /// As [`Backing::order`] and [`Backing::step`].
    pub(crate) fn grow(&mut self, want: Want<'_>, most: u64) -> Result<Option<Vec<Range<u64>>>> {
        let order = match self.backing()?.order(want, most) {
            Ok(Some(order)) => order,
            // Other growth may need less than it claims, and it may fail.
            Ok(None) => return Ok(self.others_ended()?.then(Vec::new)),
            Err(error) => return self.wait_for_others(error).map(|()| Some(Vec::new())),
        };
        let growing = Growing {
            locked: self,
            order: Some(order),
        };
        match growing.finish() {
            Ok(grown) => Ok(Some(grown)),
            Err(error) => self.wait_for_others(error).map(|()| Some(Vec::new())),
        }
    }

    /// Wakes the threads that wait for growth of another to end.
    pub(crate) fn growth_ended(&self) {
        let sleeping = self.supply.sleeping.swap(0, Relaxed);
        self.supply.waiting.fetch_add(sleeping, Relaxed);
        self.supply.endings.fetch_add(1, Relaxed);
        self.supply.grown.notify_all();
    }

    /// Returns the rest after a chunk that took this long.
    pub(crate) fn rest_after(&self, took: Duration) -> Duration {
        let rest = self.supply.growth.rest_after(took);
        if self.supply.waiting.load(Relaxed) == 0 {
            return rest;
        }
        // A thread that wakes up for the lock takes longer than this thread takes to lock it again.
        rest.max(took / 50)
    }

    /// Rests after a chunk that took this long, as [`Growth`] says, and lets threads that wait for the lock have it. With
    /// neither, returns at once: in a pause, calls of other processes could begin.
    pub(crate) fn release(&mut self, took: Duration) {
        let rest = self.rest_after(took);
        if rest.is_zero() {
            return;
        }
        self.guard = None;
        thread::sleep(rest);
        self.guard = Some(self.supply.backing());
    }

    /// Waits until growth of another thread has ended, after this thread's was refused. Returns the error if there is none.
    pub(crate) fn wait_for_others(&mut self, refused: Error) -> Result<()> {
        self.others_ended()?.then_some(()).ok_or(refused)
    }

    /// Waits until growth of another thread has ended; returns `false` at once if there is none.
    fn others_ended(&mut self) -> Result<bool> {
        if !self.backing()?.is_growing() {
            return Ok(false);
        }
        if let Some(mut guard) = self.guard.take() {
            let supply = self.supply;
            supply.sleeping.fetch_add(1, Relaxed);
            let endings = supply.endings.load(Relaxed);
            while supply.endings.load(Relaxed) == endings {
                let woken = supply.grown.wait(guard);
                guard = woken.unwrap_or_else(PoisonError::into_inner);
            }
            supply.waiting.fetch_sub(1, Relaxed);
            self.guard = Some(guard);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::driver::NodeId;
    use crate::{Driver, Heap, Machine};

    #[test]
    fn growth_that_ends_by_a_panic_leaves_no_claim_and_wakes_the_threads_that_wait() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let heap = Heap::on(NodeId(0)).limit(8 << 20).chunk(4 << 20);
        let heap = heap.build(&driver).unwrap();
        let supply = &heap.inner().supply;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let mut locked = supply.locked();
            let want = Want::More { bytes: 8 << 20 };
            let backing = locked.backing().unwrap();
            let mut order = backing.order(want, u64::MAX).unwrap().unwrap();
            assert!(backing.step(&mut order).unwrap());
            let _growing = Growing {
                locked: &mut locked,
                order: Some(order),
            };
            panic!("a driver's");
        }));
        assert!(ended.is_err());
        assert_eq!(supply.endings.load(Relaxed), 1);
        assert!(!supply.locked().backing().unwrap().is_growing());
        heap.reserve(8 << 20).unwrap();
        assert_eq!(heap.backed(), 8 << 20);
    }
}
