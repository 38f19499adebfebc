//! Whether this process was forked from the one that made a value.
//!
//! A child that was forked without `exec` has one thread. A lock that another thread of the parent held stays
//! locked there, and CUDA does not work. So values that give something back when they are dropped remember the
//! process that made them, and do nothing in a child.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How many forks lie between this process and its first ancestor that registered the handler. On a cache line
/// of its own, since it is read at each block's end and written to by nobody.
#[repr(align(128))]
struct Forks(AtomicU32);

static FORKS: Forks = Forks(AtomicU32::new(0));

/// A process, told apart from the children that are forked from it.
///
/// Children made by `fork` and by libraries that call it are told. Those made by the bare system call `clone`
/// are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Generation(u32);

impl Generation {
    /// No process: never current.
    pub(crate) const NEVER: Self = Self(u32::MAX);

    /// This process. The first call registers a handler with the C library, which counts forks.
    pub(crate) fn current() -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(register);
        Self(FORKS.0.load(Relaxed))
    }

    /// Whether this process is the one that the value was made in.
    #[inline]
    pub(crate) fn is_current(self) -> bool {
        FORKS.0.load(Relaxed) == self.0
    }
}

#[cfg(not(miri))]
fn register() {
    extern "C" fn in_child() {
        FORKS.0.fetch_add(1, Relaxed);
    }
    // SAFETY: the handler changes one word of this crate's. It takes no lock and allocates nothing, as a child
    // of a process with several threads needs.
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
            // SAFETY: ends the child, and runs nothing of the parent's.
            unsafe { libc::_exit(i32::from(!told)) }
        }
        let mut status = -1;
        // SAFETY: `status` is this function's own, and nobody else waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(here.is_current());
    }
}
