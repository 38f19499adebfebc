//! Compares where growth goes with a search of every place.

use std::ops::Range;

use proptest::prelude::*;

use crate::backing::fit::*;
use crate::{Error, Result};

const SHAPE: Shape = Shape {
    base: 0x100,
    unit: 2,
    chunk: 8,
    limit: 64,
    joins: true,
    max_range: 1 << 40,
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
    Fill { start, need, end }
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
        matches!(error, Error::HeapFull { limit: 64, .. }),
        "{error}"
    );
    assert!(places(&[16..64], u64::MAX, none).is_err());
}

#[test]
fn holes_come_first_and_what_is_free_behind_them_counts() {
    let gaps = [8..12, 16..64];
    let with_after = |after| Beside { before: 0, after };
    assert_eq!(
        places(&gaps, 4, with_after(0)).unwrap().first,
        [fill(8, 12, 12)]
    );
    // Too large for the hole alone.
    assert_eq!(
        places(&gaps, 5, with_after(0)).unwrap().first,
        [fill(16, 22, 24)]
    );
    let found = places(&gaps[..1], 5, with_after(2)).unwrap();
    assert_eq!(found.first, [fill(8, 12, 12)]);
    // If memory is short, the hole's upper half suffices.
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
    // No address in the heap is a multiple of 0x80.
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
    assert_eq!(first(3), [fill(12, 16, 16)]);
    assert_eq!(first(5), [fill(24, 30, 32)]);
    assert_eq!(first(9), [fill(24, 34, 34)]);
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

#[test]
fn a_bound_makes_the_last_chunk_smaller_and_refuses_what_is_needed_alone() {
    let more = || {
        SHAPE
            .places(&[2..6, 10..64], Want::More { bytes: 9 })
            .unwrap()
    };
    assert_eq!(more().first, [fill(2, 6, 6), fill(10, 16, 18)]);
    let within = |room| more().within(room).map(|places| places.first);
    assert_eq!(within(12), Some(more().first));
    assert_eq!(within(10), Some(vec![fill(2, 6, 6), fill(10, 16, 16)]));
    assert_eq!(within(8), None);
    // A place that needs less suffices.
    let beside = Beside {
        before: 0,
        after: 2,
    };
    let within = |room| {
        let found = places(&[8..12], 4, beside).unwrap();
        found.within(room).map(|places| places.first)
    };
    assert_eq!(within(4), Some(vec![fill(8, 12, 12)]));
    assert_eq!(within(2), Some(vec![fill(10, 12, 12)]));
    assert_eq!(within(0), None);
}

proptest! {
    /// Compares with a search of every place for the block.
    #[test]
    fn the_lowest_place_is_found_and_the_leanest(
        map in proptest::collection::vec(0..3_u8, 1..24),
        bytes in 1_u64..24,
        shift in 0_u32..5,
        max_range in 1_u64..25,
        room in 0_u64..24,
    ) {
        // Each unit has no memory (0), or is in use (1), or free (2).
        let limit = map.len() as u64 * 2;
        let max_range = max_range * 2;
        let shape = Shape { limit, max_range, ..SHAPE };
        let at = |offset: u64| map[(offset / 2) as usize];
        let mut gaps: Vec<Range<u64>> = Vec::new();
        for unit in (0..limit).step_by(2).filter(|&unit| at(unit) == 0) {
            match gaps.last_mut() {
                Some(gap) if gap.end == unit => gap.end += 2,
                _ => gaps.push(unit..unit + 2),
            }
        }
        // The core's free bytes lie on one side of a range limit.
        let beside = |gap: &Range<u64>| Beside {
            before: (0..gap.start).rev()
                .take_while(|&o| at(o) == 2 && (o + 1 == gap.start || !(o + 1).is_multiple_of(max_range)))
                .count() as u64,
            after: (gap.end..limit)
                .take_while(|&o| at(o) == 2 && (o == gap.end || !o.is_multiple_of(max_range)))
                .count() as u64,
        };
        let alignment = 1 << shift;
        let found = shape.places(&gaps, Want::Block { bytes, alignment, beside: &beside });

        let new_units = |start: u64| {
            let units = start / 2..=(start + bytes - 1) / 2;
            units.filter(|&unit| at(unit * 2) == 0).count() as u64
        };
        // Growth does not look for a block across several gaps.
        let in_one_gap = |start: u64| gaps.iter().filter(|gap| gap.start < start + bytes && start < gap.end).count() < 2;
        let choices: Vec<(u64, u64)> = (0..limit)
            .filter(|start| (SHAPE.base + start).is_multiple_of(alignment) && start + bytes <= limit)
            .filter(|&start| (start..start + bytes).all(|o| at(o) != 1) && in_one_gap(start))
            .filter(|start| start / max_range == (start + bytes - 1) / max_range)
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
                    let chunk = shape.before_range_limit(fill.start, fill.end - fill.start);
                    prop_assert!((fill.start..fill.start + chunk - 1).all(|o| !(o + 1).is_multiple_of(max_range)));
                }
                // With a limited number of bytes.
                let room = room * 2;
                let within = found.within(room);
                prop_assert_eq!(within.is_none(), leanest.needed() > room);
                let (whole, least) = (fill, if fill.needed() > room { leanest } else { fill });
                for fill in within.iter().flat_map(|places| &places.first) {
                    prop_assert_eq!((fill.start, fill.need), (least.start, least.need));
                    let most = if least == whole { whole.end } else { least.need };
                    prop_assert_eq!(fill.end, most.min(fill.start + room));
                }
            }
        }
    }
}
