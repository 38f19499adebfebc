//! Keeps a heap's memory mapped for code that accesses it without a block or a handle.

#[cfg(loom)]
use loom::sync::{RwLock, RwLockReadGuard};
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::{RwLock, RwLockReadGuard};

/// Tracks whether a heap's memory is mapped.
///
/// A live block keeps the memory mapped, and so does a handle: the heap [ends](Self::end) after the last of
/// both. Blocks that GPU work still uses count as freed. The background thread collects them, so it has to
/// [enter](Self::enter) before it takes them out of their queue, and stays inside until the core has them.
///
/// No thread calls a user's closure inside: the closure may drop the last handle, and `end` waits until every
/// thread is outside.
pub(super) struct Lifetime {
    ended: RwLock<bool>,
}

/// Proves that the memory stays mapped until this is dropped.
pub(super) struct Mapped<'a> {
    _ended: RwLockReadGuard<'a, bool>,
}

impl Lifetime {
    /// Creates the state of mapped memory.
    pub(super) fn new() -> Self {
        Self {
            ended: RwLock::new(false),
        }
    }

    /// Keeps the memory mapped while the result lives; returns `None` if the heap has ended. A thread must
    /// not enter twice at a time.
    pub(super) fn enter(&self) -> Option<Mapped<'_>> {
        let ended = self.ended.read().unwrap_or_else(PoisonError::into_inner);
        (!*ended).then_some(Mapped { _ended: ended })
    }

    /// Waits until no thread is inside, and lets no thread in afterwards. Returns `false` if the heap had
    /// ended before. Every access made inside happens before this returns.
    pub(super) fn end(&self) -> bool {
        let mut ended = self.ended.write().unwrap_or_else(PoisonError::into_inner);
        !std::mem::replace(&mut *ended, true)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod under_loom;
