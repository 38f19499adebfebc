//! The table of live and quarantined blocks, and reports on those that are not freed. It is pure: it accesses no memory of the
//! heap.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::BlockInfo;
use super::site::Origin;
use crate::error::{blocks, bytes};
use crate::piece::Piece;

/// Blocks with up to this alignment have guards before them.
const MAX_FRONT: u64 = 2 << 20;
/// The most bytes before a block that are guarded, unless the guard is larger.
const MAX_BEFORE: u64 = 4096;

/// How a block lies in the range that the core returns for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    /// The bytes before it.
    pub(super) front: u64,
    /// All bytes, including those after it.
    pub(super) bytes: u64,
}

impl Fit {
    /// Returns the fit for `bytes` at a multiple of `align`, a power of two, with guards of at least `guard`
    /// bytes.
    pub(super) fn of(bytes: u64, align: u64, guard: u32) -> Self {
        let guard = u64::from(guard);
        let front = if align > MAX_FRONT {
            0
        } else {
            // Blocks begin at whole words at least, as they do without guards.
            guard.next_multiple_of(align.max(16))
        };
        Self {
            front,
            bytes: front.saturating_add(bytes).saturating_add(guard),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordState {
    /// In use by the program.
    Live,
    /// Freed by the program, but GPU work may still use it.
    Deferred,
    /// In quarantine.
    Freed,
}

/// A block.
#[derive(Clone, Debug)]
pub(super) struct Record {
    /// The core's block, including the guards.
    pub(super) outer: Piece,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) align: u64,
    pub(super) guard: u32,
    /// Whether its guards and bytes were written, so that they can be checked.
    pub(super) written: bool,
    pub(super) number: u64,
    pub(super) state: RecordState,
    pub(super) allocated: Origin,
    pub(super) freed: Option<Origin>,
}

impl Record {
    /// Returns the block's own bytes.
    pub(super) fn own(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes
    }

    /// Returns the guarded bytes before it.
    pub(super) fn before(&self) -> Range<u64> {
        let most = MAX_BEFORE.max(self.guard.into());
        let front = (self.offset - self.outer.offset).min(most);
        self.offset - front..self.offset
    }

    /// Returns the guarded bytes after it.
    pub(super) fn after(&self) -> Range<u64> {
        self.own().end..self.outer.range_taken().end
    }

    pub(super) fn info(&self) -> BlockInfo {
        BlockInfo {
            number: self.number,
            offset: self.offset,
            bytes: self.bytes,
            align: self.align,
            allocated: self.allocated.site(),
            freed: self.freed.as_ref().map(Origin::site),
        }
    }
}

/// All blocks outside the core, by their starts.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) blocks: BTreeMap<u64, Record>,
    /// The oldest first.
    quarantine: VecDeque<u64>,
    /// The bytes in quarantine, including guards.
    pub(super) quarantined: u64,
    next: u64,
}

impl Table {
    /// Returns a number for the next block.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    pub(super) fn insert(&mut self, record: Record) {
        self.blocks.insert(record.offset, record);
    }

    /// Takes a block in this state out of the table.
    pub(super) fn take(&mut self, offset: u64, state: RecordState) -> Option<Record> {
        self.blocks
            .get(&offset)
            .filter(|record| record.state == state)?;
        self.blocks.remove(&offset)
    }

    /// Returns the block that contains the byte at `offset`, including its guards.
    pub(super) fn around(&self, offset: u64) -> Option<&Record> {
        // Another block may begin before this one's guard, but not after it.
        let near = self.blocks.range(..=offset).next_back();
        let next = self.blocks.range(offset..).next();
        let mut both = near.into_iter().chain(next).map(|(_, record)| record);
        both.find(|record| record.outer.range_taken().contains(&offset))
    }

    /// Iterates over the blocks in a state.
    pub(super) fn all(&self, state: RecordState) -> impl Iterator<Item = &Record> {
        let blocks = self.blocks.values();
        blocks.filter(move |record| record.state == state)
    }

    /// Returns the blocks in use, by age.
    pub(super) fn live(&self) -> Vec<&Record> {
        let mut live: Vec<_> = self.all(RecordState::Live).collect();
        live.sort_unstable_by_key(|record| record.number);
        live
    }

    /// Puts a block that is not in the table into quarantine.
    pub(super) fn quarantine(&mut self, mut record: Record) {
        record.state = RecordState::Freed;
        self.quarantined += record.outer.taken();
        self.quarantine.push_back(record.offset);
        self.insert(record);
    }

    /// Takes the oldest block out of quarantine if it has more than `most` bytes.
    pub(super) fn leave(&mut self, most: u64) -> Option<Record> {
        if self.quarantined <= most {
            return None;
        }
        let record = self.blocks.remove(&self.quarantine.pop_front()?)?;
        self.quarantined -= record.outer.taken();
        Some(record)
    }
}

/// Blocks that are not freed, by where they were allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeakReport {
    /// The number of blocks that are not freed.
    pub blocks: u64,
    /// The bytes requested for them.
    pub bytes: u64,
    /// One entry for each place, those with most bytes first.
    pub places: Vec<Leaks>,
}

/// Blocks allocated at one place in the program and not freed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Leaks {
    /// The number of blocks.
    pub blocks: u64,
    /// The bytes requested for them.
    pub bytes: u64,
    /// The oldest of them.
    pub first: BlockInfo,
}

impl LeakReport {
    /// Returns the report on blocks in use, the oldest first.
    pub(super) fn of(live: &[&Record]) -> Self {
        let mut report = Self::default();
        let mut places: HashMap<_, Leaks> = HashMap::new();
        for record in live {
            report.blocks += 1;
            report.bytes += record.bytes;
            let place = places.entry(record.allocated.place);
            let place = place.or_insert_with(|| Leaks {
                first: record.info(),
                ..Leaks::default()
            });
            place.blocks += 1;
            place.bytes += record.bytes;
        }
        report.places = places.into_values().collect();
        // Most bytes first; the block numbers make the order deterministic.
        let order = |leaks: &Leaks| (Reverse(leaks.bytes), leaks.first.number);
        report.places.sort_unstable_by_key(order);
        report
    }
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let are = if self.blocks == 1 { "is" } else { "are" };
        let all = blocks(self.blocks);
        write!(f, "{all} with {} {are} not freed", bytes(self.bytes))?;
        for leaks in &self.places {
            let site = &leaks.first.allocated;
            let (blocks, bytes) = (blocks(leaks.blocks), bytes(leaks.bytes));
            write!(f, "\n{blocks}, {bytes}, allocated {site}")?;
        }
        let unknown = |leaks: &Leaks| {
            let site = &leaks.first.allocated;
            site.in_collection && site.backtrace.is_none()
        };
        if self.places.iter().any(unknown) {
            let advice =
                "For the code that filled these collections, set DebugOptions::backtraces(true).";
            write!(f, "\n{advice}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::Extent;
    use crate::ranges::{Core, RangeId};
    use proptest::prelude::*;

    fn record(offset: u64, bytes: u64, number: u64) -> Record {
        let fit = Fit::of(bytes, 1, 32);
        Record {
            outer: Extent::new(
                offset,
                RangeId::from_number(0),
                Core::range_granules(fit.bytes) as u32,
            )
            .with(fit.bytes),
            offset: offset + fit.front,
            bytes,
            align: 1,
            guard: 32,
            written: true,
            number,
            state: RecordState::Live,
            allocated: Origin::here(None, false),
            freed: None,
        }
    }

    proptest! {
        #[test]
        fn a_block_lies_where_it_should_with_guards_on_both_sides(
            bytes in 1_u64..1 << 40, log in 0_u32..40, guard in 0_u32..10_000,
        ) {
            let align = 1_u64 << log;
            let fit = Fit::of(bytes, align, guard);
            prop_assert!(fit.front.is_multiple_of(align.max(16)));
            prop_assert!(fit.bytes >= fit.front + bytes + u64::from(guard));
            if log <= 21 {
                prop_assert!(fit.front >= guard.into());
                prop_assert!(fit.front < u64::from(guard) + align.max(16));
            } else {
                prop_assert_eq!(fit.front, 0);
            }
        }

        /// Compares with a plain list: blocks leave in the order in which they came, as late as possible.
        #[test]
        fn quarantine_is_first_in_first_out_and_bounded(
            sizes in proptest::collection::vec(1_u64..5000, 1..60), most in 0_u64..50_000,
        ) {
            let mut table = Table::default();
            let mut waiting: VecDeque<(u64, u64)> = VecDeque::new();
            for (number, &bytes) in sizes.iter().enumerate() {
                let record = record(number as u64 * 8192, bytes, number as u64);
                let (offset, takes) = (record.offset, record.outer.taken());
                table.insert(record);
                let record = table.take(offset, RecordState::Live).unwrap();
                table.quarantine(record);
                prop_assert!(table.take(offset, RecordState::Live).is_none());
                waiting.push_back((number as u64, takes));
                while let Some(left) = table.leave(most) {
                    let before: u64 = waiting.iter().map(|(_, takes)| takes).sum();
                    prop_assert!(before > most);
                    prop_assert_eq!(Some(left.number), waiting.pop_front().map(|(number, _)| number));
                }
                let now: u64 = waiting.iter().map(|(_, takes)| takes).sum();
                prop_assert_eq!(table.quarantined, now);
                prop_assert!(now <= most);
            }
        }
    }

    #[test]
    fn a_byte_belongs_to_the_block_whose_guard_it_is_in() {
        let mut table = Table::default();
        for number in [0, 1] {
            table.insert(record(number * 4096, 100, number));
        }
        let first = table
            .blocks
            .get(&32)
            .map(|record| record.outer.taken())
            .unwrap();
        let number = |offset| table.around(offset).map(|record| record.number);
        assert_eq!(number(0), Some(0), "before it");
        assert_eq!(number(50), Some(0));
        assert_eq!(number(first - 1), Some(0), "after it");
        assert_eq!(number(first), None);
        assert_eq!(number(4096), Some(1), "before the second");
    }

    #[test]
    fn what_is_live_comes_by_age_whatever_lies_first() {
        let mut table = Table::default();
        let mut offsets = Vec::new();
        for offset in [8192, 0, 4096] {
            let number = table.number();
            let record = record(offset, 10, number);
            offsets.push(record.offset);
            table.insert(record);
        }
        let record = table.take(offsets[1], RecordState::Live).unwrap();
        table.quarantine(record);
        let live: Vec<u64> = table.live().iter().map(|record| record.offset).collect();
        assert_eq!(live, [offsets[0], offsets[2]]);
    }
}
