//! A value that its owner thread accesses without atomic read-modify-writes and that other threads can take
//! from it.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

use super::sync::{
    AtomicBool, Fence, MutPtr, Mutex, MutexGuard, Ordering, UnsafeCell, spin_loop, yield_now,
};

/// A value with an owner and holders. The owner enters by plain stores and loads. Holders pay for both sides:
/// a mutex among themselves, and a barrier in every thread of the process to stop the owner.
///
/// Owner and holders synchronise as in Dekker's algorithm: the owner sets `busy` and then reads `wanted`; a
/// holder sets `wanted` and then reads `busy`. Each has a [`Fence`] in between, so at least one sees the
/// other's store. The owner gives way: if the value is wanted it takes the holders' mutex, so holders get the
/// value however often the owner enters. (This is the idea of biased locks: Kawachiya et al., "Lock
/// reservation", OOPSLA 2002; Dice et al., "Quickly reacquirable locks", 2006.)
///
/// A thread is inside at most one [`owner`](Self::owner), one `hold` or one
/// [`hold_all`](Self::hold_all) at any time, so that no two threads can wait for each other; builds with
/// debug assertions check that.
///
/// As with every lock, if another thread was inside when the process forked, the value stays locked in the
/// child.
// On cache lines of its own: 128 bytes, since x86 fetches lines in pairs. In this order: what each visit of the owner touches
// lies in one line with the beginning of the value.
#[repr(C, align(128))]
pub(crate) struct Biased<T> {
    /// The owner is inside, or about to check `wanted`. Only the owner writes it.
    busy: AtomicBool,
    /// A holder is inside, or waits for the owner to leave. Written under `holders`.
    wanted: AtomicBool,
    fence: Fence,
    holders: Mutex<()>,
    value: UnsafeCell<T>,
}

// SAFETY: by the protocol above one thread at a time accesses the value, each after the previous one has
// finished. That needs only `T: Send`.
unsafe impl<T: Send> Sync for Biased<T> {}

impl<T> Biased<T> {
    /// Creates a value that no thread uses.
    pub(crate) fn new(value: T) -> Self {
        Self::with_fence(value, Fence::of_process())
    }

    fn with_fence(value: T, fence: Fence) -> Self {
        Self {
            busy: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            fence,
            holders: Mutex::new(()),
            value: UnsafeCell::new(value),
        }
    }

    /// Runs `f` on the value, as its owner. Waits while other threads hold it.
    ///
    /// # Safety
    /// One thread at a time is the owner: no two calls overlap, and if another thread becomes the owner, the
    /// former owner's last call happens before the new owner's first. `f` does not call this on the same
    /// value.
    #[inline]
    pub(crate) unsafe fn owner<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let _alone = Alone::enter();
        self.busy.store(true, Ordering::Relaxed);
        // Frees the value when it is dropped, also if `f` panics.
        let _busy = Reset(&self.busy);
        self.fence.light();
        // Acquires the last holder's changes to the value.
        if self.wanted.load(Ordering::Acquire) {
            self.wait_for_turn();
        }
        let value = self.value.get_mut();
        // SAFETY: if the value is not wanted, no holder is inside. An earlier holder has reset `wanted`,
        // which the load above has acquired. A later holder waits for `busy`: had it read `busy` as reset
        // from before the store above, its fence would have come before ours, and the load above would have
        // seen that the value is wanted. If the value was wanted, `wait_for_turn` says the same. The caller promises that no
        // other call of this function is under way.
        f(unsafe { value.deref() })
        // `value`, which loom watches, is dropped before `busy`.
    }

    /// Waits for the owner's turn when a holder wants the value. Then no holder is inside, their changes were acquired, and
    /// later ones wait for `busy`.
    #[cold]
    #[inline(never)]
    fn wait_for_turn(&self) {
        // Holders wait for this. It releases the changes of earlier calls: a holder may acquire this reset instead of theirs.
        self.busy.store(false, Ordering::Release);
        let _turn = self.lock();
        // Holders have the mutex as long as they are inside; the next one acquires this store with it.
        self.busy.store(true, Ordering::Relaxed);
    }

    /// Takes the value from its owner until the guard is dropped, as [`hold_all`](Self::hold_all) does with
    /// many. Waits for the owner, if it is inside, and for other holders. Takes as long as [`Fence::heavy`].
    #[cfg(test)]
    pub(crate) fn hold(&self) -> Held<'_, T> {
        let alone = Alone::enter();
        let claim = self.claim();
        self.fence.heavy();
        claim.held(alone)
    }

    /// Takes the value as its owner until the guard is dropped, without a barrier, since only the calling
    /// thread could be inside as the owner. Waits for holders.
    ///
    /// # Safety
    /// The calling thread is the owner, as [`owner`](Self::owner) says, and not inside.
    pub(crate) unsafe fn hold_as_owner(&self) -> Held<'_, T> {
        let alone = Alone::enter();
        self.claim().held(alone)
    }

    /// Takes many values from their owners, with one barrier for all of them. The result contains each value
    /// once, however often it is in `all`, in another order than `all`.
    pub(crate) fn hold_all<'a>(all: impl IntoIterator<Item = &'a Biased<T>>) -> Vec<Held<'a, T>>
    where
        T: 'a,
    {
        let mut all: Vec<_> = all.into_iter().collect();
        // Every caller locks in the same order, so that no two wait for each other.
        all.sort_unstable_by_key(|biased| std::ptr::from_ref(*biased));
        all.dedup_by_key(|biased| std::ptr::from_ref(*biased));
        let alone = Alone::enter();
        let claims: Vec<_> = all.into_iter().map(Biased::claim).collect();
        // One barrier serves all claims that need the same kind: all of them were made before it.
        let mut done = Vec::new();
        for claim in &claims {
            let fence = claim.of.fence;
            if !done.contains(&fence) {
                fence.heavy();
                done.push(fence);
            }
        }
        claims
            .into_iter()
            .map(|claim| claim.held(alone.clone()))
            .collect()
    }

    /// The first half of taking the value; the heavy fence comes next.
    fn claim(&self) -> Claim<'_, T> {
        let turn = self.lock();
        self.wanted.store(true, Ordering::Relaxed);
        Claim {
            _wanted: Reset(&self.wanted),
            _turn: turn,
            of: self,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        // A panic under the mutex was the caller's, while it changed its own value.
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Resets a word on drop, and releases the changes until then.
pub(super) struct Reset<'a>(pub(super) &'a AtomicBool);

impl Drop for Reset<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A holder's turn; the owner may still be inside. Fields are dropped in this order.
struct Claim<'a, T> {
    _wanted: Reset<'a>,
    _turn: MutexGuard<'a, ()>,
    of: &'a Biased<T>,
}

impl<'a, T> Claim<'a, T> {
    /// The second half of taking the value, after the heavy fence: waits for the owner to leave.
    fn held(self, alone: Alone) -> Held<'a, T> {
        wait_until_reset(&self.of.busy);
        // The owner has left, or will see that the value is wanted: it has not passed its fence yet.
        Held {
            value: self.of.value.get_mut(),
            _claim: self,
            _alone: alone,
        }
    }
}

/// Waits until the owner has left, and acquires its changes to the value.
pub(super) fn wait_until_reset(busy: &AtomicBool) {
    let mut tries = 0_u32;
    while busy.load(Ordering::Acquire) {
        pause(tries);
        tries = tries.saturating_add(1);
    }
}

/// Waits a moment, longer with each try: owners are inside for nanoseconds unless they are interrupted there.
fn pause(tries: u32) {
    match tries {
        0..64 => spin_loop(),
        // Sleeps in case yielding does not help: a thread of real-time priority yields only to its equals.
        #[cfg(not(loom))]
        128.. => std::thread::sleep(std::time::Duration::from_micros(50)),
        _ => yield_now(),
    }
}

/// A value taken from its owner, which gets it back when this is dropped. Fields are dropped in this order.
pub(crate) struct Held<'a, T> {
    value: MutPtr<T>,
    _claim: Claim<'a, T>,
    _alone: Alone,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: neither the owner nor another holder is inside while the claim lives, and `Claim::held`
        // acquired their writes.
        unsafe { self.value.deref() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the guard is borrowed mutably, so it has lent no other reference.
        unsafe { self.value.deref() }
    }
}

/// Checks that this thread is inside one call only. Does nothing without debug assertions, and under loom,
/// whose threads share one OS thread.
mod alone {
    #[cfg(all(debug_assertions, not(loom)))]
    std::thread_local! {
        static INSIDE: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }

    /// Marks the thread as inside one call.
    pub(super) struct Alone(());

    impl Alone {
        #[inline]
        pub(super) fn enter() -> Self {
            #[cfg(all(debug_assertions, not(loom)))]
            INSIDE.with(|inside| {
                assert_eq!(inside.get(), 0, "a thread is inside only one biased value");
                inside.set(1);
            });
            Self(())
        }
    }

    impl Clone for Alone {
        fn clone(&self) -> Self {
            #[cfg(all(debug_assertions, not(loom)))]
            INSIDE.with(|inside| inside.set(inside.get() + 1));
            Self(())
        }
    }

    #[cfg(all(debug_assertions, not(loom)))]
    impl Drop for Alone {
        fn drop(&mut self) {
            INSIDE.with(|inside| inside.set(inside.get() - 1));
        }
    }
}
use alone::Alone;

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod tests {
    mod under_loom;
}
