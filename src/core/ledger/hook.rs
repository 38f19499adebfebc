//! Tells a crate above of the first entry of a process.
//!
//! Nothing here waits for another thread: a forked child would wait for one that it does not have.

use std::mem;
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32};

use crate::fork::Generation;

/// The function, as a pointer; null for none.
static HOOK: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// Which process has called the hook: one more than [`Generation::forks`], 0 for none.
static CALLED: AtomicU32 = AtomicU32::new(0);

/// Sets the function that is called once in each process, after its first entry is made. It must not allocate memory of a
/// driver. The first function that is set stays; returns whether it is this one.
pub fn on_first_entry(hook: fn()) -> bool {
    let hook = hook as *mut ();
    HOOK.compare_exchange(ptr::null_mut(), hook, Release, Relaxed)
        .is_ok()
}

fn hook() -> Option<fn()> {
    // SAFETY: the pointer is null, which is `None`, or was made of a function of this type.
    unsafe { mem::transmute::<*mut (), Option<fn()>>(HOOK.load(Acquire)) }
}

/// Calls the hook if this process has not.
pub(super) fn first_entry() {
    let this = Generation::current().forks() + 1;
    if CALLED.load(Relaxed) != this
        && CALLED.swap(this, Relaxed) != this
        && let Some(hook) = hook()
    {
        hook();
    }
}
