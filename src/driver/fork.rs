//! Detects whether this process was forked from the one that created a value.
//!
//! A child that was forked without `exec` has one thread. A lock that another thread of the parent held stays
//! locked in the child, and CUDA does not work there. So values that release something when dropped remember
//! the process that created them, and do nothing in a child.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How many forks lie between this process and its first ancestor that registered the handler. On a cache
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
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(register);
        Self(FORKS.0.load(Relaxed))
    }

    /// Returns how many forks lie between this process and its first ancestor that asked. In one process, equal
    /// numbers are the same process.
    pub const fn forks(self) -> u32 {
        self.0
    }

    /// Returns whether this process is the one that the value was created in.
    #[inline]
    pub fn is_current(self) -> bool {
        FORKS.0.load(Relaxed) == self.0
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
    use super::*;

    #[test]
    fn a_forked_child_is_another_process() {
        let here = Generation::current();
        assert!(here.is_current() && !Generation::NEVER.is_current());
        // SAFETY: the child reads one word and ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let told = !here.is_current() && Generation::current().is_current();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!told)) }
        }
        let mut status = -1;
        // SAFETY: `status` is a local variable, and no other thread waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(here.is_current());
    }
}
