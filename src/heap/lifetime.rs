//! Keeps a heap's memory mapped while code that has neither a block nor a handle touches it.

#[cfg(loom)]
use loom::sync::{RwLock, RwLockReadGuard};
use std::sync::PoisonError;
#[cfg(not(loom))]
use std::sync::{RwLock, RwLockReadGuard};

/// Whether a heap's memory is mapped.
///
/// A live block keeps the memory mapped, and so does a handle: the heap [ends](Self::end) after the last of
/// both. Blocks that GPU work still uses count as freed, so the background thread, which collects them, has to
/// [enter](Self::enter) before it takes them out of their queue, and stays inside until the core has them.
///
/// No thread calls a user's closure inside: that closure may drop the last handle, and `end` waits until every
/// thread is outside.
#[derive(Debug)]
pub(super) struct Lifetime {
    /// Whether the heap has ended.
    ended: RwLock<bool>,
}

/// Proves that the memory stays mapped until this is dropped.
#[derive(Debug)]
pub(super) struct Mapped<'a> {
    _ended: RwLockReadGuard<'a, bool>,
}

impl Lifetime {
    /// Of memory that is mapped.
    pub(super) fn new() -> Self {
        Self {
            ended: RwLock::new(false),
        }
    }

    /// Keeps the memory mapped; `None` where the heap has ended. A thread does not enter twice at a time.
    pub(super) fn enter(&self) -> Option<Mapped<'_>> {
        let ended = self.ended.read().unwrap_or_else(PoisonError::into_inner);
        (!*ended).then_some(Mapped { _ended: ended })
    }

    /// Waits until no thread is inside, and lets none in any more. Returns `false` where the heap had ended
    /// before. What threads did inside happens before this returns.
    pub(super) fn end(&self) -> bool {
        let mut ended = self.ended.write().unwrap_or_else(PoisonError::into_inner);
        !std::mem::replace(&mut *ended, true)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod under_loom;
