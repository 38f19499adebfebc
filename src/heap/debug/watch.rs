//! The way of a block in debug mode.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Mutex;

use super::inner::{Inner, News, wrong_free};
use super::table::{Fit, Record, State};
use super::{BlockInfo, DamageKind, DebugOptions, LeakReport, Leaks, Origin, Seen};
use crate::heap::piece::Piece;
use crate::heap::shared::Shared;
use crate::per_driver::lock;
use crate::{Error, Result};

type Place = &'static Location<'static>;

/// What a heap in debug mode has beside the others.
///
/// Its lock comes after that of `backing` and before the core's. What is found under it is told later,
/// with no lock held: whoever is told may use the heap.
pub(in crate::heap) struct Watch {
    options: DebugOptions,
    inner: Mutex<Inner>,
}

impl Watch {
    pub(in crate::heap) fn new(options: DebugOptions) -> Self {
        Self {
            options,
            inner: Mutex::default(),
        }
    }

    fn origin(&self, place: Option<Place>) -> Origin {
        Origin::here(place, self.options.backtraces)
    }

    /// A block, as its user is to have it.
    pub(in crate::heap) fn allocate(
        &self,
        heap: &Shared,
        bytes: u64,
        align: u64,
        place: Place,
    ) -> Result<Piece> {
        let fit = Fit::of(bytes, align, self.options.guard);
        let taken = heap.take_new(fit.bytes, align);
        // What left quarantine for it.
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
        let mut inner = lock(&self.inner);
        let mut record = Record {
            outer,
            offset: outer.offset + fit.front,
            bytes,
            align,
            guard: self.options.guard,
            written: false,
            number: inner.table.number(),
            state: State::Live,
            allocated: self.origin(Some(place)),
            freed: None,
        };
        match inner.write_new(heap, &record, &self.options) {
            Ok(()) => record.written = true,
            Err(error) => inner.news.push(News::Unguarded(error, record.offset)),
        }
        let piece = Piece {
            offset: record.offset,
            bytes,
            ..outer
        };
        inner.table.insert(record);
        drop(inner);
        self.tell();
        Ok(piece)
    }

    /// A block is a collection's memory.
    #[cfg(any(feature = "allocator-api2", feature = "nightly"))]
    pub(in crate::heap) fn is_collections(&self, offset: u64) {
        if let Some(record) = lock(&self.inner).table.get_mut(offset) {
            record.allocated.set_in_collection();
        }
    }

    /// A block is freed that its user has; whether it has one there.
    pub(in crate::heap) fn free(&self, heap: &Shared, offset: u64) -> bool {
        let by = self.origin(None);
        self.retire(heap, offset, Seen::Freed, Some(by))
    }

    /// GPU work has passed that a freed block waited for.
    pub(in crate::heap) fn passed(&self, heap: &Shared, offset: u64) {
        self.retire(heap, offset, Seen::Freed, None);
    }

    /// A block is freed that waits for GPU work from now on.
    pub(in crate::heap) fn defer(&self, offset: u64, place: Place) {
        let by = self.origin(Some(place));
        if let Some(record) = lock(&self.inner).table.get_mut(offset) {
            (record.state, record.freed) = (State::Deferred, Some(by));
        }
    }

    /// It was not freed after all.
    pub(in crate::heap) fn undo_defer(&self, offset: u64) {
        if let Some(record) = lock(&self.inner).table.get_mut(offset) {
            (record.state, record.freed) = (State::Live, None);
        }
    }

    /// Looks at a block and takes it into quarantine. `by` is the user, where it is one that frees it.
    fn retire(&self, heap: &Shared, offset: u64, seen: Seen, by: Option<Origin>) -> bool {
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        let wanted = match by {
            Some(_) => State::Live,
            None => State::Deferred,
        };
        let state = inner.table.get(offset).map(|record| record.state);
        // What was freed after GPU work in other ways than by `defer` counts as live until here.
        let is_there = state == Some(wanted) || (by.is_none() && state == Some(State::Live));
        if is_there {
            if let Some(record) = inner.table.get_mut(offset) {
                record.freed = record.freed.take().or(by);
                let mut record = record.clone();
                inner.look_or_log(heap, &record, &self.options, seen);
                if record.written
                    && let Err(error) = inner.write_freed(heap, &record, &self.options)
                {
                    inner.news.push(News::Unguarded(error, record.offset));
                    record.written = false;
                    inner.table.insert(record);
                }
            }
            inner.table.quarantine(offset);
            let left = inner.leave(heap, &self.options, self.options.quarantine, seen);
            // Under the lock, so that nobody looks in vain for what is in neither place.
            give_back(heap, left);
        } else {
            inner.freed_wrongly(heap, offset, by);
        }
        is_there
    }

    /// Empties quarantine, and keeps it so until the result is dropped.
    pub(in crate::heap) fn emptied(&self, heap: &Shared) -> impl Sized {
        let mut inner = lock(&self.inner);
        let left = inner.leave(heap, &self.options, 0, Seen::LeftQuarantine);
        give_back(heap, left);
        inner
    }

    /// Looks at what is in quarantine for the last time, and at what has `passed`. The memory is there
    /// still.
    pub(in crate::heap) fn end(&self, heap: &Shared, passed: &[Piece]) {
        for piece in passed {
            self.retire(heap, piece.offset, Seen::Ended, None);
        }
        let mut inner = lock(&self.inner);
        inner.leave(heap, &self.options, 0, Seen::Ended);
        inner.reach = None;
        drop(inner);
        self.tell();
    }

    /// The block that somebody is about to free who has no more than its address.
    pub(in crate::heap) fn piece_at(
        &self,
        heap: &Shared,
        address: u64,
        bytes: u64,
        align: u64,
    ) -> Result<Piece> {
        let offset = address.wrapping_sub(heap.start);
        let mut guard = lock(&self.inner);
        let inner = &mut *guard;
        let found = match inner.table.get(offset) {
            Some(record) if record.state == State::Live => {
                let piece = Piece {
                    offset,
                    bytes: record.bytes,
                    ..record.outer
                };
                if (record.bytes, record.align) != (bytes, align) {
                    let info = record.info();
                    let by = Some(self.origin(None));
                    inner.add(wrong_free(DamageKind::WrongLayout, address, Some(info), by));
                }
                Ok(piece)
            }
            _ => {
                inner.freed_wrongly(heap, offset, Some(self.origin(None)));
                let why = format!("no block in use begins at {address:#x}");
                Err(Error::invalid("address", why))
            }
        };
        drop(guard);
        self.tell();
        found
    }

    /// Looks at all blocks.
    pub(in crate::heap) fn check(&self, heap: &Shared) -> Result<()> {
        let mut result = Ok(());
        let mut guard = lock(&self.inner);
        let all: Vec<Record> = guard.table.all().cloned().collect();
        for record in all {
            result = result.and(guard.look(heap, &record, &self.options, Seen::Checked));
        }
        drop(guard);
        self.tell();
        result?;
        let report = std::mem::take(&mut lock(&self.inner).kept);
        match report.damage.is_empty() {
            true => Ok(()),
            false => Err(Error::HeapDamaged {
                report: Box::new(report),
            }),
        }
    }

    /// Tells what was found. Never with a lock of the heap held.
    pub(in crate::heap) fn tell(&self) {
        loop {
            let news = std::mem::take(&mut lock(&self.inner).news);
            if news.is_empty() {
                return;
            }
            for news in news {
                match news {
                    News::Damage(damage) => {
                        tracing::error!(%damage, "a heap's debug mode has found damage");
                        if let Some(told) = &self.options.on_damage {
                            told(&damage);
                        }
                    }
                    News::Unseen(error, offset) => {
                        tracing::warn!(%error, offset, "a block cannot be looked at");
                    }
                    News::Unguarded(error, offset) => {
                        tracing::warn!(%error, offset, "a block's guards cannot be written, so nobody looks at it");
                    }
                }
            }
        }
    }

    /// What the program has, by age.
    pub(in crate::heap) fn live_blocks(&self) -> Vec<BlockInfo> {
        let inner = lock(&self.inner);
        inner.table.live().into_iter().map(Record::info).collect()
    }

    /// The same by where it was allocated.
    pub(in crate::heap) fn leaks(&self) -> LeakReport {
        let inner = lock(&self.inner);
        let mut report = LeakReport::default();
        let mut places: HashMap<Option<Place>, Leaks> = HashMap::new();
        for record in inner.table.live() {
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
        // Most bytes first, and always in the same order.
        let order = |leaks: &Leaks| (std::cmp::Reverse(leaks.bytes), leaks.first.number);
        report.places.sort_unstable_by_key(order);
        report
    }

    /// The last handle is gone.
    pub(in crate::heap) fn tell_leaks(&self) {
        let report = self.leaks();
        if report.blocks == 0 {
            return;
        }
        tracing::warn!(%report, "a heap's last handle is gone, and its memory stays for its blocks");
        if let Some(told) = &self.options.on_leaks {
            told(&report);
        }
    }

    /// What the core has given for a block.
    pub(in crate::heap) fn outer(&self, piece: &Piece) -> Piece {
        let inner = lock(&self.inner);
        inner
            .table
            .get(piece.offset)
            .map_or(*piece, |record| record.outer)
    }

    /// What is in quarantine.
    pub(in crate::heap) fn quarantine(&self) -> Vec<Piece> {
        let inner = lock(&self.inner);
        let freed = inner
            .table
            .all()
            .filter(|record| record.state == State::Freed);
        freed.map(|record| record.outer).collect()
    }

    /// How many bytes that is.
    pub(in crate::heap) fn quarantined(&self) -> u64 {
        lock(&self.inner).table.quarantined()
    }
}

fn give_back(heap: &Shared, left: Vec<Piece>) {
    for outer in left {
        // SAFETY: it was freed, and has left the table: it is nobody's.
        unsafe { heap.take_back_scrubbed(&outer) };
    }
}
