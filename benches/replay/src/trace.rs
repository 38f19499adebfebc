//! A trace: the allocations and frees of a log in its order, and the counts of its other lines.

use std::collections::HashMap;

use serde::Serialize;

use super::read::Why;

/// An allocation, or the free of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Which allocation of the trace it is about, counted from 0.
    pub block: u32,
    /// A number that no other block has while this one lives; freed numbers come again.
    pub slot: u32,
    /// Which thread of the log did it, counted from 0.
    pub thread: u32,
    /// Whether it frees.
    pub frees: bool,
    /// The block's size in bytes, at least 1.
    pub size: u64,
}

/// The allocations and frees to replay.
#[derive(Debug, Default, PartialEq)]
pub struct Trace {
    /// In the log's order.
    pub events: Vec<Event>,
    /// When each event was, in microseconds from the first; empty if the log does not tell.
    pub times: Vec<u64>,
    /// The threads' names.
    pub threads: Vec<String>,
    /// How many slots there are.
    pub slots: u32,
    /// The most bytes that live at once.
    pub peak: u64,
    /// The event after which they do, counted from 0.
    pub peak_event: usize,
    /// The most blocks that live at once.
    pub peak_blocks: u32,
    /// The counts of lines by how they were read.
    pub notes: Notes,
}

/// The counts of a log's lines (or entries) by how they were read, and the log's irregularities.
///
/// Each line is counted in exactly one of the fields before `implied_frees`, so they add up to `lines`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Notes {
    /// Lines of a file, entries of a snapshot.
    pub lines: u64,
    /// Allocations that are replayed.
    pub allocations: u64,
    /// Frees that are replayed.
    pub frees: u64,
    /// Headers, also those in the middle of logs that were put together.
    pub headers: u64,
    /// Lines with nothing on them.
    pub blank: u64,
    /// Allocations that had failed.
    pub failures: u64,
    /// Allocations of no bytes, and frees of them or of null.
    pub empty: u64,
    /// Frees of blocks that were allocated before the log began, or freed twice.
    pub unknown_frees: u64,
    /// Entries that are not about blocks: of a caching allocator's segments, and snapshots.
    pub others: u64,
    /// Entries of devices that are not replayed.
    pub other_devices: u64,
    /// Lines that could not be read, where that was allowed.
    pub bad: u64,

    /// Blocks freed because their address was given out again; the log lacks their frees.
    pub implied_frees: u64,
    /// Frees that tell another size than their allocation.
    pub other_sizes: u64,
    /// Blocks that live at the end.
    pub never_freed: u64,
    /// Times before the line's before it, by less than half a day.
    pub times_back: u64,
}

/// A line of a log, with the fields that all formats have.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// The thread that did it.
    pub thread: &'a str,
    /// When: microseconds from any moment, or from midnight.
    pub time: Option<u64>,
    /// The address.
    pub pointer: u64,
    /// The size in bytes.
    pub size: u64,
}

/// Puts a trace together line by line.
#[derive(Debug, Default)]
pub struct Builder {
    trace: Trace,
    /// By address.
    live: HashMap<u64, Live>,
    threads: HashMap<String, u32>,
    free_slots: Vec<u32>,
    blocks: u32,
    bytes: u64,
    untimed: bool,
    clock: Clock,
}

#[derive(Clone, Copy, Debug)]
enum Live {
    Block {
        block: u32,
        slot: u32,
        size: u64,
    },
    /// Of no bytes.
    Empty,
}

impl Builder {
    /// Returns the counts of lines, to add to.
    pub fn notes(&mut self) -> &mut Notes {
        &mut self.trace.notes
    }

    /// An allocation.
    ///
    /// # Errors
    /// If it cannot have happened.
    pub fn allocate(&mut self, line: &Line) -> Result<(), Why> {
        if line.size > MOST {
            return Err(Why::TooLarge(line.size));
        }
        if line.size == 0 {
            if line.pointer != 0 {
                self.free_again(line);
                self.live.insert(line.pointer, Live::Empty);
            }
            self.trace.notes.empty += 1;
            return Ok(());
        }
        if line.pointer == 0 {
            return Err(Why::Null);
        }
        let block = self.blocks;
        self.blocks = block.checked_add(1).ok_or(Why::TooMany)?;
        self.free_again(line);
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.trace.slots += 1;
            self.trace.slots - 1
        });
        let size = line.size;
        self.live
            .insert(line.pointer, Live::Block { block, slot, size });
        self.trace.notes.allocations += 1;
        self.push(line, block, slot, size, false);
        Ok(())
    }

    /// A free. Frees of unknown blocks are counted and not replayed.
    pub fn free(&mut self, line: &Line) {
        if line.pointer == 0 {
            self.trace.notes.empty += 1;
            return;
        }
        match self.live.remove(&line.pointer) {
            None => self.trace.notes.unknown_frees += 1,
            Some(Live::Empty) => self.trace.notes.empty += 1,
            Some(Live::Block { block, slot, size }) => {
                self.trace.notes.frees += 1;
                self.trace.notes.other_sizes += u64::from(line.size != size);
                self.push(line, block, slot, size, true);
                self.free_slots.push(slot);
            }
        }
    }

    /// The trace.
    pub fn finish(mut self) -> Trace {
        let blocks = self.live.values();
        let never_freed = blocks.filter(|live| matches!(live, Live::Block { .. }));
        self.trace.notes.never_freed = never_freed.count() as u64;
        self.trace.notes.times_back = self.clock.back;
        if self.untimed {
            self.trace.times.clear();
        }
        let first = self.trace.times.first().copied().unwrap_or(0);
        for time in &mut self.trace.times {
            *time -= first;
        }
        self.trace
    }

    /// Frees the live block at the line's address, if there is one: it must have been freed since.
    fn free_again(&mut self, line: &Line) {
        if let Some(Live::Block { block, slot, size }) = self.live.remove(&line.pointer) {
            self.trace.notes.implied_frees += 1;
            self.push(line, block, slot, size, true);
            self.free_slots.push(slot);
        }
    }

    fn push(&mut self, line: &Line, block: u32, slot: u32, size: u64, frees: bool) {
        let thread = match self.threads.get(line.thread) {
            Some(&thread) => thread,
            None => {
                let thread = self.trace.threads.len() as u32;
                self.trace.threads.push(line.thread.to_owned());
                self.threads.insert(line.thread.to_owned(), thread);
                thread
            }
        };
        match line.time {
            Some(time) => self.trace.times.push(self.clock.after(time)),
            None => self.untimed = true,
        }
        self.trace.events.push(Event {
            block,
            slot,
            thread,
            frees,
            size,
        });
        // A log can claim any sizes; then only the peak overflows, and no allocator has that much.
        self.bytes = match frees {
            true => self.bytes.saturating_sub(size),
            false => self.bytes.saturating_add(size),
        };
        if self.bytes > self.trace.peak {
            self.trace.peak = self.bytes;
            self.trace.peak_event = self.trace.events.len() - 1;
        }
        // Slots in use; at a free the slot is given back only after this.
        let blocks = self.trace.slots - self.free_slots.len() as u32;
        self.trace.peak_blocks = self.trace.peak_blocks.max(blocks);
    }
}

/// The size of the largest block: a `Layout` can hold it at any alignment up to 1 GiB.
const MOST: u64 = isize::MAX as u64 - (1 << 30);

/// Makes a time of day monotonic across midnight.
#[derive(Debug, Default)]
struct Clock {
    days: u64,
    latest: u64,
    back: u64,
}

const DAY: u64 = 24 * 60 * 60 * 1_000_000;

impl Clock {
    fn after(&mut self, time: u64) -> u64 {
        let mut now = time.saturating_add(self.days);
        if now.saturating_add(DAY / 2) < self.latest && time < DAY {
            self.days += DAY;
            now += DAY;
        }
        self.back += u64::from(now < self.latest);
        self.latest = self.latest.max(now);
        self.latest
    }
}

impl Notes {
    /// The lines that became something, and those that were left out: all, if nothing was lost.
    #[cfg(test)]
    pub fn accounted(&self) -> u64 {
        self.allocations
            + self.frees
            + self.headers
            + self.blank
            + self.failures
            + self.empty
            + self.unknown_frees
            + self.others
            + self.other_devices
            + self.bad
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(pointer: u64, size: u64) -> Line<'static> {
        Line {
            thread: "1",
            time: None,
            pointer,
            size,
        }
    }

    fn frees(trace: &Trace) -> Vec<(u32, bool)> {
        let events = trace.events.iter();
        events.map(|event| (event.block, event.frees)).collect()
    }

    #[test]
    fn an_address_that_comes_again_means_a_free_that_was_not_logged() {
        let mut builder = Builder::default();
        builder.allocate(&line(16, 100)).unwrap();
        builder.allocate(&line(16, 50)).unwrap();
        builder.free(&line(16, 50));
        builder.free(&line(16, 50));
        let trace = builder.finish();
        assert_eq!(
            frees(&trace),
            [(0, false), (0, true), (1, false), (1, true)]
        );
        assert_eq!(trace.notes.implied_frees, 1);
        assert_eq!(trace.notes.unknown_frees, 1);
        assert_eq!((trace.peak, trace.peak_event), (100, 0));
        assert_eq!((trace.slots, trace.peak_blocks), (1, 1));
    }

    #[test]
    fn nothing_is_no_block() {
        let mut builder = Builder::default();
        builder.allocate(&line(0, 0)).unwrap();
        builder.free(&line(0, 0));
        builder.allocate(&line(32, 0)).unwrap();
        builder.free(&line(32, 0));
        assert_eq!(builder.allocate(&line(0, 1)), Err(Why::Null));
        assert_eq!(
            builder.allocate(&line(8, u64::MAX)),
            Err(Why::TooLarge(u64::MAX))
        );
        let trace = builder.finish();
        assert!(trace.events.is_empty());
        assert_eq!(trace.notes.empty, 4);
    }

    #[test]
    fn a_free_may_tell_another_size() {
        let mut builder = Builder::default();
        builder.allocate(&line(16, 100)).unwrap();
        builder.free(&line(16, 99));
        builder.allocate(&line(16, 7)).unwrap();
        let trace = builder.finish();
        assert_eq!(trace.notes.other_sizes, 1);
        assert_eq!(trace.notes.never_freed, 1);
        assert_eq!(trace.events[1].size, 100);
    }

    #[test]
    fn times_go_on_after_midnight_and_never_back() {
        let mut clock = Clock::default();
        let hour = DAY / 24;
        let times = [23 * hour, 22 * hour, hour, 23 * hour, 2 * hour].map(|time| clock.after(time));
        assert_eq!(times, [23, 23, 25, 47, 50].map(|hours| hours * hour));
        assert_eq!(clock.back, 1);
        assert_eq!(clock.after(u64::MAX), u64::MAX);
    }
}
