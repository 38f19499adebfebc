//! The path of a block in debug mode.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Mutex;

use super::bytes::HeapMemory;
use super::state::{News, UNGUARDED, WatchState, wrong_free};
use super::table::{Fit, Record, RecordState};
use super::{BlockInfo, DamageKind, DebugOptions, LeakReport, Leaks, Origin, Seen};
use crate::per_driver::lock;
use crate::piece::Piece;
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
/// lock held, because the callback may use the heap.
pub(crate) struct Watch {
    options: DebugOptions,
    state: Mutex<WatchState>,
}

impl Watch {
    pub(crate) fn new(options: DebugOptions, memory: HeapMemory) -> Self {
        Self {
            options,
            state: Mutex::new(WatchState::new(memory)),
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
        // Reports on the blocks that left quarantine for it.
        self.tell();
        let outer = taken.map_err(|mut error| {
            if let Error::HeapFull {
                requested, guards, ..
            } = &mut error
            {
                (*requested, *guards) = (bytes, fit.bytes - bytes);
            }
            error
        })?;
        let mut state = lock(&self.state);
        let mut record = Record {
            outer,
            offset: outer.offset + fit.front,
            bytes,
            align,
            guard: self.options.guard,
            written: false,
            number: state.table.number(),
            state: RecordState::Live,
            allocated: self.origin(Some(place)),
            freed: None,
        };
        match state.write_new(&record, &self.options) {
            Ok(()) => record.written = true,
            Err(error) => state.trouble(UNGUARDED, error, &record),
        }
        let piece = Piece {
            offset: record.offset,
            bytes,
            ..outer
        };
        state.table.insert(record);
        drop(state);
        self.tell();
        Ok(piece)
    }

    /// Notes that a block is a collection's memory.
    #[cfg(any(feature = "allocator-api2", feature = "nightly"))]
    pub(crate) fn is_collections(&self, offset: u64) {
        if let Some(record) = lock(&self.state).table.blocks.get_mut(&offset) {
            record.allocated.set_in_collection();
        }
    }

    /// Frees a block in use; returns whether there is one at `offset`. `give_back` gets the blocks that leave
    /// quarantine.
    pub(crate) fn free(&self, offset: u64, give_back: &dyn Fn(Left)) -> bool {
        let by = self.origin(None);
        self.retire(offset, Seen::Freed, Some(by), give_back)
    }

    /// Retires a freed block whose GPU work has finished. `give_back` gets the blocks that leave quarantine.
    pub(crate) fn passed(&self, offset: u64, give_back: &dyn Fn(Left)) {
        self.retire(offset, Seen::Freed, None, give_back);
    }

    /// Notes that a block is freed at `place` and waits for GPU work. `None` undoes this after a free that failed.
    pub(crate) fn defer(&self, offset: u64, place: Option<Place>) {
        let by = place.map(|place| self.origin(Some(place)));
        if let Some(record) = lock(&self.state).table.blocks.get_mut(&offset) {
            record.state = match by {
                Some(_) => RecordState::Deferred,
                None => RecordState::Live,
            };
            record.freed = by;
        }
    }

    /// Checks a block and puts it into quarantine. `by` is the user's site, if a user frees it.
    fn retire(
        &self,
        offset: u64,
        seen: Seen,
        by: Option<Origin>,
        give_back: &dyn Fn(Left),
    ) -> bool {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let wanted = match by {
            Some(_) => RecordState::Live,
            None => RecordState::Deferred,
        };
        let recorded = state.table.blocks.get(&offset).map(|record| record.state);
        // A block that was freed after GPU work without `defer` counts as live until here.
        let is_there =
            recorded == Some(wanted) || (by.is_none() && recorded == Some(RecordState::Live));
        if is_there {
            if let Some(record) = state.table.blocks.get_mut(&offset) {
                record.freed = record.freed.take().or(by);
                let mut record = record.clone();
                state.look_or_log(&record, &self.options, seen);
                if record.written
                    && let Err(error) = state.write_freed(&record, &self.options)
                {
                    state.trouble(UNGUARDED, error, &record);
                    record.written = false;
                    state.table.insert(record);
                }
            }
            state.table.quarantine(offset);
            let left = state.leave(&self.options, self.options.quarantine, seen);
            // Under the lock, so that no thread misses blocks that are in neither place.
            left.into_iter().map(Left).for_each(give_back);
        } else {
            state.freed_wrongly(offset, by);
        }
        is_there
    }

    /// Empties the quarantine, and keeps it empty until the result is dropped.
    pub(crate) fn emptied<'a>(&'a self, give_back: &dyn Fn(Left)) -> impl Sized + use<'a> {
        let mut state = lock(&self.state);
        let left = state.leave(&self.options, 0, Seen::LeftQuarantine);
        left.into_iter().map(Left).for_each(give_back);
        state
    }

    /// Checks the blocks in quarantine and those in `passed` for the last time. The memory is still mapped.
    pub(crate) fn end(&self, passed: &[Piece], give_back: &dyn Fn(Left)) {
        for piece in passed {
            self.retire(piece.offset, Seen::Ended, None, give_back);
        }
        let mut state = lock(&self.state);
        state.leave(&self.options, 0, Seen::Ended);
        state.reach = None;
        drop(state);
        self.tell();
    }

    /// Returns the block at an address that is about to be freed, for callers that know only the address.
    #[cfg_attr(
        not(any(feature = "allocator-api2", feature = "nightly")),
        allow(dead_code, reason = "for collections")
    )]
    pub(crate) fn piece_at(&self, address: u64, bytes: u64, align: u64) -> Result<Piece> {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let offset = address.wrapping_sub(state.memory.start);
        let found = match state.table.blocks.get(&offset) {
            Some(record) if record.state == RecordState::Live => {
                let piece = Piece {
                    offset,
                    bytes: record.bytes,
                    ..record.outer
                };
                if (record.bytes, record.align) != (bytes, align) {
                    let info = record.info();
                    let by = Some(self.origin(None));
                    state.add(wrong_free(DamageKind::WrongLayout, address, Some(info), by));
                }
                Ok(piece)
            }
            _ => {
                state.freed_wrongly(offset, Some(self.origin(None)));
                let why = format!("no block in use begins at {address:#x}");
                Err(Error::invalid("address", why))
            }
        };
        drop(guard);
        self.tell();
        found
    }

    /// Checks all blocks.
    pub(crate) fn check(&self) -> Result<()> {
        let mut result = Ok(());
        let mut guard = lock(&self.state);
        let all: Vec<Record> = guard.table.blocks.values().cloned().collect();
        for record in all {
            result = result.and(guard.look(&record, &self.options, Seen::Checked));
        }
        drop(guard);
        self.tell();
        result?;
        let report = std::mem::take(&mut lock(&self.state).kept);
        match report.damage.is_empty() {
            true => Ok(()),
            false => Err(Error::HeapDamaged {
                report: Box::new(report),
            }),
        }
    }

    /// Reports the findings. The caller holds no lock of the heap.
    pub(crate) fn tell(&self) {
        loop {
            let news = std::mem::take(&mut lock(&self.state).news);
            if news.is_empty() {
                return;
            }
            for news in news {
                match news {
                    News::Damage(damage) => {
                        tracing::error!(%damage, "a heap's debug mode has found damage");
                        if let Some(told) = &self.options.on_damage {
                            (told.0)(&damage);
                        }
                    }
                    News::Trouble(trouble, error, offset) => {
                        tracing::warn!(%error, offset, "{trouble}");
                    }
                }
            }
        }
    }

    /// Returns the blocks in use, by age.
    pub(crate) fn live_blocks(&self) -> Vec<BlockInfo> {
        let state = lock(&self.state);
        state.table.live().into_iter().map(Record::info).collect()
    }

    /// Returns the blocks in use, grouped by where they were allocated.
    pub(crate) fn leaks(&self) -> LeakReport {
        let state = lock(&self.state);
        let mut report = LeakReport::default();
        let mut places: HashMap<Option<Place>, Leaks> = HashMap::new();
        for record in state.table.live() {
            report.blocks += 1;
            report.bytes += record.bytes;
            let place = places
                .entry(record.allocated.place())
                .or_insert_with(|| Leaks {
                    first: record.info(),
                    ..Leaks::default()
                });
            place.blocks += 1;
            place.bytes += record.bytes;
        }
        report.places = places.into_values().collect();
        // Most bytes first; the block numbers make the order deterministic.
        let order = |leaks: &Leaks| (std::cmp::Reverse(leaks.bytes), leaks.first.number);
        report.places.sort_unstable_by_key(order);
        report
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

    /// Returns the core's block for a piece.
    pub(crate) fn outer(&self, piece: &Piece) -> Piece {
        let state = lock(&self.state);
        state
            .table
            .blocks
            .get(&piece.offset)
            .map_or(*piece, |record| record.outer)
    }

    /// Returns the blocks in quarantine.
    pub(crate) fn quarantine(&self) -> Vec<Piece> {
        let state = lock(&self.state);
        let freed = state
            .table
            .blocks
            .values()
            .filter(|record| record.state == RecordState::Freed);
        freed.map(|record| record.outer).collect()
    }

    /// Returns the bytes in quarantine.
    pub(crate) fn quarantined(&self) -> u64 {
        lock(&self.state).table.quarantined()
    }
}
