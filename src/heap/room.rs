//! The errors of a heap that has no room.
//!
//! A program may run into these errors often, as a cache that evicts does: building one formats no text and
//! scans no table.

use super::classes::{Class, PAGE};
use super::core::{Core, GRANULE, MAX_RANGE};
use super::inner::HeapInner;
use crate::error::NoRoom;
use crate::{Error, Growth, Result};

impl HeapInner {
    /// Refuses a request that no amount of memory could satisfy.
    pub(super) fn check_possible(&self, bytes: u64, align: u64) -> Result<()> {
        // A block that can be shared lies in one chunk.
        let most = match self.facts.exportable {
            true => Growth::MAX_CHUNK,
            false => MAX_RANGE,
        };
        if bytes > most {
            let why = format!("it is {bytes} bytes");
            return Err(Error::invalid_of(
                "size",
                why,
                format!("at most {most} bytes"),
            ));
        }
        if bytes > self.facts.limit {
            return Err(self.full(NoRoom::Limit, bytes, align));
        }
        let first = self.facts.start.checked_next_multiple_of(align);
        let end = first.and_then(|first| first.checked_add(bytes));
        match end.is_some_and(|end| end <= self.facts.start + self.facts.limit) {
            true => Ok(()),
            false => {
                let (start, limit) = (self.facts.start, self.facts.limit);
                let why = format!(
                    "{bytes} bytes at a multiple of {align} lie nowhere in the heap's {limit} bytes of \
                     addresses from {start:#x} on: take a smaller one, or a larger limit"
                );
                Err(Error::invalid("alignment", why))
            }
        }
    }

    /// Returns [`Error::HeapFull`] with the core's numbers.
    pub(super) fn full(&self, why: NoRoom, requested: u64, align: u64) -> Error {
        let (total, free, largest_free) = {
            let core = self.core();
            (
                core.total(),
                core.free_bytes(),
                core.ranges().nearly_largest_free(),
            )
        };
        let (need, aligned) = match Class::of(requested, align) {
            // A page can have any alignment.
            Some(_) => (PAGE, false),
            None => (
                Core::range_bytes(requested).unwrap_or(u64::MAX),
                align > GRANULE,
            ),
        };
        let available = free.saturating_add(self.facts.limit.saturating_sub(total));
        let why = match why {
            NoRoom::Limit if aligned && need <= largest_free => NoRoom::Alignment,
            NoRoom::Limit if need <= available => NoRoom::Fragments,
            why => why,
        };
        Error::HeapFull {
            requested,
            align,
            guards: 0,
            why,
            limit: self.facts.limit,
            used: total.saturating_sub(free),
            free,
            largest_free,
        }
    }

    /// Completes an error from growth with the request's size and the core's numbers.
    pub(super) fn explained(&self, mut error: Error, bytes: u64, align: u64) -> Error {
        match &mut error {
            Error::HeapFull { why, .. } => return self.full(*why, bytes, align),
            // The heap asked the node only for the bytes that are not free already.
            Error::NodeTooFull { requested, .. }
            | Error::NodesTooFull { requested, .. }
            | Error::OutOfMemory { requested, .. } => *requested = bytes.max(*requested),
            _ => {}
        }
        error
    }
}
