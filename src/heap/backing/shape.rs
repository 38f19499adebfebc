//! Decides where growth goes: pure arithmetic on offsets.

use std::ops::Range;

use crate::error::NoRoom;
use crate::{Error, Result};

/// The purpose for which a heap needs memory.
#[derive(Clone, Copy)]
pub(crate) enum Want<'a> {
    /// Room for one block: contiguous, together with the free bytes beside the new memory.
    Block {
        /// The block's bytes: at least 1.
        bytes: u64,
        /// The alignment of its address: a power of two. Up to 2 MiB, it is the alignment of the
        /// offset too.
        alignment: u64,
        /// Returns a gap with the free bytes on both sides. Called while the caller holds only the growth lock; other
        /// threads may take the free bytes meanwhile, and then the caller calls again.
        with_free: &'a dyn Fn(&Range<u64>) -> Range<u64>,
    },
    /// Room for a block to grow in place: the memory behind it ends, with no bytes or free bytes in between.
    Behind {
        /// The block's offset.
        start: u64,
        /// The end of the memory behind the block.
        memory_end: u64,
        /// The end that the block needs: beyond `memory_end`.
        end: u64,
    },
    /// More bytes at the lowest place: fewer if they end before other memory.
    More {
        /// The number of bytes: at least 1.
        bytes: u64,
    },
}

impl Want<'_> {
    pub(super) const fn bytes(&self) -> u64 {
        match *self {
            Self::Block { bytes, .. } | Self::More { bytes } => bytes,
            Self::Behind {
                memory_end, end, ..
            } => end.saturating_sub(memory_end),
        }
    }

    /// Returns [`Error::HeapFull`]. The caller adds the heap's free bytes.
    pub(super) const fn refused(&self, why: NoRoom, limit: u64) -> Error {
        let align = match *self {
            Self::Block { alignment, .. } => alignment,
            Self::More { .. } | Self::Behind { .. } => 1,
        };
        Error::HeapFull {
            requested: self.bytes(),
            align,
            guards: 0,
            why,
            limit,
            used: 0,
            free: 0,
            largest_free: 0,
        }
    }
}

/// A gap to fill with chunks, from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fill {
    pub start: u64,
    /// The end of the bytes needed.
    pub need: u64,
    /// Where to stop if memory is plentiful: at whole chunks.
    pub end: u64,
}

impl Fill {
    pub(super) const fn needed(&self) -> u64 {
        self.need - self.start
    }
}

/// The properties of a heap that decide where growth goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// The address of offset 0: a multiple of `unit`.
    pub base: u64,
    /// All offsets and sizes of chunks are multiples of this: 2 MiB, or the driver's granularity if larger.
    pub unit: u64,
    pub chunk: u64,
    pub limit: u64,
    /// Whether blocks may lie in several chunks.
    pub joins: bool,
    /// No block in several chunks crosses a multiple of this; none is larger.
    pub max_range: u64,
}

impl Shape {
    /// Returns what to fill of the `gaps`, which are all ranges without memory, ascending, for `want`; `None` if there is
    /// room without growth. A block and more memory have at least 1 byte, and a block's alignment is a power of two.
    ///
    /// In a heap whose chunks join, a block goes to the place that needs the least memory, the lowest of several.
    pub(super) fn place(self, gaps: &[Range<u64>], want: Want<'_>) -> Result<Option<Fill>> {
        let fill = match want {
            Want::Block {
                bytes,
                alignment,
                with_free,
            } if self.joins => self.joined(gaps, (bytes, alignment), with_free),
            Want::Block {
                bytes, alignment, ..
            } => self.single(gaps, bytes, alignment).map(Some),
            Want::Behind {
                start,
                memory_end,
                end,
            } => self.behind(gaps, start, memory_end..end).map(Some),
            Want::More { bytes } => gaps.first().and_then(|gap| {
                let bytes = round_up(bytes, self.unit)?.min(gap.end - gap.start);
                Some(Some(self.fill(gap.start, gap.start + bytes, gap.end)))
            }),
        };
        fill.ok_or_else(|| want.refused(NoRoom::Limit, self.limit))
    }

    /// Returns `None` if there is no place, and `Some(None)` if there is room without growth.
    fn joined(
        self,
        gaps: &[Range<u64>],
        (bytes, alignment): (u64, u64),
        with_free: &dyn Fn(&Range<u64>) -> Range<u64>,
    ) -> Option<Option<Fill>> {
        debug_assert!(bytes > 0 && alignment.is_power_of_two());
        let mut best: Option<Fill> = None;
        for gap in gaps {
            let room = with_free(gap);
            let lowest = self.lowest(&room, bytes, alignment);
            let highest = self.highest(&room, bytes, alignment);
            for block in lowest.into_iter().chain(highest) {
                if block.end <= gap.start || block.start >= gap.end {
                    return Some(None);
                }
                let start = gap.start.max(block.start / self.unit * self.unit);
                let need = gap.end.min(round_up(block.end, self.unit)?);
                let fill = self.fill(start, need, gap.end);
                if best.is_none_or(|best| fill.needed() < best.needed()) {
                    best = Some(fill);
                }
            }
        }
        best.map(Some)
    }

    /// Finds a place for one chunk, so that the block can be shared as a part of one handle.
    pub(super) fn single(self, gaps: &[Range<u64>], bytes: u64, alignment: u64) -> Option<Fill> {
        let needed = round_up(bytes, self.unit)?;
        gaps.iter().find_map(|gap| {
            let block = self.lowest(gap, needed, alignment.max(self.unit))?;
            let wished = block.start.saturating_add(needed.max(self.chunk));
            Some(Fill {
                start: block.start,
                need: block.end,
                end: gap.end.min(wished),
            })
        })
    }

    /// Returns the beginning of the gap at `wanted.start`, for the block that begins at `start`.
    fn behind(self, gaps: &[Range<u64>], start: u64, wanted: Range<u64>) -> Option<Fill> {
        if !self.joins || wanted.is_empty() || self.range_limit_in(start..wanted.end).is_some() {
            return None;
        }
        let gap = gaps.iter().find(|gap| gap.start == wanted.start)?;
        let need = round_up(wanted.end, self.unit)?;
        (need <= gap.end).then(|| self.fill(gap.start, need, gap.end))
    }

    /// Returns the range from `start` to `need`, and to the end of its last chunk if `most` allows that.
    fn fill(self, start: u64, need: u64, most: u64) -> Fill {
        let whole = (need - start).checked_next_multiple_of(self.chunk);
        let end = whole.and_then(|bytes| start.checked_add(bytes));
        let end = end.map_or(most, |end| end.min(most));
        Fill { start, need, end }
    }

    /// Returns the lowest place for a block in `room`.
    fn lowest(self, room: &Range<u64>, bytes: u64, alignment: u64) -> Option<Range<u64>> {
        let mut from = room.start;
        loop {
            let at = round_up(self.base.checked_add(from)?, alignment)? - self.base;
            let end = at.checked_add(bytes).filter(|&end| end <= room.end)?;
            match self.range_limit_in(at..end) {
                Some(range_limit) => from = range_limit,
                None => return Some(at..end),
            }
        }
    }

    /// Returns the highest place for a block in `room`.
    fn highest(self, room: &Range<u64>, bytes: u64, alignment: u64) -> Option<Range<u64>> {
        let mut to = room.end;
        loop {
            let last = self.base.checked_add(to.checked_sub(bytes)?)?;
            let at = (last / alignment * alignment).checked_sub(self.base)?;
            if at < room.start {
                return None;
            }
            match self.range_limit_in(at..at + bytes) {
                Some(range_limit) => to = range_limit,
                None => return Some(at..at + bytes),
            }
        }
    }

    /// Returns how many of `bytes` from `at` on, in whole units, lie before the next range limit: a chunk
    /// across a range limit could not be trimmed.
    pub(super) fn before_range_limit(self, at: u64, bytes: u64) -> u64 {
        let Some(range_limit) = self.range_limit_in(at..at + bytes) else {
            return bytes;
        };
        let range_limit = range_limit / self.unit * self.unit;
        if range_limit > at {
            range_limit - at
        } else {
            bytes.min(self.unit)
        }
    }

    /// Returns the first range limit between two bytes of `range` that blocks may not cross.
    fn range_limit_in(self, range: Range<u64>) -> Option<u64> {
        if !self.joins {
            return None;
        }
        let range_limit = (range.start / self.max_range)
            .checked_add(1)?
            .checked_mul(self.max_range)?;
        (range_limit < range.end).then_some(range_limit)
    }
}

fn round_up(bytes: u64, unit: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(unit)
}
