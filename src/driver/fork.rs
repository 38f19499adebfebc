//! Detects whether this process was forked from the one that created a value.
//!
//! A child that was forked without `exec` has one thread. A lock that another thread of the parent held stays
//! locked in the child, and CUDA does not work there. So values that release something when dropped remember
//! the process that created them, and do nothing in a child.

use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};
use std::sync::atomic::{
    Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

/// Grows with each fork between this process and its first ancestor that registered the handler. On a cache
/// line of its own, because every free reads it and no thread writes to it.
#[repr(align(128))]
struct Forks(AtomicU32);

static FORKS: Forks = Forks(AtomicU32::new(0));

/// Identifies a process, as opposed to the children that are forked from it.
///
/// It recognises children made by `fork` and by libraries that call it, but not those made by the bare system
/// call `clone`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(u32);

impl Generation {
    /// No process: never current.
    pub const NEVER: Self = Self(u32::MAX);

    /// Returns this process. The first call registers a handler with the C library, which counts forks.
    pub fn current() -> Self {
        // Not a `Once`: a child that is forked while another thread is inside would wait for that thread. Two threads may
        // register a handler each: every fork then counts twice.
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        if !REGISTERED.load(Acquire) {
            register();
            REGISTERED.store(true, Release);
        }
        Self(FORKS.0.load(Relaxed))
    }

    /// Returns whether this process is the one that the value was created in.
    #[inline]
    pub fn is_current(self) -> bool {
        FORKS.0.load(Relaxed) == self.0
    }
}

/// State that each process makes for itself. A forked child does not use its parent's: a thread that the child does not
/// have may hold a lock in it for ever.
pub struct PerProcess<T>(AtomicPtr<Of<T>>);

struct Of<T> {
    process: Generation,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// Creates it without state.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns this process's state. The first call in a process makes it, from the state of the parent process if this
    /// one was forked: of that, `make` may read only atomics. Takes no lock.
    pub fn get(&self, make: impl Fn(Option<&T>) -> T) -> &T {
        let process = Generation::current();
        let mut found = self.0.load(Acquire);
        loop {
            // SAFETY: it is null or came from `Box::into_raw` below. Nothing changes it after that, and `drop` alone frees
            // it, which needs `self` exclusively; a parent's is never freed in a child. The load is after the store.
            let known = unsafe { found.as_ref() };
            if let Some(of) = known
                && of.process == process
            {
                return &of.value;
            }
            let value = make(known.map(|of| &of.value));
            let own = Box::into_raw(Box::new(Of { process, value }));
            match self.0.compare_exchange(found, own, AcqRel, Acquire) {
                Ok(_) => found = own,
                Err(other) => {
                    // SAFETY: this call made it, and no other thread has seen it.
                    drop(unsafe { Box::from_raw(own) });
                    found = other;
                }
            }
        }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let last = *self.0.get_mut();
        // SAFETY: it is null or came from `Box::into_raw`, and `self` has it alone.
        let own = unsafe { last.as_ref() }.is_some_and(|of| of.process.is_current());
        // A parent's stays: a thread of the parent may have been changing it at the fork.
        if own {
            // SAFETY: it came from `Box::into_raw`, and no borrow of it is left, for those borrow `self`.
            drop(unsafe { Box::from_raw(last) });
        }
    }
}

impl<T: Send + Sync> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerProcess").finish_non_exhaustive()
    }
}

#[cfg(not(miri))]
fn register() {
    extern "C" fn in_child() {
        FORKS.0.fetch_add(1, Relaxed);
    }
    // SAFETY: the handler changes one word of this crate's. It takes no lock and allocates nothing, as
    // required in a child of a process with several threads.
    let code = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if code != 0 {
        let error = std::io::Error::from_raw_os_error(code);
        tracing::warn!(%error, "forked children cannot be told from this process");
    }
}

/// Miri has no `fork`.
#[cfg(miri)]
fn register() {}

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::lock;

    /// Returns whether `check` holds in a forked child, which has a minute.
    fn in_child(check: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs `check` alone, which uses nothing of other threads, and ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends a child that waits for ever, or else without running the parent's exit handlers.
            unsafe {
                libc::alarm(60);
                libc::_exit(i32::from(!check()))
            }
        }
        let mut status = -1;
        // SAFETY: `status` is a local variable, and no other thread waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        status == 0
    }

    #[test]
    fn a_forked_child_is_another_process() {
        let here = Generation::current();
        assert!(here.is_current() && !Generation::NEVER.is_current());
        assert!(in_child(
            || !here.is_current() && Generation::current().is_current()
        ));
        assert!(here.is_current());
    }

    #[test]
    fn threads_of_a_process_have_one_state_and_a_child_its_own() {
        static STATE: PerProcess<Mutex<u32>> = PerProcess::new();
        let state = || STATE.get(|parent| Mutex::new(u32::from(parent.is_some())));
        let threads = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| ptr::from_ref(state()).addr()))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect::<Vec<_>>()
        });
        assert_eq!(threads, [ptr::from_ref(state()).addr(); 8]);
        let held = lock(state());
        assert_eq!(*held, 0);
        assert!(in_child(|| *lock(state()) == 1));
    }
}
