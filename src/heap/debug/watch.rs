//! The path of a block in debug mode.

use std::ops::Range;
use std::panic::Location;
use std::sync::{Arc, Mutex};

use super::record::{Fit, Record, RecordState, Table};
use super::site::Origin;
use super::state::State;
use super::{BlockInfo, DamageKind, DamageReport, DebugOptions, LeakReport, Seen};
use crate::bytes::ByteAccess;
use crate::per_driver::lock;
use crate::piece::Piece;
use crate::reports::Reports;
use crate::{Error, Result};

type Place = &'static Location<'static>;

/// A block that has left quarantine. It is in no table any more, and nothing uses it.
pub(crate) struct Left(Piece);

impl Left {
    pub(crate) fn piece(&self) -> &Piece {
        &self.0
    }
}

/// The state that only a heap in debug mode has.
///
/// Its lock comes after that of `backing` and before the core's. Findings under it are reported later with no
/// lock held, because the callback and a log subscriber may use the heap.
pub(crate) struct Watch {
    options: Arc<DebugOptions>,
    state: Mutex<State>,
    reports: Arc<Reports>,
}

impl Watch {
    /// Returns the state of a heap without blocks, whose offset 0 is at the address `start`.
    pub(crate) fn new(
        options: DebugOptions,
        start: u64,
        bytes: ByteAccess,
        reports: &Arc<Reports>,
    ) -> Self {
        let options = Arc::new(options);
        Self {
            options: Arc::clone(&options),
            state: Mutex::new(State {
                options,
                start,
                table: Table::default(),
                bytes,
                reports: Arc::clone(reports),
                kept: DamageReport::default(),
            }),
            reports: Arc::clone(reports),
        }
    }

    fn origin(&self, place: Option<Place>) -> Origin {
        Origin::here(place, self.options.backtraces)
    }

    /// Allocates a block with guards and patterns. `take` allocates the core's block for it, of some bytes at
    /// a multiple of an alignment.
    pub(crate) fn allocate(
        &self,
        bytes: u64,
        align: u64,
        place: Place,
        take: impl FnOnce(u64, u64) -> Result<Piece>,
    ) -> Result<Piece> {
        let fit = Fit::of(bytes, align, self.options.guard);
        let taken = take(fit.bytes, align);
        let outer = taken.map_err(|mut error| {
            if let Error::HeapFull {
                requested, guards, ..
            } = &mut error
            {
                (*requested, *guards) = (bytes, fit.bytes - bytes);
            }
            error
        })?;
        let allocated = self.origin(Some(place));
        let mut state = lock(&self.state);
        let mut record = Record {
            outer,
            offset: outer.offset + fit.front,
            bytes,
            align,
            guard: self.options.guard,
            written: true,
            number: state.table.number(),
            state: RecordState::Live,
            allocated,
            freed: None,
        };
        let guard = DebugOptions::GUARD_BYTE;
        let parts = [
            (record.before(), guard),
            (record.own(), self.options.fresh),
            (record.after(), guard),
        ];
        state.write(&mut record, &parts);
        let piece = Piece {
            offset: record.offset,
            bytes,
            ..outer
        };
        state.table.insert(record);
        drop(state);
        self.reports.tell();
        Ok(piece)
    }

    /// Notes that a block is a collection's memory.
    #[cfg(any(feature = "allocator-api2", feature = "nightly"))]
    pub(crate) fn is_collections(&self, offset: u64) {
        if let Some(record) = lock(&self.state).table.blocks.get_mut(&offset) {
            record.allocated.in_collection = true;
        }
    }

    /// Notes that blocks are freed at `place` and wait for GPU work. `None` undoes this after a free that failed.
    pub(crate) fn defer(&self, pieces: &[Piece], place: Option<Place>) {
        let by = place.map(|place| self.origin(Some(place)));
        let mut state = lock(&self.state);
        for piece in pieces {
            if let Some(record) = state.table.blocks.get_mut(&piece.offset) {
                record.state = match by {
                    Some(_) => RecordState::Deferred,
                    None => RecordState::Live,
                };
                record.freed = by.clone();
            }
        }
    }

    /// Frees a block that is in use, or whose GPU work has finished if no user frees it now; returns whether there is one at
    /// `offset`. Checks it and puts it into quarantine. `give_back` gets the blocks that leave quarantine.
    pub(crate) fn free(&self, offset: u64, by_user: bool, give_back: &dyn Fn(Left)) -> bool {
        self.retire(offset, by_user, Seen::Freed, give_back)
    }

    fn retire(&self, offset: u64, by_user: bool, seen: Seen, give_back: &dyn Fn(Left)) -> bool {
        let (wanted, by) = if by_user {
            (RecordState::Live, Some(self.origin(None)))
        } else {
            (RecordState::Deferred, None)
        };
        let mut state = lock(&self.state);
        let Some(mut record) = state.table.take(offset, wanted) else {
            state.freed_wrongly(offset, by);
            return false;
        };
        record.freed = record.freed.or(by);
        state.look_or_note(&record, seen);
        let freed = [(record.own(), self.options.freed)];
        state.write(&mut record, &freed);
        state.table.quarantine(record);
        let seen = match seen {
            Seen::Freed => Seen::LeftQuarantine,
            other => other,
        };
        self.leave(&mut state, self.options.quarantine, seen, give_back);
        true
    }

    /// Takes blocks out of quarantine until at most `most` bytes are in it. They are given back under the lock, so that no
    /// thread misses blocks that are in neither place.
    fn leave(&self, state: &mut State, most: u64, seen: Seen, give_back: &dyn Fn(Left)) {
        while let Some(record) = state.table.leave(most) {
            state.look_or_note(&record, seen);
            give_back(Left(record.outer));
        }
    }

    /// Empties the quarantine, and keeps it empty until the result is dropped.
    pub(crate) fn emptied<'a>(&'a self, give_back: &dyn Fn(Left)) -> impl Sized + use<'a> {
        let mut state = lock(&self.state);
        self.leave(&mut state, 0, Seen::LeftQuarantine, give_back);
        state
    }

    /// Checks the blocks in quarantine and those in `passed` for the last time. The memory is still mapped.
    pub(crate) fn end(&self, passed: &[Piece], give_back: &dyn Fn(Left)) {
        for piece in passed {
            self.retire(piece.offset, false, Seen::Ended, give_back);
        }
        let mut state = lock(&self.state);
        self.leave(&mut state, 0, Seen::Ended, &|_| {});
        state.bytes.close();
        drop(state);
        self.reports.tell();
    }

    /// Returns the block at an address that is about to be freed, for callers that know only the address.
    #[cfg_attr(
        not(any(feature = "allocator-api2", feature = "nightly")),
        allow(dead_code, reason = "for collections")
    )]
    pub(crate) fn piece_at(&self, address: u64, bytes: u64, align: u64) -> Result<Piece> {
        let by = || Some(self.origin(None));
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let offset = address.wrapping_sub(state.start);
        let live = state.table.blocks.get(&offset);
        let found = match live.filter(|record| record.state == RecordState::Live) {
            Some(record) => {
                let piece = Piece {
                    offset,
                    bytes: record.bytes,
                    ..record.outer
                };
                if (record.bytes, record.align) != (bytes, align) {
                    let block = Some(record.info());
                    state.add_wrong_free(DamageKind::WrongLayout, (offset, block), by());
                }
                Ok(piece)
            }
            None => {
                state.freed_wrongly(offset, by());
                let why = format!("no block in use begins at {address:#x}");
                Err(Error::invalid("address", why))
            }
        };
        drop(guard);
        self.reports.tell();
        found
    }

    /// Checks all blocks.
    pub(crate) fn check(&self) -> Result<()> {
        let mut result = Ok(());
        let mut state = lock(&self.state);
        let blocks = std::mem::take(&mut state.table.blocks);
        for record in blocks.values() {
            result = result.and(state.look(record, Seen::Checked));
        }
        state.table.blocks = blocks;
        drop(state);
        self.reports.tell();
        result?;
        let report = std::mem::take(&mut lock(&self.state).kept);
        if report.damage.is_empty() {
            return Ok(());
        }
        let report = Box::new(report);
        Err(Error::HeapDamaged { report })
    }

    /// Returns the blocks in use, by age.
    pub(crate) fn live_blocks(&self) -> Vec<BlockInfo> {
        let state = lock(&self.state);
        state.table.live().into_iter().map(Record::info).collect()
    }

    /// Returns the blocks in use, grouped by where they were allocated.
    pub(crate) fn leaks(&self) -> LeakReport {
        LeakReport::of(&lock(&self.state).table.live())
    }

    /// Reports the blocks left when the last handle is dropped.
    pub(crate) fn tell_leaks(&self) {
        let report = self.leaks();
        if report.blocks == 0 {
            return;
        }
        tracing::warn!(%report, "a heap's last handle is gone, and its memory stays for its blocks");
        if let Some(told) = &self.options.on_leaks {
            (told.0)(&report);
        }
    }

    /// Returns the ranges of blocks that wait for GPU work, and of those in quarantine, with their guards.
    pub(crate) fn deferred_and_quarantined(&self) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let state = lock(&self.state);
        let of = |kind| {
            state
                .table
                .all(kind)
                .map(|record| record.outer.range_taken())
        };
        let (deferred, freed) = (of(RecordState::Deferred), of(RecordState::Freed));
        (deferred.collect(), freed.collect())
    }

    /// Returns the bytes in quarantine.
    pub(crate) fn quarantined(&self) -> u64 {
        lock(&self.state).table.quarantined
    }
}
