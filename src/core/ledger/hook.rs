//! Tells a crate above of the first entry of a process.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::fork::Generation;

static HOOK: OnceLock<fn()> = OnceLock::new();

/// Which process has called the hook: one more than [`Generation::forks`], 0 for none.
static CALLED: AtomicU32 = AtomicU32::new(0);

/// Sets the function that is called once in each process, after its first entry is made. It must not allocate memory of a
/// driver. The first function that is set stays; returns whether it is this one.
pub fn on_first_entry(hook: fn()) -> bool {
    HOOK.set(hook).is_ok()
}

/// Calls the hook if this process has not.
pub(super) fn first_entry() {
    let this = Generation::current().forks() + 1;
    if CALLED.load(Relaxed) != this
        && CALLED.swap(this, Relaxed) != this
        && let Some(hook) = HOOK.get()
    {
        hook();
    }
}
