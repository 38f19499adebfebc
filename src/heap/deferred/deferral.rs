//! The queue under its locks: the threads that collect from it take turns, and the heap ends between two turns.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use super::Deferred;
use crate::Result;
use crate::driver::Driver;
use crate::per_driver::lock;
use crate::reports::Reports;

/// A heap's blocks that wait for GPU work.
///
/// `waiting` and `collecting` come before all other locks, because a block whose work has passed is in no thread's reach until
/// the core has it. `deferred` comes after them; a thread that holds it takes no other lock, unless it takes all of them.
///
/// # What keeps the memory mapped
/// A block in use and a handle do: the heap ends after the last of both. Deferred blocks count as freed, so they do not, and
/// the background thread, which collects them, has neither. Its turn does: it takes blocks out of the queue, scrubs
/// or checks their bytes and returns them to the core within one turn, and [`end`](Self::end) has both turns when it takes the
/// queue. No thread finds a block afterwards.
///
/// No thread calls a function of the program within a turn: the function may drop the last handle, and `end` waits for the
/// turn.
pub(crate) struct Deferral<T: Copy> {
    /// `None` once the heap has ended.
    deferred: Mutex<Option<Deferred<T>>>,
    /// Held by the thread that collects blocks whose work has finished.
    collecting: Mutex<()>,
    /// Held by the thread that waits for all deferred blocks.
    waiting: Mutex<()>,
    /// How many blocks the waiting thread has taken out of `deferred`; written with `deferred` locked.
    awaited: AtomicUsize,
    /// How many threads have come to wait for the turn of `waiting`.
    #[cfg(test)]
    arrived: AtomicUsize,
}

impl<T: Copy> Deferral<T> {
    pub(crate) fn new(driver: &Driver, reports: &Arc<Reports>) -> Self {
        Self {
            deferred: Mutex::new(Some(Deferred::new(driver, reports))),
            collecting: Mutex::default(),
            waiting: Mutex::default(),
            awaited: AtomicUsize::new(0),
            #[cfg(test)]
            arrived: AtomicUsize::new(0),
        }
    }

    /// Locks the queue. It is `None` once the heap has ended.
    pub(crate) fn deferred(&self) -> MutexGuard<'_, Option<Deferred<T>>> {
        lock(&self.deferred)
    }

    /// Returns the number of blocks that wait for GPU work, including those that a thread waits for.
    pub(crate) fn pending(&self) -> usize {
        let deferred = self.deferred();
        let waiting = deferred.as_ref().map_or(0, |deferred| deferred.pending());
        waiting + self.awaited.load(Relaxed)
    }

    /// Ends the queue: waits until no thread has a turn, and returns the blocks that wait; `None` if it has ended before.
    /// Whatever a thread did with blocks that it collected happens before this returns.
    pub(crate) fn end(&self) -> Option<Deferred<T>> {
        let _turns = (lock(&self.waiting), lock(&self.collecting));
        self.deferred().take()
    }

    /// Passes the blocks whose GPU work has finished to `take_back`; returns their number.
    ///
    /// # Errors
    /// As [`Deferred::poll`]; `take_back` gets the blocks whose work has finished all the same.
    pub(crate) fn collect(&self, take_back: impl FnOnce(&[T])) -> Result<usize> {
        // One thread at a time: the second must find in the core the blocks that the first has collected.
        let turn = lock(&self.collecting);
        let mut passed = Vec::new();
        let result = match self.deferred().as_mut() {
            Some(deferred) => deferred.poll(&mut passed),
            None => Ok(()),
        };
        take_back(&passed);
        drop(turn);
        result.map(|()| passed.len())
    }

    /// Waits for the GPU work of all blocks and passes them to `take_back`, which is not called if there are none;
    /// returns their number.
    ///
    /// # Errors
    /// As [`Deferred::drain`]; `take_back` gets the blocks whose work has finished, and the rest stay deferred.
    pub(crate) fn wait(&self, take_back: impl FnOnce(&[T])) -> Result<usize> {
        #[cfg(test)]
        self.arrived.fetch_add(1, Relaxed);
        // One thread at a time: a second one would not see the blocks that the first waits for.
        let turn = lock(&self.waiting);
        let mut taken = {
            let mut deferred = self.deferred();
            let Some(deferred) = deferred.as_mut().filter(|all| all.pending() > 0) else {
                return Ok(0);
            };
            let taken = deferred.take();
            self.awaited.store(taken.pending(), Relaxed);
            taken
        };
        let mut passed = Vec::new();
        let result = taken.drain(&mut passed);
        take_back(&passed);
        let mut deferred = self.deferred();
        self.awaited.store(0, Relaxed);
        if let Some(deferred) = deferred.as_mut() {
            deferred.put_back(taken);
        }
        drop(deferred);
        drop(turn);
        result.map(|()| passed.len())
    }
}

#[cfg(test)]
impl<T: Copy> Deferral<T> {
    /// Returns whether a thread collects.
    pub(crate) fn is_collecting(&self) -> bool {
        self.collecting.try_lock().is_err()
    }

    /// Takes the turn of a thread that collects.
    pub(crate) fn turn_to_collect(&self) -> MutexGuard<'_, ()> {
        lock(&self.collecting)
    }

    /// Returns how many threads have come to [`wait`](Self::wait), whether they have the turn or not.
    pub(crate) fn arrived(&self) -> usize {
        self.arrived.load(Relaxed)
    }

    /// Takes the turn of a thread that waits.
    pub(crate) fn turn_to_wait(&self) -> MutexGuard<'_, ()> {
        lock(&self.waiting)
    }
}
