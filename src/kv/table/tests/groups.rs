//! Groups of pages of several sizes.

use super::*;

/// Groups take memory from each other in the order of use, and leave what is used.
#[test]
fn groups_share_their_memory() {
    let of_group = |group: u8, numbers: std::ops::Range<u64>| -> Vec<Key> {
        numbers
            .map(|number| world::key(number).in_group(group))
            .collect()
    };
    // 4 extents of 8, 4 or 2 pages.
    let mut world = World::new(Geometry::of_extents(4, 8192, &SIZES).unwrap(), 1);
    world.store_keys(0, &of_group(0, 0..16));
    world.store_keys(0, &of_group(1, 0..8));
    assert_eq!(world.with(0, |table| table.stats().ready), 24);
    world.check();
    // The oldest extent is group 0's first.
    let evicted = world.store_keys(0, &of_group(2, 0..2));
    let gone: Vec<Key> = evicted.iter().map(|gone| gone.key).collect();
    assert_eq!(gone.len(), 8);
    assert!(
        gone.iter().all(|key| of_group(0, 8..16).contains(key)),
        "{gone:?}"
    );
    // Its other one was used since, and group 1's are older.
    world.with(0, |table| table.touch(&of_group(0, 0..8)));
    let evicted = world.store_keys(0, &of_group(2, 2..4));
    assert!(evicted.iter().all(|gone| gone.key.group() == 1) && evicted.len() == 4);
    world.check();
    // What is pinned stays, with its extent.
    let pinned = of_group(1, 0..8)
        .into_iter()
        .find(|key| world.ready().contains(key))
        .unwrap();
    let pages = world.with(0, |table| table.pin(&[pinned]).unwrap());
    let evicted = world.store_keys(0, &of_group(2, 4..8));
    assert!(
        evicted.iter().all(|gone| gone.key.group() != 1),
        "{evicted:?}"
    );
    let full = world
        .with(0, |table| table.reserve(&of_group(2, 20..27)))
        .unwrap_err();
    assert!(matches!(full, Error::Full { needed: 7, .. }), "{full}");
    world.with(0, |table| table.unpin(&pages));
    world.check();
    assert!(
        world
            .with(0, |table| table.reserve(&[world::key(1).in_group(3)]))
            .is_err()
    );
}

/// No page has a name again that it had for an earlier key, not even when other groups had its memory meanwhile.
#[test]
fn names_of_pages_do_not_come_back() {
    let mut world = World::new(Geometry::of_extents(3, 8192, &SIZES).unwrap(), 1);
    let mut seen = std::collections::HashSet::new();
    for round in 0..4 {
        for (group, count) in [(0, 24), (2, 6), (1, 12)] {
            let keys = (0..count).map(|number| world::key(100 * round + number).in_group(group));
            let keys: Vec<Key> = keys.collect();
            let reserved = world.with(0, |table| table.reserve(&keys).unwrap());
            let mut pages = reserved.placed.iter();
            assert!(pages.all(|&(_, page)| seen.insert(page)), "{round} {group}");
            world.write_and_commit(0, &keys, &reserved);
        }
    }
    assert_eq!(seen.len(), 4 * 42);
}
