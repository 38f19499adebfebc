//! State under the debug mode's lock: the table of blocks, the access to their bytes, and reports on them.

use std::ops::Range;
use std::sync::Arc;

use super::record::{Record, RecordState, Table};
use super::site::Origin;
use super::{BlockInfo, Damage, DamageKind, DamageReport, DebugOptions, Seen};
use crate::bytes::ByteAccess;
use crate::driver::DevicePtr;
use crate::reports::Reports;
use crate::{Error, Result};

/// How many findings are kept for the next check.
const KEPT: usize = 1000;

pub(super) struct State {
    pub(super) options: Arc<DebugOptions>,
    /// The address of offset 0.
    pub(super) start: u64,
    pub(super) table: Table,
    pub(super) bytes: ByteAccess,
    pub(super) reports: Arc<Reports>,
    /// Damage for the next check.
    pub(super) kept: DamageReport,
}

impl State {
    /// Fills parts of a block that is not handed out yet, or freed. If that fails, the block is not checked from now on.
    pub(super) fn write(&mut self, record: &mut Record, parts: &[(Range<u64>, u8)]) {
        for (range, byte) in parts {
            if !record.written || self.bytes.is_none() {
                return;
            }
            let (start, bytes) = (DevicePtr(self.start + range.start), range.end - range.start);
            // SAFETY: these bytes are the core's block for the record, and no other code uses them.
            if let Err(error) = unsafe { self.bytes.fill(start, bytes, *byte) } {
                record.written = false;
                let what = "a block's guards cannot be written, so it is not checked";
                self.report_trouble(what, error, record.offset);
            }
        }
    }

    /// Reports that the bytes of the block at an offset cannot be reached.
    fn report_trouble(&self, trouble: &'static str, error: Error, offset: u64) {
        let report = move || tracing::warn!(%error, offset, "{trouble}");
        self.reports.add(report);
    }

    pub(super) fn look_or_note(&mut self, record: &Record, seen: Seen) {
        if let Err(error) = self.look(record, seen) {
            let what = "a block cannot be checked";
            self.report_trouble(what, error, record.offset);
        }
    }

    /// Checks all bytes of a block that the program may not have written. Restores damaged ones, so that each
    /// damage is found once.
    pub(super) fn look(&mut self, record: &Record, seen: Seen) -> Result<()> {
        if !record.written || self.bytes.is_none() {
            return Ok(());
        }
        let mut after = record.after();
        let mut own = record.own();
        if record.state != RecordState::Freed {
            own.end = own.start;
            if seen == Seen::Checked {
                // Excludes a word that its user may be writing to by non-atomic accesses.
                after.start = after.start.next_multiple_of(8).min(after.end);
            }
        }
        let guard = DebugOptions::GUARD_BYTE;
        for (kind, range, expected) in [
            (DamageKind::Underrun, record.before(), guard),
            (DamageKind::Overrun, after, guard),
            (DamageKind::UseAfterFree, own, self.options.freed),
        ] {
            let (start, bytes) = (DevicePtr(self.start + range.start), range.end - range.start);
            let from = range.start as i64 - record.offset as i64;
            // SAFETY: the block has not been returned to the core, and only damage can write to these words.
            let wrong = unsafe { self.bytes.compare(start, (from, bytes), expected)? };
            let Some(wrong) = wrong else { continue };
            // SAFETY: as above.
            let mended = unsafe { self.bytes.fill(start, bytes, expected) };
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

    /// Reports the free of a block that is not in use.
    pub(super) fn freed_wrongly(&mut self, offset: u64, by: Option<Origin>) {
        let (kind, record) = match self.table.blocks.get(&offset) {
            Some(record) => (DamageKind::DoubleFree, Some(record)),
            None => (DamageKind::InvalidFree, self.table.around(offset)),
        };
        let block = record.map(Record::info);
        self.add_wrong_free(kind, (offset, block), by);
    }

    pub(super) fn add_wrong_free(
        &mut self,
        kind: DamageKind,
        (offset, block): (u64, Option<BlockInfo>),
        by: Option<Origin>,
    ) {
        self.add(Damage {
            kind,
            address: self.start.wrapping_add(offset),
            block,
            bytes: None,
            seen: Seen::Freed,
            by: by.map(|by| by.site()),
        });
    }

    fn add(&mut self, damage: Damage) {
        if self.kept.damage.len() < KEPT {
            self.kept.damage.push(damage.clone());
        } else {
            self.kept.more += 1;
        }
        let told = self.options.on_damage.clone();
        self.reports.add(move || {
            tracing::error!(%damage, "a heap's debug mode has found damage");
            if let Some(told) = told {
                (told.0)(&damage);
            }
        });
    }
}
