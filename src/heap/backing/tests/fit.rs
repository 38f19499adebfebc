//! Compares where growth goes with a search of every place.

use std::ops::Range;

use proptest::prelude::*;

use crate::backing::shape::*;
use crate::{Error, Result};

const SHAPE: Shape = Shape {
    base: 0x100,
    unit: 2,
    chunk: 8,
    limit: 64,
    joins: true,
    max_range: 1 << 40,
};

fn places(gaps: &[Range<u64>], bytes: u64, (before, after): (u64, u64)) -> Result<Option<Fill>> {
    let want = Want::Block {
        bytes,
        alignment: 1,
        with_free: &|gap| gap.start - before..gap.end + after,
    };
    SHAPE.place(gaps, want)
}

fn fill(start: u64, need: u64, end: u64) -> Fill {
    Fill { start, need, end }
}

#[test]
fn the_end_grows_by_what_is_missing_in_whole_chunks() {
    let grown = |bytes, before| places(&[16..64], bytes, (before, 0)).unwrap();
    assert_eq!(grown(5, 0), Some(fill(16, 22, 24)));
    assert_eq!(grown(5, 4), Some(fill(16, 18, 24)));
    assert_eq!(grown(20, 3), Some(fill(16, 34, 40)));
    assert_eq!(grown(48, 0), Some(fill(16, 64, 64)));
    assert_eq!(grown(5, 5), None);
    let none = (0, 0);
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
    let with_after = |after| (0, after);
    assert_eq!(
        places(&gaps, 4, with_after(0)).unwrap(),
        Some(fill(8, 12, 12))
    );
    // Too large for the hole alone.
    assert_eq!(
        places(&gaps, 5, with_after(0)).unwrap(),
        Some(fill(16, 22, 24))
    );
    let found = |bytes| places(&gaps[..1], bytes, with_after(2)).unwrap();
    assert_eq!(found(5), Some(fill(8, 12, 12)));
    // The hole's upper half suffices.
    assert_eq!(found(4), Some(fill(10, 12, 12)));
}

#[test]
fn what_alignment_skips_is_not_backed() {
    let want = |alignment| Want::Block {
        bytes: 4,
        alignment,
        with_free: &|gap| gap.clone(),
    };
    let first = |alignment| SHAPE.place(&[2..64], want(alignment));
    assert_eq!(first(32), Ok(Some(fill(32, 36, 40))));
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
        with_free: &|gap| gap.start - 8..gap.end + 8,
    };
    let first = |bytes| shape.place(&[10..16, 22..64], want(bytes)).unwrap();
    assert_eq!(first(3), Some(fill(12, 16, 16)));
    assert_eq!(first(5), Some(fill(24, 30, 32)));
    assert_eq!(first(9), Some(fill(24, 34, 34)));
}

#[test]
fn more_fills_the_lowest_hole() {
    let first = |bytes| SHAPE.place(&[2..6, 10..30], Want::More { bytes });
    assert_eq!(first(1), Ok(Some(fill(2, 4, 6))));
    assert_eq!(first(9), Ok(Some(fill(2, 6, 6))));
    assert!(SHAPE.place(&[], Want::More { bytes: 1 }).is_err());
}

proptest! {
    /// Compares with a search of every place for the block.
    #[test]
    fn the_place_that_needs_least_is_found(
        map in proptest::collection::vec(0..3_u8, 1..24),
        bytes in 1_u64..24,
        shift in 0_u32..5,
        max_range in 1_u64..25,
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
        let beside = |gap: &Range<u64>| {
            let before = (0..gap.start).rev()
                .take_while(|&o| at(o) == 2 && (o + 1 == gap.start || !(o + 1).is_multiple_of(max_range)))
                .count() as u64;
            let after = (gap.end..limit)
                .take_while(|&o| at(o) == 2 && (o == gap.end || !o.is_multiple_of(max_range)))
                .count() as u64;
            gap.start - before..gap.end + after
        };
        let alignment = 1 << shift;
        let want = Want::Block { bytes, alignment, with_free: &beside };
        let found = shape.place(&gaps, want);

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
            Ok(Some(fill)) => {
                let needs = choices.iter().map(|choice| choice.1).filter(|&new| new > 0);
                prop_assert_eq!(fill.needed(), needs.min().unwrap() * 2);
                prop_assert!(fill.start < fill.need && fill.need <= fill.end);
                prop_assert!((fill.start..fill.end).all(|o| at(o) == 0));
                prop_assert!((fill.end - fill.start) < fill.needed() + SHAPE.chunk);
                let chunk = shape.before_range_limit(fill.start, fill.end - fill.start);
                prop_assert!((fill.start..fill.start + chunk - 1).all(|o| !(o + 1).is_multiple_of(max_range)));
            }
            Ok(None) => prop_assert!(choices.iter().any(|choice| choice.1 == 0)),
            Err(_) => prop_assert!(choices.iter().all(|choice| choice.1 == 0), "{choices:?}"),
        }
    }
}
