//! State under the debug mode's lock: the table of blocks, and the access to their bytes.

use super::bytes::{HeapMemory, Reach};
use super::table::{Record, RecordState, Table};
use super::{BlockInfo, Damage, DamageKind, DamageReport, DebugOptions, Origin, Seen};
use crate::driver::DevicePtr;
use crate::piece::Piece;
use crate::{Error, Result};

/// How many findings are kept for the next check.
const KEPT: usize = 1000;

pub(super) struct WatchState {
    pub(super) memory: HeapMemory,
    pub(super) table: Table,
    /// Created when first needed.
    pub(super) reach: Option<Reach>,
    /// Findings not reported yet.
    pub(super) news: Vec<News>,
    /// Damage for the next check.
    pub(super) kept: DamageReport,
}

/// The log's message about a block whose patterns cannot be written, when it is allocated or freed.
pub(super) const UNGUARDED: &str = "a block's guards cannot be written, so it is not checked";

/// A finding under the lock, reported later.
pub(super) enum News {
    Damage(Box<Damage>),
    /// The bytes of the block at an offset cannot be reached.
    Trouble(&'static str, Error, u64),
}

impl WatchState {
    pub(super) fn new(memory: HeapMemory) -> Self {
        Self {
            memory,
            table: Table::default(),
            reach: None,
            news: Vec::new(),
            kept: DamageReport::default(),
        }
    }

    fn reach(&mut self) -> Result<&Reach> {
        let reach = match self.reach.take() {
            Some(reach) => reach,
            None => Reach::new(&self.memory)?,
        };
        Ok(self.reach.insert(reach))
    }

    pub(super) fn write_new(&mut self, record: &Record, options: &DebugOptions) -> Result<()> {
        let heap_start = self.memory.start;
        let reach = self.reach()?;
        for (range, byte) in [
            (record.before(), DebugOptions::GUARD_BYTE),
            (record.offset..record.end(), options.fresh),
            (record.after(), DebugOptions::GUARD_BYTE),
        ] {
            let start = DevicePtr(heap_start + range.start);
            // SAFETY: the block is new and not handed out yet.
            unsafe { reach.fill(start, range.end - range.start, byte)? };
        }
        Ok(())
    }

    pub(super) fn write_freed(&mut self, record: &Record, options: &DebugOptions) -> Result<()> {
        let start = DevicePtr(self.memory.start + record.offset);
        // SAFETY: the block is freed and not handed out again yet.
        unsafe { self.reach()?.fill(start, record.bytes, options.freed) }
    }

    /// Takes blocks out of quarantine until at most `most` bytes are in it.
    pub(super) fn leave(&mut self, options: &DebugOptions, most: u64, seen: Seen) -> Vec<Piece> {
        let seen = match seen {
            Seen::Freed => Seen::LeftQuarantine,
            other => other,
        };
        let mut left = Vec::new();
        while let Some(record) = self.table.leave(most) {
            self.look_or_log(&record, options, seen);
            left.push(record.outer);
        }
        left
    }

    pub(super) fn look_or_log(&mut self, record: &Record, options: &DebugOptions, seen: Seen) {
        if let Err(error) = self.look(record, options, seen) {
            self.trouble("a block cannot be checked", error, record);
        }
    }

    pub(super) fn trouble(&mut self, what: &'static str, error: Error, record: &Record) {
        self.news.push(News::Trouble(what, error, record.offset));
    }

    /// Checks all bytes of a block that the program may not have written. Restores damaged ones, so that each
    /// damage is found once.
    pub(super) fn look(
        &mut self,
        record: &Record,
        options: &DebugOptions,
        seen: Seen,
    ) -> Result<()> {
        if !record.written {
            return Ok(());
        }
        let mut after = record.after();
        if seen == Seen::Checked && record.state != RecordState::Freed {
            // Excludes a word that its user may be writing to by non-atomic accesses.
            after.start = after.start.next_multiple_of(8).min(after.end);
        }
        let guard = DebugOptions::GUARD_BYTE;
        let mut parts = vec![
            (DamageKind::Underrun, record.before(), guard),
            (DamageKind::Overrun, after, guard),
        ];
        if record.state == RecordState::Freed {
            let all = record.offset..record.end();
            parts.push((DamageKind::UseAfterFree, all, options.freed));
        }
        for (kind, range, expected) in parts {
            let start = DevicePtr(self.memory.start + range.start);
            let bytes = range.end - range.start;
            let from = range.start as i64 - record.offset as i64;
            let reach = self.reach()?;
            // SAFETY: the block has not been returned to the core, and only damage can write to these words.
            let Some(wrong) = (unsafe { reach.wrong(start, (from, bytes), expected)? }) else {
                continue;
            };
            // SAFETY: as above.
            let mended = unsafe { reach.fill(start, bytes, expected) };
            self.add(Damage {
                kind,
                address: start.0 + (wrong.first - from) as u64,
                block: Some(record.info()),
                bytes: Some(wrong),
                seen,
                by: None,
            });
            mended?;
        }
        Ok(())
    }

    /// Reports an invalid free.
    pub(super) fn freed_wrongly(&mut self, offset: u64, by: Option<Origin>) {
        let address = self.memory.start.wrapping_add(offset);
        let damage = match self.table.blocks.get(&offset) {
            Some(record) => wrong_free(DamageKind::DoubleFree, address, Some(record.info()), by),
            None => {
                let around = self.table.around(offset).map(Record::info);
                wrong_free(DamageKind::InvalidFree, address, around, by)
            }
        };
        self.add(damage);
    }

    pub(super) fn add(&mut self, damage: Damage) {
        match self.kept.damage.len() < KEPT {
            true => self.kept.damage.push(damage.clone()),
            false => self.kept.more += 1,
        }
        self.news.push(News::Damage(Box::new(damage)));
    }
}

pub(super) fn wrong_free(
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
