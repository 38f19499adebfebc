//! A check in a forked child. The unit tests of several packages compile this file, each into its own program: it needs libc alone.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns whether `check` holds in a forked child, which has a minute.
pub(crate) fn in_a_child(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `check` alone, which waits for no lock that another thread of this process may hold, and ends at once.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: sets a time after which the kernel ends a child that waits for ever.
        unsafe { libc::alarm(60) };
        // A panic would end the only thread, and the process with status 0.
        let is_so = catch_unwind(AssertUnwindSafe(check)).unwrap_or(false);
        // SAFETY: ends the child without running its parent's exit handlers.
        unsafe { libc::_exit(i32::from(!is_so)) }
    }
    let mut status = -1;
    // SAFETY: `status` is a local variable, and no other thread waits for the child. A fork that failed has none.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status == 0
}
