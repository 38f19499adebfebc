//! A lock that its main user enters without an atomic read-modify-write.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, PoisonError, TryLockError};

use super::biased::{Reset, wait_until_reset};
use super::sync::{AtomicBool, AtomicU64, Fence, MutPtr, Mutex, MutexGuard, Ordering, UnsafeCell};

/// A visitor that enters this often in a row, with no other in between, gets the lock reserved. The number
/// doubles each time the reservation is revoked, up to `MOST`.
const FIRST: u32 = 64;
const MOST: u32 = 4096;
/// How often a thread tries to lock before it sleeps: some 10 µs in all.
#[cfg(not(loom))]
const SPINS: u32 = 20;
/// How often other visitors turn away from a reserved lock before one revokes the reservation.
const PATIENCE: u32 = 64;

/// A visitor that may have a [`Reserved`] lock reserved for it. No two have the same name.
pub(crate) struct Visitor {
    name: u64,
    busy: Arc<Busy>,
}

/// The visitor is inside, or about to check whether it may be. Only the visitor writes it. A word in the lock
/// itself would have two writers if the reservation moved after the first visitor's check: the first would
/// then mark the second as having left.
// On cache lines of its own: 128 bytes, since x86 fetches lines in pairs.
#[repr(align(128))]
struct Busy(AtomicBool);

impl Visitor {
    pub(crate) fn new() -> Self {
        // Not loom's: names are not part of the model.
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        Self {
            name: NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            busy: Arc::new(Busy(AtomicBool::new(false))),
        }
    }
}

/// A mutex that is reserved for a visitor that enters again and again. The visitor then enters by plain
/// stores and loads, which unlike a mutex's atomics do not wait until its earlier stores have reached the
/// cache. The next other thread revokes the reservation, at the price of a barrier in every thread of the
/// process. (Lock reservation: Kawachiya et al., OOPSLA 2002.)
///
/// The two synchronise as in [`Biased`](super::Biased): the visitor sets `busy` and then checks that the
/// reservation is still its own; the other thread revokes the reservation and then reads `busy`.
// On cache lines of its own: 128 bytes, since x86 fetches lines in pairs.
#[repr(align(128))]
pub(crate) struct Reserved<T> {
    /// The visitor that the lock is reserved for; 0: none. Written under `turn`.
    visitor: AtomicU64,
    fence: Fence,
    /// A hint, written under `turn`: the last two visitors were different, and none has entered [`FIRST`]
    /// times in a row since.
    crowded: AtomicBool,
    turn: Mutex<Turn>,
    value: UnsafeCell<T>,
}

// SAFETY: by the protocol above one thread at a time accesses the value, each after the previous one has
// finished. That needs only `T: Send`.
unsafe impl<T: Send> Sync for Reserved<T> {}

/// The state that decides the reservation.
struct Turn {
    /// The `busy` word of the visitor that the lock is reserved for, or was until a thread began to revoke
    /// it.
    owner: Option<Arc<Busy>>,
    /// The last visitor that waited for its turn, how often in a row, and how often it has to. Turns of other threads do not
    /// count.
    visitor: u64,
    visits: u32,
    needed: u32,
    /// How often other visitors turned away.
    turned_away: u32,
}

impl<T> Reserved<T> {
    /// Creates a lock that is not reserved.
    pub(crate) fn new(value: T) -> Self {
        Self::made(value, Fence::of_process(), FIRST)
    }

    fn made(value: T, fence: Fence, needed: u32) -> Self {
        Self {
            visitor: AtomicU64::new(0),
            fence,
            crowded: AtomicBool::new(false),
            turn: Mutex::new(Turn {
                owner: None,
                visitor: 0,
                visits: 0,
                needed,
                turned_away: 0,
            }),
            value: UnsafeCell::new(value),
        }
    }

    /// Returns the value, for a frequent visitor.
    #[inline(always)]
    pub(crate) fn visit<'a>(&'a self, visitor: &'a mut Visitor) -> Inside<'a, T> {
        let visitor = &*visitor;
        self.inside(match self.enter(visitor) {
            Some(busy) => Ok(busy),
            None => Err(self.visitors_turn(visitor)),
        })
    }

    /// As [`visit`](Self::visit), but returns `None` if another thread is inside or has the lock reserved.
    #[inline(always)]
    pub(crate) fn try_visit<'a>(&'a self, visitor: &'a mut Visitor) -> Option<Inside<'a, T>> {
        let visitor = &*visitor;
        Some(self.inside(match self.enter(visitor) {
            Some(busy) => Ok(busy),
            None => Err(self.try_visitors_turn(visitor)?),
        }))
    }

    /// As [`visit`](Self::visit), but returns `None` unless the lock is reserved for this visitor.
    #[inline(always)]
    pub(crate) fn if_reserved<'a>(&'a self, visitor: &'a mut Visitor) -> Option<Inside<'a, T>> {
        Some(self.inside(Ok(self.enter(visitor)?)))
    }

    #[inline(always)]
    fn inside<'a>(
        &'a self,
        busy_or_turn: Result<Reset<'a>, MutexGuard<'a, Turn>>,
    ) -> Inside<'a, T> {
        Inside {
            value: self.value.get_mut(),
            _busy_or_turn: busy_or_turn,
        }
    }

    /// Returns whether several visitors use the lock in turn; it may have changed since.
    #[inline]
    pub(crate) fn is_crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed)
    }

    /// Enters as the visitor that the lock is reserved for.
    #[inline]
    fn enter<'a>(&self, visitor: &'a Visitor) -> Option<Reset<'a>> {
        if self.visitor.load(Ordering::Relaxed) != visitor.name {
            return None;
        }
        let Busy(busy) = &*visitor.busy;
        busy.store(true, Ordering::Relaxed);
        let busy = Reset(busy);
        self.fence.light();
        // Only this thread reserves the lock for this visitor. A thread that revokes the reservation from now
        // on waits for `busy`: had its fence come before this one, this load would see its store.
        (self.visitor.load(Ordering::Relaxed) == visitor.name).then_some(busy)
    }

    /// Returns the value, for a thread that enters seldom. Takes microseconds if the lock is reserved.
    pub(crate) fn lock(&self) -> Inside<'_, T> {
        self.inside(Err(self.turn_of(self.lock_turn(), None)))
    }

    fn lock_turn(&self) -> MutexGuard<'_, Turn> {
        // The mutex itself would soon ask the kernel to put this thread to sleep, and to wake up the next: both
        // take longer than most turns.
        #[cfg(not(loom))]
        for tries in 0..SPINS {
            match self.turn.try_lock() {
                Ok(turn) => return turn,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    (0..1 << tries.min(6)).for_each(|_| super::sync::spin_loop());
                }
            }
        }
        // A panic under the mutex was the caller's, while it changed its own value.
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

    /// Waits for the turn of a thread that [`enter`](Self::enter) refused or that is not a visitor. The lock
    /// is reserved for no other visitor afterwards.
    fn turn_of<'a>(
        &'a self,
        mut turn: MutexGuard<'a, Turn>,
        visitor: Option<&Visitor>,
    ) -> MutexGuard<'a, Turn> {
        if let Some(owner) = &turn.owner {
            self.visitor.store(0, Ordering::Relaxed);
            self.fence.heavy();
            wait_until_reset(&owner.0);
            turn.owner = None;
            turn.needed = (turn.needed * 2).min(MOST);
            turn.turned_away = 0;
            turn.visits = 0;
        }
        let Some(visitor) = visitor else {
            return turn;
        };
        if turn.visitor != visitor.name {
            if turn.visitor != 0 {
                self.crowded.store(true, Ordering::Relaxed);
            }
            (turn.visitor, turn.visits) = (visitor.name, 0);
        }
        turn.visits = turn.visits.saturating_add(1);
        if turn.visits == FIRST {
            self.crowded.store(false, Ordering::Relaxed);
        }
        // If revoking is expensive, a reservation costs more than it saves.
        if turn.visits > turn.needed && self.fence.is_cheap() {
            turn.owner = Some(Arc::clone(&visitor.busy));
            // Other threads read it under the mutex.
            self.visitor.store(visitor.name, Ordering::Relaxed);
        }
        turn
    }
}

/// Access to the value until this is dropped: as the visitor that the lock is reserved for, or with the mutex. Fields are
/// dropped in this order.
pub(crate) struct Inside<'a, T> {
    value: MutPtr<T>,
    _busy_or_turn: Result<Reset<'a>, MutexGuard<'a, Turn>>,
}

impl<T> Deref for Inside<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: either the lock is reserved for this visitor, which the exclusive reference in `visit` makes unique, and a
        // thread that revokes the reservation waits for `busy`; or this thread has the mutex, and the lock is reserved for
        // no visitor or for this one, which is not inside by the other path. The mutex or `busy` acquired the changes of
        // others.
        unsafe { self.value.deref() }
    }
}

impl<T> DerefMut for Inside<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the guard is borrowed mutably, so it has lent no other reference.
        unsafe { self.value.deref() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod tests {
    mod under_loom;
}
