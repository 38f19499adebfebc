//! How far a count that kernels wrote is believed.

use super::cells::{CLOSED, Cells, Look, Reserved, seen};
use crate::Result;
use crate::cursor::check;

/// The host's knowledge of the cursor that kernels reserve records by.
///
/// A kernel adds to the cursor before it reports how many records it wants, so a count above the cursor is damaged. A
/// cursor in a GPU's own memory is copied by that GPU. Until the copy comes, a count is believed for as many records above
/// the last known cursor as are kept ahead. So a damaged count maps so many at most.
#[derive(Debug, Default)]
pub(super) struct Belief {
    /// Records that were reserved, at least.
    known: u64,
    /// A copy of the cursor under way, and the count that it is to confirm.
    look: Option<(u64, Box<Look>)>,
}

impl Belief {
    /// Returns the belief of a host that knows that `len` records were reserved.
    pub(super) fn of(len: u64) -> Self {
        Self {
            known: len,
            look: None,
        }
    }

    /// Returns for how many of the records that kernels `want` the host may map memory now: at least `len`, those that
    /// were collected.
    ///
    /// # Errors
    /// [`Error::CursorDamaged`](crate::Error::CursorDamaged); the driver's, if it refuses the copy.
    pub(super) fn records(
        &mut self,
        cells: &Cells,
        (len, want): (u64, u64),
        ahead: u64,
    ) -> Result<u64> {
        wants(want, (len, CLOSED - 1))?;
        // Not taken before it is done: its drop would wait.
        if let Some((_, look)) = &self.look
            && look.is_done()?
            && let Some((asked, look)) = self.look.take()
        {
            self.learn(asked, seen(*look)?, len)?;
        }
        if want > self.known && self.look.is_none() {
            match cells.reserved()? {
                Reserved::Now(next) => self.learn(want, next, len)?,
                Reserved::Later(look) => self.look = Some((want, look)),
            }
        }
        Ok(want.min(self.known.saturating_add(ahead)))
    }

    /// Compares the cursor with a count that was read before it.
    fn learn(&mut self, want: u64, next: u64, len: u64) -> Result<()> {
        check("the cursor of an appender", next, (len, CLOSED - 1))?;
        self.known = self.known.max(next);
        wants(want, (len, next))
    }
}

fn wants(count: u64, bounds: (u64, u64)) -> Result<()> {
    let what = "the count of records that an appender's kernels want";
    check(what, count, bounds).map(drop)
}
