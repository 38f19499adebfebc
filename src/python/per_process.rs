//! State of one process. A forked child has its own: a lock that another thread of the parent held stays locked in
//! the child.

use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

/// State that each process makes for itself.
pub struct PerProcess<T: 'static>(AtomicPtr<Of<T>>);

struct Of<T> {
    process: u32,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    /// Creates it without state.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns this process's state. The first call in a process makes it, from the state of the parent process, if
    /// this one was forked. In that state `make` may read only atomics. Takes no lock.
    pub fn get(&self, make: impl Fn(Option<&T>) -> T) -> &'static T {
        let process = std::process::id();
        let mut found = self.0.load(Acquire);
        loop {
            // SAFETY: it is null or came from `Box::into_raw` below, after which nothing frees or changes it; the
            // load is after the store.
            let parent = unsafe { found.as_ref() };
            if let Some(of) = parent
                && of.process == process
            {
                return &of.value;
            }
            let value = make(parent.map(|of| &of.value));
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
