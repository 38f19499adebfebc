//! Where ranges and slabs lie.

use super::*;
use crate::classes::MAX_SMALL;

#[test]
fn all_memory_is_one_range_again_when_all_is_free() {
    let mut core = Core::new(0, LIMIT).unwrap();
    for chunk in [3, 1, 0, 2] {
        core.add(chunk * CHUNK..(chunk + 1) * CHUNK, true);
    }
    let blocks: Vec<Extent> = std::iter::from_fn(|| core.allocate(9000, 1)).collect();
    assert!(blocks.len() as u64 >= 4 * CHUNK / 9216 - 1);
    assert!(core.ranges.largest_free() < 9216);
    core.free_all(&blocks);
    assert_eq!(core.ranges.largest_free(), 4 * CHUNK);
    assert_eq!(core.all_ranges().count(), 1);
}

#[test]
fn a_range_between_range_limits_is_as_long_as_can_be() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..MAX_RANGE + 3 * CHUNK, true);
    assert_eq!(core.ranges.total(), MAX_RANGE + 3 * CHUNK);
    assert_eq!(core.ranges.largest_free(), MAX_RANGE);
    assert!(core.allocate(MAX_RANGE + 1, 1).is_none());
    let all = core.allocate(MAX_RANGE, 1).unwrap();
    core.add(MAX_RANGE + 3 * CHUNK..MAX_RANGE + 4 * CHUNK, true);
    assert_eq!(core.ranges.largest_free(), 4 * CHUNK);
    core.free(all.node());
    core.ranges.check(true);
}

/// Growth relies on this.
#[test]
fn where_memory_ends_one_span_does_not_depend_on_what_came_first() {
    let parts = [(0, 2), (2, 3), (3, 5)]
        .map(|(from, to)| MAX_RANGE - 2 * CHUNK + from * CHUNK..MAX_RANGE - 2 * CHUNK + to * CHUNK);
    for order in [[0, 1, 2], [1, 0, 2], [2, 1, 0], [1, 2, 0]] {
        let mut core = Core::new(0, LIMIT).unwrap();
        for part in order {
            core.add(parts[part].clone(), true);
        }
        assert_eq!(core.all_ranges().count(), 2, "{order:?}");
        assert_eq!(core.ranges.largest_free(), 3 * CHUNK, "{order:?}");
        assert_eq!(core.ranges.free_before(MAX_RANGE), 2 * CHUNK);
        assert_eq!(core.ranges.free_after(MAX_RANGE), 3 * CHUNK);
        core.ranges.check(true);
        for part in parts.clone() {
            assert!(core.remove(part));
        }
        assert_eq!(core.ranges.total(), 0);
    }
}

#[test]
fn a_range_takes_what_is_free_behind_it_to_the_last_granule() {
    let mut core = Core::new(0, CHUNK).unwrap();
    core.add(0..CHUNK, true);
    let block = core.allocate(9000, 1).unwrap();
    let wall = core.allocate(CHUNK / 2, 1).unwrap();
    assert!(core.extend(block.node(), 9216));
    assert!(!core.extend(block.node(), 9217), "the next range is in use");
    core.free(wall.node());
    assert!(!core.extend(block.node(), CHUNK + 1), "memory ends");
    assert!(core.extend(block.node(), CHUNK));
    assert_eq!(
        (core.ranges.free_bytes(), core.all_ranges().count()),
        (0, 1)
    );
    core.shrink(block.node(), 1);
    assert_eq!(core.ranges.largest_free(), CHUNK - PAGE);
    core.ranges.check(true);
}

#[test]
fn what_lies_at_a_growable_end_is_taken_last() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..4 * CHUNK, true);
    let hole = core.allocate(2 * CHUNK, 1).unwrap();
    let wall = core.allocate(CHUNK, 1).unwrap();
    core.free(hole.node());
    // The chunk at the growable end would be the better fit.
    let block = core.allocate(CHUNK / 2, 1).unwrap();
    assert_eq!(block.offset, hole.offset);
    core.free(block.node());
    // The growable end moves behind memory that is added, and in front of memory that is removed.
    core.add(4 * CHUNK..8 * CHUNK, true);
    let all = core.allocate(5 * CHUNK, 1).unwrap();
    assert_eq!(all.offset, 3 * CHUNK);
    core.free(all.node());
    assert!(core.remove(4 * CHUNK..8 * CHUNK));
    let block = core.allocate(CHUNK / 2, 1).unwrap();
    assert_eq!(block.offset, hole.offset);
    core.free(wall.node());
    core.free(block.node());
    core.ranges.check(true);
}

#[test]
fn of_two_parts_beside_removed_memory_the_one_behind_it_is_taken_first() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..3 * CHUNK, true);
    assert!(core.remove(CHUNK..2 * CHUNK));
    assert_eq!(core.allocate(CHUNK, 1).unwrap().offset, 2 * CHUNK);
    assert_eq!(core.allocate(CHUNK, 1).unwrap().offset, 0);
}

#[test]
fn near_full_the_search_is_exact() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..64 << 20, true);
    // Holes in one bin: the one that fits is deep in the list.
    let mut holes = Vec::new();
    let mut walls = Vec::new();
    for hole in 0..30_u64 {
        let granules = if hole == 0 { 1055 } else { 1040 };
        holes.push(core.allocate(granules * GRANULE, 1).unwrap());
        walls.push(core.allocate(8192, 1).unwrap());
    }
    while core.allocate(8192, 1).is_some() {}
    core.free_all(&holes);
    let mut allocate = || core.exhaustively(|core| core.allocate(1050 * GRANULE, 1));
    assert_eq!(allocate().unwrap().offset, holes[0].offset);
    assert_eq!(allocate(), None);
}

#[test]
fn small_blocks_use_every_hole_to_the_last_page() {
    // Only one in four of the holes of the second size contains a page.
    for (class, hole) in Class::all().flat_map(|class| [(class, 3 * PAGE), (class, 2304)]) {
        let mut core = Core::new(0, LIMIT).unwrap();
        core.add(0..CHUNK, true);
        // So many that the next slab would be large.
        let slab = class.slabs(u64::MAX).next().unwrap();
        let mut out = vec![0; 4 * slab as usize];
        assert_eq!(core.fill(&OwnStripe::default(), class, &mut out), out.len());
        let holes: Vec<Extent> = std::iter::from_fn(|| core.allocate(hole, 1)).collect();
        for pair in holes.chunks(2) {
            core.free(pair[0].node());
        }
        let pages = |core: &Core| {
            let holes = core
                .all_ranges()
                .filter(|(hole, used)| !used && has_page(hole));
            holes.count()
        };
        assert!(pages(&core) > 40);
        while core.exhaustively(|core| core.fill(&OwnStripe::default(), class, &mut out[..1])) > 0 {
        }
        assert_eq!(pages(&core), 0, "{class:?}");
        core.ranges.check(true);
    }
}

#[test]
fn blocks_that_are_none_are_not_taken_back() {
    let mut core = Core::new(0, LIMIT).unwrap();
    core.add(0..CHUNK, true);
    let class = Class::of(48, 1).unwrap();
    let mut out = [0; 3];
    assert_eq!(core.fill(&OwnStripe::default(), class, &mut out), 3);
    assert_eq!(core.give(&[out[0] + 1], 1), 1);
    assert_eq!(core.give(&[CHUNK + 48], 1), 1);
    assert_eq!(core.give(&[out[1]], 1), 0);
    assert_eq!(core.give(&[out[1]], 1), 1);
    assert_eq!(core.at(out[1]), None);
    assert_eq!(core.at(out[2] + 16), None);
    let block = core.allocate(MAX_SMALL + 1, 1).unwrap();
    assert_eq!(core.give(&[block.offset], 1), 1);
    assert_eq!(core.at(block.offset + GRANULE), None);
}
