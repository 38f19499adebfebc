//! The table of live and quarantined blocks, and where each was allocated and freed. It is pure: it accesses no memory of the
//! heap.

use std::backtrace::Backtrace;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use crate::debug::BlockInfo;
use crate::error::Site;
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

/// A recorded site; it is formatted only when a report needs it.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    /// The line of the program.
    pub(super) place: Option<&'static Location<'static>>,
    /// Whether the line belongs to a collection, not to the program.
    pub(super) in_collection: bool,
    thread: Arc<str>,
    backtrace: Option<Arc<Backtrace>>,
}

impl Origin {
    /// Returns the calling thread's site, now.
    pub(super) fn here(place: Option<&'static Location<'static>>, backtrace: bool) -> Self {
        thread_local! {
            static NAME: Arc<str> = {
                let thread = std::thread::current();
                match thread.name() {
                    Some(name) => name.into(),
                    None => format!("{:?}", thread.id()).into(),
                }
            };
        }
        // Threads free blocks also at their very end.
        let thread = NAME.try_with(Arc::clone);
        Self {
            place,
            in_collection: false,
            thread: thread.unwrap_or_else(|_| "that has ended".into()),
            // Not in a closure: its caller's frame would lie between this library's. See `program_part`.
            backtrace: if backtrace {
                Some(Arc::new(Backtrace::force_capture()))
            } else {
                None
            },
        }
    }

    pub(super) fn site(&self) -> Site {
        let backtrace = self.backtrace.as_ref();
        Site {
            place: self.place.map(ToString::to_string),
            in_collection: self.in_collection,
            thread: self.thread.to_string(),
            backtrace: backtrace.map(|all| program_part(&all.to_string())),
        }
    }
}

/// Returns the frames between this library's own, with which a backtrace begins, and those that started the
/// thread; all frames if there are none in between.
fn program_part(backtrace: &str) -> String {
    let lines: Vec<&str> = backtrace.lines().collect();
    // A frame's first line is `  12: alloc::vec::Vec<T>::push`; the others are places.
    let frames = lines.iter().enumerate().filter_map(|(at, line)| {
        let (number, name) = line.split_once(": ")?;
        number.trim_start().parse::<u32>().ok()?;
        Some((at, name))
    });
    // The frames that take a backtrace come before this library's first.
    let mut frames = frames.skip_while(|(_, name)| !is_ours(name));
    let starts = |name: &str| name.contains("__rust_begin_short_backtrace");
    match frames.find(|(_, name)| !is_ours(name)) {
        Some((first, name)) if !starts(name) => {
            let end = frames.find(|(_, name)| starts(name));
            let end = end.map_or(lines.len(), |(at, _)| at);
            lines[first..end].join("\n") + "\n"
        }
        _ => backtrace.into(),
    }
}

fn is_ours(name: &str) -> bool {
    let name = name.trim_start_matches(['<', '&']);
    let crates = ["egmem::", "egmem_heap::", "egmem_core::"];
    crates.iter().any(|ours| name.starts_with(ours))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debug::record::program_part;
    use crate::ranges::{Core, Extent, RangeId};
    use proptest::prelude::*;

    fn record(offset: u64, bytes: u64, number: u64) -> Record {
        let fit = Fit::of(bytes, 1, 32);
        Record {
            outer: Piece::range(
                Extent::new(
                    offset,
                    RangeId::from_number(0),
                    Core::range_granules(fit.bytes) as u32,
                ),
                fit.bytes,
            ),
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

    const OURS: &str = "   0: <std::backtrace::Backtrace>::create
   1: egmem_heap::debug::site::Origin::here
             at ./src/heap/debug/site.rs:50:46
   2: <&egmem_heap::heap::Heap as allocator_api2::Allocator>::allocate
";
    const BEGINS: &str = "  99: std::sys::backtrace::__rust_begin_short_backtrace::<f, ()>
             at /rustc/library/std/src/sys/backtrace.rs:166:18
 100: main
";

    #[test]
    fn the_programs_frames_are_left() {
        let theirs = "   3: theirs::push
             at ./src/main.rs:10:5
   4: egmem_heap::heap::Heap::called_back
";
        for end in [BEGINS, ""] {
            assert_eq!(program_part(&format!("{OURS}{theirs}{end}")), theirs);
        }
    }

    #[test]
    fn where_nothing_would_be_left_all_is() {
        for text in [
            "disabled backtrace",
            "",
            "   0: <unknown>\n",
            OURS,
            &format!("{OURS}{}", BEGINS.replace("99", " 3").replace("100", "  4")),
        ] {
            assert_eq!(program_part(text), text);
        }
    }
}
