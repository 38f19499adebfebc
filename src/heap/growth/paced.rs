//! Growth chunk by chunk: between two chunks other threads, and other processes, get the driver.

use std::sync::MutexGuard;
use std::thread;
use std::time::{Duration, Instant};

use super::super::backing::{Backing, Grown, Want};
use super::super::inner::HeapInner;
use super::ended;
use crate::per_driver::lock;
use crate::{Error, Result};

/// The backing, locked. The lock is released while growth rests.
pub(in super::super) struct Locked<'a> {
    heap: &'a HeapInner,
    /// `None` only within [`release`](Self::release).
    guard: Option<MutexGuard<'a, Option<Backing>>>,
}

impl Locked<'_> {
    /// Returns the backing; an error if its memory was given back.
    pub(in super::super) fn backing(&mut self) -> Result<&mut Backing> {
        let guard = self.guard.as_mut();
        guard.and_then(|guard| guard.as_mut()).ok_or_else(ended)
    }

    /// Rests after a chunk that took this long: at least a fiftieth of it, since a thread that wakes up for the lock takes
    /// longer than this thread takes to lock it again.
    pub(super) fn release(&mut self, took: Duration) {
        let rest = self.heap.growth.rest_after(took).max(took / 50);
        self.guard = None;
        thread::sleep(rest);
        self.guard = Some(lock(&self.heap.backing));
    }

    /// Waits until growth of another thread has ended, after this thread's was refused. Returns the error if there is none.
    pub(super) fn wait_for_others(&mut self, refused: Error) -> Result<()> {
        match self.others_ended()? {
            true => Ok(()),
            false => Err(refused),
        }
    }

    /// Waits until growth of another thread has ended; returns `false` at once if there is none.
    fn others_ended(&mut self) -> Result<bool> {
        if !self.backing()?.is_growing() {
            return Ok(false);
        }
        if let Some(guard) = self.guard.take() {
            let woken = self.heap.grown.wait(guard);
            self.guard = Some(woken.unwrap_or_else(|poisoned| poisoned.into_inner()));
        }
        Ok(true)
    }
}

impl HeapInner {
    pub(in super::super) fn locked(&self) -> Locked<'_> {
        Locked {
            heap: self,
            guard: Some(lock(&self.backing)),
        }
    }

    /// Adds memory so that `want` fits, until all has at most `most` bytes. Returns the new ranges; none if the caller has
    /// to look again, because growth of another thread has ended. Returns `None` if `want` would exceed `most`.
    ///
    /// Releases the lock between two chunks. Other threads see nothing of the new memory until all of it is there.
    ///
    /// # Errors
    /// As [`Backing::order`] and [`Backing::step`].
    pub(in super::super) fn grow(
        &self,
        locked: &mut Locked<'_>,
        want: Want<'_>,
        most: u64,
    ) -> Result<Option<Vec<Grown>>> {
        let mut order = match locked.backing()?.order(want, most) {
            Ok(Some(order)) => order,
            // Other growth may need less than it claims, and it may fail.
            Ok(None) => return Ok(locked.others_ended()?.then(Vec::new)),
            Err(error) => return locked.wait_for_others(error).map(|()| Some(Vec::new())),
        };
        loop {
            let began = Instant::now();
            match locked.backing()?.step(&mut order) {
                Ok(true) if order.is_made() => {}
                Ok(true) => locked.release(began.elapsed()),
                Ok(false) => break,
                Err(error) => {
                    self.grown.notify_all();
                    return locked.wait_for_others(error).map(|()| Some(Vec::new()));
                }
            }
        }
        let grown = locked.backing()?.deliver(order);
        self.grown.notify_all();
        Ok(Some(grown))
    }
}
