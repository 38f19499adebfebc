//! Locks that a panic does not poison.

use std::sync::{Mutex, PoisonError};

/// Locks a mutex whose data is valid even after a holder panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a copy of a mutex's value. The lock ends here: it must not be held while an exception is built, which runs
/// Python code.
pub fn copy_of<T: Clone>(mutex: &Mutex<T>) -> T {
    lock(mutex).clone()
}
