//! A lock that costs a thread that uses it alone nearly nothing.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, TryLockError};

use super::biased::{Reset, pause};
use super::sync::{AtomicBool, AtomicU64, Fence, MutPtr, Mutex, MutexGuard, Ordering, UnsafeCell};

/// Who comes first so often in a row without another in between has the lock reserved, and so often
/// at most, after it was taken from others again and again.
const FIRST: u32 = 64;
const MOST: u32 = 4096;
/// So often others turn away from a reserved lock until one takes it.
const PATIENCE: u32 = 64;

/// Somebody who may have a [`Reserved`] lock reserved. There are no two of one name.
#[derive(Debug)]
pub(in crate::heap) struct Visitor(u64);

impl Visitor {
    pub(in crate::heap) fn new() -> Self {
        // Not loom's: names are no part of what is modelled.
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Self(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }
}

/// A mutex that a visitor who comes again and again has reserved for it: then it enters by plain stores
/// and loads, which unlike a mutex's do not wait until its earlier stores have reached the cache. The next
/// other one takes the reservation away, at the price of a barrier in every thread of the process. (Lock
/// reservation: Kawachiya et al., OOPSLA 2002.)
///
/// The two meet as in [`Biased`](super::Biased): the visitor says that it is busy and then looks whether
/// the lock is still its own; the other takes the lock away and then looks whether the visitor is busy.
// In cache lines of its own: 128 bytes, since x86 fetches lines in pairs.
#[repr(align(128))]
pub(in crate::heap) struct Reserved<T> {
    /// For whom it is reserved; 0: nobody. Written under `turn`.
    visitor: AtomicU64,
    /// That visitor is inside, or about to look whether it may be. Written by it alone.
    busy: AtomicBool,
    fence: Fence,
    turn: Mutex<Turn>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is given out to one thread at a time, each after the other is done with it (the
// protocol above), which takes no more than that it may be sent.
unsafe impl<T: Send> Sync for Reserved<T> {}

/// What decides for whom it is reserved.
struct Turn {
    last: u64,
    /// How often the last one came in a row; how often it has to.
    streak: u32,
    needed: u32,
    /// How often others turned away.
    turned_away: u32,
}

impl<T> Reserved<T> {
    /// Reserved for nobody.
    pub(in crate::heap) fn new(value: T) -> Self {
        Self::made(value, Fence::of_process(), FIRST)
    }

    fn made(value: T, fence: Fence, needed: u32) -> Self {
        Self {
            visitor: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            fence,
            turn: Mutex::new(Turn {
                last: 0,
                streak: 0,
                needed,
                turned_away: 0,
            }),
            value: UnsafeCell::new(value),
        }
    }

    /// What `f` gets from the value, for somebody who comes often.
    #[inline]
    pub(in crate::heap) fn with<R>(&self, visitor: &mut Visitor, f: impl FnOnce(&mut T) -> R) -> R {
        match self.enter(visitor) {
            // SAFETY: it is reserved for this visitor, of whom there is one at a time by the exclusive
            // reference, and who would take it away waits for `busy`.
            Some((_busy, value)) => f(unsafe { value.deref() }),
            None => self.with_in_turn(visitor, f),
        }
    }

    /// The same, unless somebody else has the value, or has it reserved; `f` is not called then.
    #[inline]
    pub(in crate::heap) fn try_with<R>(
        &self,
        visitor: &mut Visitor,
        f: impl FnOnce(&mut T) -> R,
    ) -> Option<R> {
        match self.enter(visitor) {
            // SAFETY: as above.
            Some((_busy, value)) => Some(f(unsafe { value.deref() })),
            None => Some(f(&mut *self.try_in_turn(visitor.0)?)),
        }
    }

    /// The value, for somebody who comes seldom: microseconds, where it is reserved.
    pub(in crate::heap) fn lock(&self) -> Inside<'_, T> {
        self.lock_in_turn(0)
    }

    /// The way of who has it reserved.
    #[inline]
    fn enter(&self, visitor: &mut Visitor) -> Option<(Reset<'_>, MutPtr<T>)> {
        if self.visitor.load(Ordering::Relaxed) != visitor.0 {
            return None;
        }
        self.busy.store(true, Ordering::Relaxed);
        let busy = Reset(&self.busy);
        self.fence.light();
        // Nobody else makes it this visitor's. Who would take it away from now on waits for `busy`: had
        // its fence come before this one, this load would see what it had stored.
        (self.visitor.load(Ordering::Relaxed) == visitor.0).then(|| (busy, self.value.get_mut()))
    }

    #[inline(never)]
    fn with_in_turn<R>(&self, visitor: &mut Visitor, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut *self.lock_in_turn(visitor.0))
    }

    #[inline(never)]
    fn lock_in_turn(&self, visitor: u64) -> Inside<'_, T> {
        // A panic under the mutex was the caller's, in the middle of a change to its value.
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.in_turn(turn, visitor)
    }

    #[inline(never)]
    fn try_in_turn(&self, visitor: u64) -> Option<Inside<'_, T>> {
        let mut turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let owner = self.visitor.load(Ordering::Relaxed);
        if owner != 0 && owner != visitor && turn.turned_away < PATIENCE {
            turn.turned_away += 1;
            return None;
        }
        Some(self.in_turn(turn, visitor))
    }

    fn in_turn<'a>(&'a self, mut turn: MutexGuard<'a, Turn>, visitor: u64) -> Inside<'a, T> {
        let owner = self.visitor.load(Ordering::Relaxed);
        if owner != 0 && owner != visitor {
            self.visitor.store(0, Ordering::Relaxed);
            self.fence.heavy();
            let mut tries = 0_u32;
            // Acquires what the owner did to the value.
            while self.busy.load(Ordering::Acquire) {
                pause(tries);
                tries = tries.saturating_add(1);
            }
            turn.needed = (turn.needed * 2).min(MOST);
            turn.turned_away = 0;
            turn.last = 0;
        }
        if turn.last != visitor {
            turn.last = visitor;
            turn.streak = 0;
        } else if visitor != 0 {
            turn.streak += 1;
            if turn.streak >= turn.needed {
                turn.streak = 0;
                // Others see it under the mutex.
                self.visitor.store(visitor, Ordering::Relaxed);
            }
        }
        Inside {
            value: self.value.get_mut(),
            _turn: turn,
        }
    }
}

impl<T> fmt::Debug for Reserved<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reserved").finish_non_exhaustive()
    }
}

/// The value, until this is dropped. Fields are dropped in their order.
pub(in crate::heap) struct Inside<'a, T> {
    value: MutPtr<T>,
    _turn: MutexGuard<'a, Turn>,
}

impl<T> Deref for Inside<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this has the mutex, and the lock is reserved for nobody, or for the visitor that this
        // is, who has not entered by its other way. What others did was acquired by the mutex or by `busy`.
        unsafe { self.value.deref() }
    }
}

impl<T> DerefMut for Inside<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and no other reference comes from this guard.
        unsafe { self.value.deref() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    fn owner<T>(value: &Reserved<T>) -> u64 {
        value.visitor.load(Ordering::Relaxed)
    }

    fn step(value: &mut [u64; 2]) -> u64 {
        assert_eq!(value[0], value[1], "two are inside at a time");
        value[0] += 1;
        std::hint::black_box(&mut *value);
        value[1] += 1;
        1
    }

    fn count_with(fence: Fence) {
        const ROUNDS: u64 = 20_000;
        let value = &Reserved::made([0_u64; 2], fence, 3);
        let start = &Barrier::new(3);
        thread::scope(|scope| {
            for thread in 0..3_u64 {
                scope.spawn(move || {
                    let mut visitor = Visitor::new();
                    start.wait();
                    let mut done = 0;
                    while done < ROUNDS {
                        // One of them never comes as a visitor.
                        let inside = match (thread, done % 64) {
                            (0, _) => Some(step(&mut value.lock())),
                            (_, 0..48) => Some(value.with(&mut visitor, step)),
                            _ => value.try_with(&mut visitor, step),
                        };
                        done += inside.unwrap_or(0);
                        if thread == 0 && done.is_multiple_of(16) {
                            thread::yield_now();
                        }
                    }
                });
            }
        });
        assert_eq!(*value.lock(), [3 * ROUNDS; 2]);
    }

    #[test]
    fn no_two_are_inside_and_no_count_is_lost() {
        count_with(Fence::of_process());
    }

    #[test]
    fn nor_where_the_kernel_has_no_membarrier() {
        count_with(Fence::Mutual);
    }

    #[test]
    fn who_comes_again_and_again_has_it_reserved_until_another_comes() {
        let value = Reserved::new(0);
        let (mut one, mut other) = (Visitor::new(), Visitor::new());
        for _ in 0..FIRST {
            value.with(&mut one, |value| *value += 1);
            assert_eq!(owner(&value), 0);
        }
        value.with(&mut one, |value| *value += 1);
        assert_eq!(owner(&value), one.0);
        value.with(&mut one, |value| *value += 1);
        // Others turn away for a while, and then take it.
        for _ in 0..PATIENCE {
            assert!(value.try_with(&mut other, |_| ()).is_none());
        }
        assert_eq!(value.try_with(&mut other, |value| *value), Some(FIRST + 2));
        assert_eq!(owner(&value), 0);
        // It takes twice as long now.
        for _ in 0..2 * FIRST {
            value.with(&mut one, |_| ());
            assert_eq!(owner(&value), 0);
        }
        value.with(&mut one, |_| ());
        assert_eq!(owner(&value), one.0);
        value.with(&mut other, |_| ());
        assert_eq!(owner(&value), 0);
    }

    #[test]
    fn who_takes_turns_has_it_never() {
        let value = Reserved::new(());
        let mut visitors = [Visitor::new(), Visitor::new()];
        for round in 0..10 * FIRST as usize {
            value.with(&mut visitors[round % 2], |_| ());
            drop(value.lock());
            assert_eq!(owner(&value), 0);
        }
    }

    #[test]
    fn while_it_is_locked_trying_fails_and_changes_nothing() {
        let value = Reserved::new(1);
        let mut visitor = Visitor::new();
        let held = value.lock();
        assert!(value.try_with(&mut visitor, |_| ()).is_none());
        drop(held);
        assert_eq!(value.try_with(&mut visitor, |value| *value), Some(1));
    }

    #[test]
    fn a_panic_inside_leaves_it_usable() {
        let value = Reserved::made(1, Fence::of_process(), 1);
        let mut visitor = Visitor::new();
        for _ in 0..4 {
            let panics = || value.with(&mut visitor, |_| panic!("on purpose"));
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        }
        assert_eq!(owner(&value), visitor.0);
        assert_eq!(*value.lock(), 1);
    }
}

#[cfg(all(test, loom))]
mod under_loom {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Loom watches the value: it fails if two are inside at a time, or if one does not see for sure what
    /// the one before did.
    #[test]
    fn one_has_it_reserved_and_another_takes_it() {
        loom::model(|| {
            let value = Arc::new(Reserved::made(0, Fence::of_process(), 1));
            let mut visitor = Visitor::new();
            value.with(&mut visitor, |value| *value += 1);
            value.with(&mut visitor, |value| *value += 1);
            assert_eq!(value.visitor.load(Ordering::Relaxed), visitor.0);
            let other = {
                let value = value.clone();
                thread::spawn(move || *value.lock() += 1)
            };
            value.with(&mut visitor, |value| *value += 1);
            value.with(&mut visitor, |value| *value += 1);
            other.join().unwrap();
            assert_eq!(value.with(&mut visitor, |value| *value), 5);
        });
    }

    #[test]
    fn two_have_it_reserved_in_turn() {
        loom::model(|| {
            let value = Arc::new(Reserved::made(0, Fence::of_process(), 1));
            let other = {
                let value = value.clone();
                thread::spawn(move || {
                    let mut visitor = Visitor::new();
                    value.with(&mut visitor, |value| *value += 1);
                    value.with(&mut visitor, |value| *value += 1);
                    value.with(&mut visitor, |value| *value += 1);
                })
            };
            let mut visitor = Visitor::new();
            value.with(&mut visitor, |value| *value += 1);
            value.with(&mut visitor, |value| *value += 1);
            value.try_with(&mut visitor, |value| {
                *value -= 1;
                *value += 1;
            });
            other.join().unwrap();
            assert_eq!(*value.lock(), 5);
        });
    }
}
