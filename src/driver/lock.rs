//! Locks without poison.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks data that is valid even after a panic: an entry is complete or absent.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
