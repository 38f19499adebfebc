//! Where growth goes: pure arithmetic on offsets.

use std::ops::Range;

use crate::{Error, Result};

/// What a heap needs memory for.
#[derive(Clone, Copy)]
pub(in crate::heap) enum Want<'a> {
    /// Room for one block: contiguous, together with what is free beside the new memory.
    Block {
        /// Its bytes: at least 1.
        bytes: u64,
        /// The alignment of its address: a power of two. Up to that of the plan, it is the alignment
        /// of the offset too.
        alignment: u64,
        /// What is free beside a stretch without memory. Asked while the caller holds nothing but
        /// the growth lock; others may take what is free meanwhile, and then the caller asks once more.
        beside: &'a dyn Fn(&Range<u64>) -> Beside,
    },
    /// So many bytes more, in as many pieces as need be.
    More {
        /// How many: at least 1.
        bytes: u64,
    },
}

/// What is free beside a stretch without memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::heap) struct Beside {
    /// Bytes right before its start.
    pub before: u64,
    /// Bytes right after its end.
    pub after: u64,
}

/// A stretch to fill with chunks, from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fill {
    pub start: u64,
    /// Where what is needed ends.
    pub need: u64,
    /// Where to stop if memory is plentiful: at whole chunks.
    pub end: u64,
    /// Whether what is needed must be one chunk.
    pub single: bool,
}

impl Fill {
    pub(super) const fn needed(&self) -> u64 {
        self.need - self.start
    }
}

/// Where to grow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// The lowest place. Empty where there is room without growth.
    pub first: Vec<Fill>,
    /// The place that takes the least memory, if less than the first.
    pub leanest: Option<Fill>,
}

/// What of the heap decides where growth goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// The address of offset 0: a multiple of `unit`.
    pub base: u64,
    /// What all offsets and sizes of chunks are multiples of: a power of two.
    pub unit: u64,
    pub chunk: u64,
    pub limit: u64,
    /// Whether blocks may lie in several chunks.
    pub joins: bool,
}

impl Shape {
    /// Where to make what is wanted, in the `gaps`: all stretches without memory, rising.
    pub(super) fn places(self, gaps: &[Range<u64>], want: Want<'_>) -> Result<Places> {
        let places = match want {
            Want::Block {
                bytes,
                alignment,
                beside,
            } => {
                check(bytes, alignment)?;
                if self.joins {
                    self.joined(gaps, bytes, alignment, beside)
                } else {
                    self.single(gaps, bytes, alignment)
                }
            }
            Want::More { bytes } => {
                check(bytes, 1)?;
                self.more(gaps, bytes)
            }
        };
        places.ok_or(Error::LimitReached {
            what: "bytes of a heap",
            limit: self.limit,
        })
    }

    fn joined(
        self,
        gaps: &[Range<u64>],
        bytes: u64,
        alignment: u64,
        beside: &dyn Fn(&Range<u64>) -> Beside,
    ) -> Option<Places> {
        let mut first: Option<Fill> = None;
        let mut leanest: Option<Fill> = None;
        for gap in gaps {
            let beside = beside(gap);
            let room =
                gap.start.saturating_sub(beside.before)..gap.end.saturating_add(beside.after);
            for block in [
                self.lowest(&room, bytes, alignment),
                self.highest(&room, bytes, alignment),
            ]
            .into_iter()
            .flatten()
            {
                if block.end <= gap.start || block.start >= gap.end {
                    return Some(Places {
                        first: Vec::new(),
                        leanest: None,
                    });
                }
                let start = gap.start.max(block.start / self.unit * self.unit);
                let need = gap.end.min(round_up(block.end, self.unit)?);
                let fill = Fill {
                    start,
                    need,
                    end: need,
                    single: false,
                };
                if first.is_none() {
                    let end = self.whole_chunks(start, need, gap.end);
                    first = Some(Fill { end, ..fill });
                }
                if leanest.is_none_or(|least| fill.needed() < least.needed()) {
                    leanest = Some(fill);
                }
            }
        }
        let first = first?;
        Some(Places {
            leanest: leanest.filter(|least| least.needed() < first.needed()),
            first: vec![first],
        })
    }

    /// A chunk of its own, so that the block can be shared as a part of one handle.
    fn single(self, gaps: &[Range<u64>], bytes: u64, alignment: u64) -> Option<Places> {
        let needed = round_up(bytes, self.unit)?;
        gaps.iter().find_map(|gap| {
            let block = self.lowest(gap, needed, alignment.max(self.unit))?;
            let wished = block.start.saturating_add(needed.max(self.chunk));
            let fill = Fill {
                start: block.start,
                need: block.end,
                end: gap.end.min(wished),
                single: true,
            };
            Some(Places {
                first: vec![fill],
                leanest: None,
            })
        })
    }

    fn more(self, gaps: &[Range<u64>], bytes: u64) -> Option<Places> {
        let mut left = round_up(bytes, self.unit)?;
        let mut first = Vec::new();
        for gap in gaps {
            let needed = left.min(gap.end - gap.start);
            let need = gap.start + needed;
            first.push(Fill {
                start: gap.start,
                need,
                end: self.whole_chunks(gap.start, need, gap.end),
                single: false,
            });
            left -= needed;
            if left == 0 {
                return Some(Places {
                    first,
                    leanest: None,
                });
            }
        }
        None
    }

    /// `need`, moved on so that whole chunks fill the stretch from `start`, if `most` allows it.
    fn whole_chunks(self, start: u64, need: u64, most: u64) -> u64 {
        let chunks = (need - start).div_ceil(self.chunk);
        let end = chunks
            .checked_mul(self.chunk)
            .and_then(|bytes| start.checked_add(bytes));
        end.map_or(most, |end| end.min(most))
    }

    /// The lowest place for a block in `room`.
    fn lowest(self, room: &Range<u64>, bytes: u64, alignment: u64) -> Option<Range<u64>> {
        let at = round_up(self.base.checked_add(room.start)?, alignment)? - self.base;
        let end = at.checked_add(bytes)?;
        (end <= room.end).then_some(at..end)
    }

    /// The highest place for a block in `room`.
    fn highest(self, room: &Range<u64>, bytes: u64, alignment: u64) -> Option<Range<u64>> {
        let last = self.base.checked_add(room.end.checked_sub(bytes)?)?;
        let at = (last / alignment * alignment).checked_sub(self.base)?;
        (at >= room.start).then(|| at..at + bytes)
    }
}

fn check(bytes: u64, alignment: u64) -> Result<()> {
    if bytes == 0 {
        return Err(Error::invalid("size", "0 bytes cannot be allocated"));
    }
    if !alignment.is_power_of_two() {
        let why = format!("{alignment} is no power of two");
        return Err(Error::invalid("alignment", why));
    }
    Ok(())
}

fn round_up(bytes: u64, unit: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(unit)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: Shape = Shape {
        base: 0x100,
        unit: 2,
        chunk: 8,
        limit: 64,
        joins: true,
    };

    fn places(gaps: &[Range<u64>], bytes: u64, beside: Beside) -> Result<Places> {
        SHAPE.places(
            gaps,
            Want::Block {
                bytes,
                alignment: 1,
                beside: &|_| beside,
            },
        )
    }

    fn fill(start: u64, need: u64, end: u64) -> Fill {
        Fill {
            start,
            need,
            end,
            single: false,
        }
    }

    #[test]
    fn the_end_grows_by_what_is_missing_in_whole_chunks() {
        let grown = |bytes, before| {
            let beside = Beside { before, after: 0 };
            places(&[16..64], bytes, beside).unwrap().first
        };
        assert_eq!(grown(5, 0), [fill(16, 22, 24)]);
        assert_eq!(grown(5, 4), [fill(16, 18, 24)]);
        assert_eq!(grown(20, 3), [fill(16, 34, 40)]);
        assert_eq!(grown(48, 0), [fill(16, 64, 64)]);
        assert_eq!(grown(5, 5), []);
        let none = Beside::default();
        let error = places(&[16..64], 49, none).unwrap_err();
        assert!(
            matches!(error, Error::LimitReached { limit: 64, .. }),
            "{error}"
        );
        assert!(places(&[16..64], u64::MAX, none).is_err());
        assert!(matches!(
            places(&[16..64], 0, none),
            Err(Error::InvalidArgument { .. })
        ));
    }

    #[test]
    fn holes_come_first_and_what_is_free_behind_them_counts() {
        let gaps = [8..12, 16..64];
        let with_after = |after| Beside { before: 0, after };
        assert_eq!(
            places(&gaps, 4, with_after(0)).unwrap().first,
            [fill(8, 12, 12)]
        );
        // Too big for the hole alone.
        assert_eq!(
            places(&gaps, 5, with_after(0)).unwrap().first,
            [fill(16, 22, 24)]
        );
        let found = places(&gaps[..1], 5, with_after(2)).unwrap();
        assert_eq!(found.first, [fill(8, 12, 12)]);
        // Where memory is short, the hole's upper half would do.
        let found = places(&gaps[..1], 4, with_after(2)).unwrap();
        assert_eq!(found.first, [fill(8, 12, 12)]);
        assert_eq!(found.leanest, Some(fill(10, 12, 12)));
    }

    #[test]
    fn what_alignment_skips_is_not_backed() {
        let want = |alignment| Want::Block {
            bytes: 4,
            alignment,
            beside: &|_| Beside::default(),
        };
        let first = |alignment| SHAPE.places(&[2..64], want(alignment)).map(|p| p.first);
        assert_eq!(first(32), Ok(vec![fill(32, 36, 40)]));
        assert!(first(3).is_err());
        // No address in the heap is such a multiple, as 0x100 is.
        assert!(first(0x80).is_err());
    }

    #[test]
    fn a_shareable_block_has_a_chunk_of_its_own() {
        let shape = Shape {
            joins: false,
            ..SHAPE
        };
        let want = |bytes| Want::Block {
            bytes,
            alignment: 4,
            beside: &|_| Beside {
                before: 8,
                after: 8,
            },
        };
        let first = |bytes| shape.places(&[10..16, 22..64], want(bytes)).unwrap().first;
        let single = |start, need, end| Fill {
            single: true,
            ..fill(start, need, end)
        };
        assert_eq!(first(3), [single(12, 16, 16)]);
        assert_eq!(first(5), [single(24, 30, 32)]);
        assert_eq!(first(9), [single(24, 34, 34)]);
    }

    #[test]
    fn more_fills_holes_from_the_lowest_on() {
        let first = |bytes| {
            let found = SHAPE.places(&[2..4, 10..30, 40..64], Want::More { bytes });
            found.map(|found| found.first)
        };
        assert_eq!(first(1), Ok(vec![fill(2, 4, 4)]));
        assert_eq!(first(9), Ok(vec![fill(2, 4, 4), fill(10, 18, 18)]));
        assert_eq!(first(46).unwrap().len(), 3);
        assert!(first(47).is_err());
    }

    proptest! {
        /// Beside a search of every place for the block.
        #[test]
        fn the_lowest_place_is_found_and_the_leanest(
            map in proptest::collection::vec(0..3_u8, 1..24),
            bytes in 1_u64..24,
            shift in 0_u32..5,
        ) {
            // Each unit has no memory (0), or is in use (1), or free (2).
            let limit = map.len() as u64 * 2;
            let shape = Shape { limit, ..SHAPE };
            let at = |offset: u64| map[(offset / 2) as usize];
            let mut gaps: Vec<Range<u64>> = Vec::new();
            for unit in (0..limit).step_by(2).filter(|&unit| at(unit) == 0) {
                match gaps.last_mut() {
                    Some(gap) if gap.end == unit => gap.end += 2,
                    _ => gaps.push(unit..unit + 2),
                }
            }
            let beside = |gap: &Range<u64>| Beside {
                before: (0..gap.start).rev().take_while(|&o| at(o) == 2).count() as u64,
                after: (gap.end..limit).take_while(|&o| at(o) == 2).count() as u64,
            };
            let alignment = 1 << shift;
            let found = shape.places(&gaps, Want::Block { bytes, alignment, beside: &beside });

            let new_units = |start: u64| {
                let units = start / 2..=(start + bytes - 1) / 2;
                units.filter(|&unit| at(unit * 2) == 0).count() as u64
            };
            // A block in several gaps is not looked for.
            let in_one_gap = |start: u64| gaps.iter().filter(|gap| gap.start < start + bytes && start < gap.end).count() < 2;
            let choices: Vec<(u64, u64)> = (0..limit)
                .filter(|start| (SHAPE.base + start) % alignment == 0 && start + bytes <= limit)
                .filter(|&start| (start..start + bytes).all(|o| at(o) != 1) && in_one_gap(start))
                .map(|start| (start, new_units(start)))
                .collect();
            match found {
                Err(_) => prop_assert!(choices.iter().all(|choice| choice.1 == 0), "{choices:?}"),
                Ok(found) if found.first.is_empty() => {
                    prop_assert!(choices.iter().any(|choice| choice.1 == 0));
                }
                Ok(found) => {
                    let fill = found.first[0];
                    let lowest = choices.iter().find(|choice| choice.1 > 0).unwrap();
                    let least = choices.iter().map(|choice| choice.1).filter(|&new| new > 0).min().unwrap();
                    prop_assert_eq!(fill.needed(), lowest.1 * 2);
                    let leanest = found.leanest.unwrap_or(fill);
                    prop_assert_eq!(leanest.needed(), least * 2);
                    for fill in [fill, leanest] {
                        prop_assert!(fill.start < fill.need && fill.need <= fill.end);
                        prop_assert!((fill.start..fill.end).all(|o| at(o) == 0));
                        prop_assert!((fill.end - fill.start) < fill.needed() + SHAPE.chunk);
                    }
                }
            }
        }
    }
}
