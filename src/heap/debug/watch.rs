//! The way of a block in debug mode.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Mutex;

use super::bytes::Reach;
use super::table::{Fit, Record, State, Table};
use super::{
    BlockInfo, Damage, DamageKind, DamageReport, DebugOptions, LeakReport, Leaks, Origin, Seen,
    WrongBytes,
};
use crate::driver::DevicePtr;
use crate::heap::shared::{Piece, Shared};
use crate::per_driver::lock;
use crate::{Error, Result};

/// How many findings are kept for the next check.
const KEPT: usize = 1000;

type Place = &'static Location<'static>;

/// What a heap in debug mode has beside the others.
///
/// Its lock comes after that of `backing` and before the core's. What is found under it is told later,
/// with no lock held: whoever is told may use the heap.
pub(in crate::heap) struct Watch {
    options: DebugOptions,
    inner: Mutex<Inner>,
}

struct Inner {
    table: Table,
    /// None until it is needed.
    reach: Option<Reach>,
    /// What nobody was told yet.
    news: Vec<Damage>,
    /// For the next check.
    kept: DamageReport,
}

impl Watch {
    pub(in crate::heap) fn new(options: DebugOptions) -> Self {
        Self {
            options,
            inner: Mutex::new(Inner {
                table: Table::default(),
                reach: None,
                news: Vec::new(),
                kept: DamageReport::default(),
            }),
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
        let outer = taken?;
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
            Err(error) => unguarded(&error, &record),
        }
        let piece = Piece {
            offset: record.offset,
            bytes,
            ..outer
        };
        inner.table.insert(record);
        Ok(piece)
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
        let mut left = Vec::new();
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
                    unguarded(&error, &record);
                    record.written = false;
                    inner.table.insert(record);
                }
            }
            inner.table.quarantine(offset);
            left = inner.leave(heap, &self.options, self.options.quarantine, seen);
        } else {
            inner.freed_wrongly(heap, offset, by);
        }
        drop(guard);
        give_back(heap, left);
        is_there
    }

    /// Empties quarantine.
    pub(in crate::heap) fn flush(&self, heap: &Shared) {
        let left = lock(&self.inner).leave(heap, &self.options, 0, Seen::LeftQuarantine);
        give_back(heap, left);
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
            for damage in news {
                tracing::error!(%damage, "a heap's debug mode has found damage");
                if let Some(told) = &self.options.on_damage {
                    told(&damage);
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

impl Inner {
    fn reach(&mut self, heap: &Shared) -> Result<&Reach> {
        let reach = match self.reach.take() {
            Some(reach) => reach,
            None => Reach::new(&heap.driver, heap.host, heap.gpu)?,
        };
        Ok(self.reach.insert(reach))
    }

    fn write_new(&mut self, heap: &Shared, record: &Record, options: &DebugOptions) -> Result<()> {
        let reach = self.reach(heap)?;
        let fill = |range: std::ops::Range<u64>, byte| {
            let start = DevicePtr(heap.start + range.start);
            // SAFETY: the block is new, and nobody else's yet.
            unsafe { reach.fill(start, range.end - range.start, byte) }
        };
        fill(record.before(), DebugOptions::GUARD_BYTE)?;
        fill(record.offset..record.end(), options.fresh)?;
        fill(record.after(), DebugOptions::GUARD_BYTE)
    }

    fn write_freed(
        &mut self,
        heap: &Shared,
        record: &Record,
        options: &DebugOptions,
    ) -> Result<()> {
        let start = DevicePtr(heap.start + record.offset);
        // SAFETY: the block is freed, and nobody else's yet.
        unsafe { self.reach(heap)?.fill(start, record.bytes, options.freed) }
    }

    /// Takes blocks out of quarantine, until no more than `most` bytes are in it.
    fn leave(
        &mut self,
        heap: &Shared,
        options: &DebugOptions,
        most: u64,
        seen: Seen,
    ) -> Vec<Piece> {
        let seen = match seen {
            Seen::Freed => Seen::LeftQuarantine,
            other => other,
        };
        let mut left = Vec::new();
        while let Some(record) = self.table.leave(most) {
            self.look_or_log(heap, &record, options, seen);
            left.push(record.outer);
        }
        left
    }

    fn look_or_log(&mut self, heap: &Shared, record: &Record, options: &DebugOptions, seen: Seen) {
        if let Err(error) = self.look(heap, record, options, seen) {
            tracing::warn!(%error, offset = record.offset, "a block cannot be looked at");
        }
    }

    /// Looks at all bytes of a block that nobody may have written; what is wrong is put right, so that it
    /// is found once.
    fn look(
        &mut self,
        heap: &Shared,
        record: &Record,
        options: &DebugOptions,
        seen: Seen,
    ) -> Result<()> {
        if !record.written {
            return Ok(());
        }
        let mut after = record.after();
        if seen == Seen::Checked && record.state != State::Freed {
            // A word that its user may be writing to, in other ways than by atomic accesses.
            after.start = after.start.next_multiple_of(8).min(after.end);
        }
        let guard = DebugOptions::GUARD_BYTE;
        let mut parts = vec![
            (DamageKind::Underrun, record.before(), guard),
            (DamageKind::Overrun, after, guard),
        ];
        if record.state == State::Freed {
            let all = record.offset..record.end();
            parts.push((DamageKind::UseAfterFree, all, options.freed));
        }
        for (kind, range, expected) in parts {
            let start = DevicePtr(heap.start + range.start);
            let bytes = range.end - range.start;
            let reach = self.reach(heap)?;
            // SAFETY: the block is not given back, and of these words nobody has a byte but by damage.
            let Some(wrong) = (unsafe { reach.wrong(start, bytes, expected)? }) else {
                continue;
            };
            // SAFETY: as above.
            let mended = unsafe { reach.fill(start, bytes, expected) };
            let from = range.start as i64 - record.offset as i64;
            self.add(Damage {
                kind,
                address: start.0 + wrong.first,
                block: Some(record.info()),
                bytes: Some(WrongBytes {
                    first: from + wrong.first as i64,
                    last: from + wrong.last as i64,
                    count: wrong.count,
                    expected,
                    found: wrong.found,
                }),
                seen,
                by: None,
            });
            mended?;
        }
        Ok(())
    }

    /// Somebody freed what cannot be freed.
    fn freed_wrongly(&mut self, heap: &Shared, offset: u64, by: Option<Origin>) {
        let address = heap.start.wrapping_add(offset);
        let damage = match self.table.get(offset) {
            Some(record) => wrong_free(DamageKind::DoubleFree, address, Some(record.info()), by),
            None => {
                let around = self.table.around(offset).map(Record::info);
                wrong_free(DamageKind::InvalidFree, address, around, by)
            }
        };
        self.add(damage);
    }

    fn add(&mut self, damage: Damage) {
        match self.kept.damage.len() < KEPT {
            true => self.kept.damage.push(damage.clone()),
            false => self.kept.more += 1,
        }
        self.news.push(damage);
    }
}

fn wrong_free(
    kind: DamageKind,
    address: u64,
    block: Option<BlockInfo>,
    by: Option<Origin>,
) -> Damage {
    Damage {
        kind,
        address,
        block,
        bytes: None,
        seen: Seen::Freed,
        by: by.map(|by| by.site()),
    }
}

fn unguarded(error: &Error, record: &Record) {
    let offset = record.offset;
    tracing::warn!(%error, offset, "a block's guards cannot be written, so nobody looks at it");
}

fn give_back(heap: &Shared, left: Vec<Piece>) {
    for outer in left {
        // SAFETY: it was freed, and has left the table: it is nobody's.
        unsafe { heap.take_back_scrubbed(&outer) };
    }
}
