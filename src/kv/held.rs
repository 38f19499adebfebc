//! The locks of a tier while a process has them, and what the process keeps in its own memory.

use std::sync::MutexGuard;

use crate::Result;
use crate::geometry::Geometry;
use crate::header::DIRTY;
use crate::lock::Lock;
use crate::members::{Members, Own};
use crate::page::{Direction, PageId};
use crate::table::{Private, Table};
use crate::words::Words;

/// What this process keeps in its own memory.
#[derive(Default)]
pub(crate) struct OwnState {
    table: Private,
    /// Ends of uses that could not be written when they happened.
    pub(crate) late: Vec<End>,
}

/// A use of pages that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Use {
    /// A load, or a copy that was not submitted.
    Load,
    /// A copy of some bytes, or one that has failed.
    Copy(Direction, Option<u64>),
    /// A store that was not committed.
    Store,
}

/// The end of a use of pages.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) pages: Vec<PageId>,
    pub(crate) of: Use,
}

impl End {
    pub(crate) fn apply(&self, table: &mut Table<'_>) {
        match self.of {
            Use::Store => return table.abort(&self.pages),
            Use::Copy(direction, Some(bytes)) => table.count_copy(direction, bytes),
            Use::Copy(Direction::Store, None) => table.fail(&self.pages),
            Use::Copy(Direction::Load, None) | Use::Load => {}
        }
        table.unpin(&self.pages);
    }
}

/// The locks of a tier: four atomic exchanges with giving them back. The mutex comes first and is this process's own, so that what the
/// process keeps has one user at a time whatever others write to the lock in the memory.
pub(crate) struct Held<'a> {
    /// Given back before the mutex.
    _lock: Lock<'a>,
    own: MutexGuard<'a, OwnState>,
    words: &'a Words<'a>,
    geometry: &'a Geometry,
    member: Own,
}

impl<'a> Held<'a> {
    /// # Errors
    /// As [`Members::expect_member`].
    // A result of this size that is returned through memory costs 10 ns more.
    #[inline(always)]
    pub(crate) fn new(
        own: MutexGuard<'a, OwnState>,
        lock: Lock<'a>,
        words: &'a Words<'a>,
        (geometry, member): (&'a Geometry, Own),
    ) -> Result<Self> {
        if lock.is_taken_over {
            // Whoever changes the table next repairs it first, also if that is not this call.
            words.put(DIRTY, 1);
        }
        Members::of(words).expect_member(member)?;
        Ok(Self {
            _lock: lock,
            own,
            words,
            geometry,
            member,
        })
    }

    /// Returns the table, which may have to be repaired first, with the ends of uses that were not written yet.
    #[inline(always)]
    pub(crate) fn table(&mut self) -> (Table<'_>, &mut Vec<End>) {
        let OwnState { table, late } = &mut *self.own;
        let table = Table::new(self.words, self.geometry, self.member, table);
        (table, late)
    }
}
