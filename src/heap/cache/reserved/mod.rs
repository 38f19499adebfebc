//! A lock that costs a thread that uses it alone nearly nothing.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError, TryLockError};

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
pub(in crate::heap) struct Visitor {
    name: u64,
    busy: Arc<Busy>,
}

/// Its visitor is inside, or about to look whether it may be. Written by it alone: a word of the lock's
/// would have two writers where the lock went to another since the first one looked, and the first one
/// would say of the other that it has left.
// In cache lines of its own: 128 bytes, since x86 fetches lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Busy(AtomicBool);

impl Visitor {
    pub(in crate::heap) fn new() -> Self {
        // Not loom's: names are no part of what is modelled.
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Self {
            name: NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            busy: Arc::new(Busy(AtomicBool::new(false))),
        }
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
    fence: Fence,
    /// A hint, written under `turn`: the last two visitors were not the same, and none came [`FIRST`] times since.
    crowded: AtomicBool,
    turn: Mutex<Turn>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is given out to one thread at a time, each after the other is done with it (the
// protocol above), which takes no more than that it may be sent.
unsafe impl<T: Send> Sync for Reserved<T> {}

/// What decides for whom it is reserved.
struct Turn {
    /// Of whom it is reserved for, or was until somebody began to take it away.
    owner: Option<Arc<Busy>>,
    last: u64,
    /// How often the last one came in a row; how often it has to.
    streak: u32,
    needed: u32,
    /// How often others turned away.
    turned_away: u32,
    /// The last visitor that waited for its turn, and how often in a row. Turns of others do not count.
    visitor: u64,
    visits: u32,
}

impl<T> Reserved<T> {
    /// Reserved for nobody.
    pub(in crate::heap) fn new(value: T) -> Self {
        Self::made(value, Fence::of_process(), FIRST)
    }

    fn made(value: T, fence: Fence, needed: u32) -> Self {
        Self {
            visitor: AtomicU64::new(0),
            fence,
            crowded: AtomicBool::new(false),
            turn: Mutex::new(Turn {
                owner: None,
                last: 0,
                streak: 0,
                needed,
                turned_away: 0,
                visitor: 0,
                visits: 0,
            }),
            value: UnsafeCell::new(value),
        }
    }

    /// What `f` gets from the value, for somebody who comes often.
    #[inline]
    pub(in crate::heap) fn with<R>(&self, visitor: &mut Visitor, f: impl FnOnce(&mut T) -> R) -> R {
        let visitor = &*visitor;
        // `f` is called in one place, for it to be compiled into this; its captures need no memory then.
        let _busy_or_turn = match self.enter(visitor) {
            Some(busy) => Ok(busy),
            None => Err(self.visitors_turn(visitor)),
        };
        let value = self.value.get_mut();
        // SAFETY: either it is reserved for this visitor, of whom there is one at a time by the exclusive
        // reference, and who would take it away waits for `busy`; or this has the mutex, and it is
        // reserved for nobody or for this visitor. What others did was acquired by the mutex or by `busy`.
        f(unsafe { value.deref() })
        // `value`, which loom watches, ends before `busy` and the turn.
    }

    /// The same, unless somebody else has the value, or has it reserved; `f` is not called then.
    #[inline]
    pub(in crate::heap) fn try_with<R>(
        &self,
        visitor: &mut Visitor,
        f: impl FnOnce(&mut T) -> R,
    ) -> Option<R> {
        let visitor = &*visitor;
        let _busy_or_turn = match self.enter(visitor) {
            Some(busy) => Ok(busy),
            None => Err(self.try_visitors_turn(visitor)?),
        };
        let value = self.value.get_mut();
        // SAFETY: as above.
        Some(f(unsafe { value.deref() }))
    }

    /// The same, where it is reserved for this visitor; `f` is not called otherwise.
    #[inline]
    pub(in crate::heap) fn if_reserved<R>(
        &self,
        visitor: &mut Visitor,
        f: impl FnOnce(&mut T) -> R,
    ) -> Option<R> {
        let visitor = &*visitor;
        let _busy = self.enter(visitor)?;
        let value = self.value.get_mut();
        // SAFETY: as above.
        Some(f(unsafe { value.deref() }))
    }

    /// Whether several visitors use it in turn; it may have changed since.
    #[inline]
    pub(in crate::heap) fn is_crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed)
    }

    /// Notes a visitor's turn.
    fn note(&self, turn: &mut Turn, visitor: &Visitor) {
        if turn.visitor != visitor.name {
            let first = turn.visitor == 0;
            (turn.visitor, turn.visits) = (visitor.name, 0);
            if !first {
                self.crowded.store(true, Ordering::Relaxed);
            }
        }
        turn.visits = turn.visits.saturating_add(1);
        if turn.visits == FIRST {
            self.crowded.store(false, Ordering::Relaxed);
        }
    }

    /// The way of who has it reserved.
    #[inline]
    fn enter<'a>(&self, visitor: &'a Visitor) -> Option<Reset<'a>> {
        if self.visitor.load(Ordering::Relaxed) != visitor.name {
            return None;
        }
        let Busy(busy) = &*visitor.busy;
        busy.store(true, Ordering::Relaxed);
        let busy = Reset(busy);
        self.fence.light();
        // Nobody else makes it this visitor's. Who would take it away from now on waits for `busy`: had
        // its fence come before this one, this load would see what it had stored.
        (self.visitor.load(Ordering::Relaxed) == visitor.name).then_some(busy)
    }

    /// The value, for somebody who comes seldom: microseconds, where it is reserved.
    pub(in crate::heap) fn lock(&self) -> Inside<'_, T> {
        let _turn = self.turn_of(self.lock_turn(), None);
        Inside {
            value: self.value.get_mut(),
            _turn,
        }
    }

    fn lock_turn(&self) -> MutexGuard<'_, Turn> {
        // A panic under the mutex was the caller's, in the middle of a change to its value.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cold]
    #[inline(never)]
    fn visitors_turn(&self, visitor: &Visitor) -> MutexGuard<'_, Turn> {
        self.turn_of(self.lock_turn(), Some(visitor))
    }

    #[cold]
    #[inline(never)]
    fn try_visitors_turn(&self, visitor: &Visitor) -> Option<MutexGuard<'_, Turn>> {
        let mut turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if turn.owner.is_some() && turn.turned_away < PATIENCE {
            turn.turned_away += 1;
            return None;
        }
        Some(self.turn_of(turn, Some(visitor)))
    }

    /// The turn of who came by [`enter`](Self::enter) in vain, or never does: it is not reserved for them,
    /// and for nobody else then.
    fn turn_of<'a>(
        &'a self,
        mut turn: MutexGuard<'a, Turn>,
        visitor: Option<&Visitor>,
    ) -> MutexGuard<'a, Turn> {
        if let Some(owner) = &turn.owner {
            self.visitor.store(0, Ordering::Relaxed);
            self.fence.heavy();
            let mut tries = 0_u32;
            // Acquires what the owner did to the value.
            while owner.0.load(Ordering::Acquire) {
                pause(tries);
                tries = tries.saturating_add(1);
            }
            turn.owner = None;
            turn.needed = (turn.needed * 2).min(MOST);
            turn.turned_away = 0;
            turn.last = 0;
        }
        if let Some(visitor) = visitor {
            self.note(&mut turn, visitor);
        }
        let name = visitor.map_or(0, |visitor| visitor.name);
        if turn.last != name {
            turn.last = name;
            turn.streak = 0;
        } else if let Some(visitor) = visitor {
            turn.streak += 1;
            // A reservation that is dear to take away costs more than it saves.
            if turn.streak >= turn.needed && self.fence.is_cheap() {
                turn.streak = 0;
                turn.owner = Some(Arc::clone(&visitor.busy));
                // Others see it under the mutex.
                self.visitor.store(name, Ordering::Relaxed);
            }
        }
        turn
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
mod tests;

#[cfg(all(test, loom))]
mod under_loom;
