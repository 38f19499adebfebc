//! Processes that copy pages of other members.

use super::*;
use crate::page::Direction;

/// A worker of another process copies to and from the pages that it is told, and harms nothing when it is late.
#[test]
fn workers_copy_pages_of_other_members() {
    let mut world = World::new(Geometry::new(2, 8).unwrap(), 2);
    let keys = [world::key(1), world::key(2)];
    let reserved = world.with(0, |table| table.reserve(&keys).unwrap());
    let pages: Vec<PageId> = reserved.placed.iter().map(|&(_, page)| page).collect();
    world.with(1, |table| {
        table.begin_copy(&pages, Direction::Store).unwrap()
    });
    let error = world.with(0, |table| table.commit(&pages)).unwrap_err();
    assert_eq!(error, Error::StillCopying { pages: 2 });
    world.with(1, |table| table.unpin(&pages));
    world.write_and_commit(0, &keys, &reserved);
    // No load has them: the pages may go at any time.
    assert!(
        world
            .with(1, |table| table.begin_copy(&pages, Direction::Load))
            .is_err()
    );
    let pinned = world.with(0, |table| table.pin(&keys).unwrap());
    world.with(1, |table| {
        table.begin_copy(&pinned, Direction::Load).unwrap()
    });
    world.with(0, |table| table.unpin(&pinned));
    assert_eq!(world.with(0, |table| table.remove(&keys).len()), 0);
    world.with(1, |table| table.unpin(&pinned));
    assert_eq!(world.with(0, |table| table.remove(&keys).len()), 2);
    let late = world.with(1, |table| table.begin_copy(&pinned, Direction::Load));
    assert!(matches!(late, Err(Error::WrongState { .. })));
    // So is a page that another key has by now, although a load has pinned it.
    world.store(0, &[3, 4]);
    let others = world.with(0, |table| {
        table.pin(&[world::key(3), world::key(4)]).unwrap()
    });
    for late in pinned {
        assert!(others.iter().any(|other| other.number() == late.number()));
        let begun = world.with(1, |table| table.begin_copy(&[late], Direction::Load));
        assert!(matches!(begun, Err(Error::WrongState { .. })));
    }
    world.with(0, |table| table.unpin(&others));
    assert_eq!(
        world.with(0, |table| table
            .remove(&[world::key(3), world::key(4)])
            .len()),
        2
    );
    // A copy that fails in a worker fails the store.
    let reserved = world.with(0, |table| table.reserve(&keys).unwrap());
    let pages: Vec<PageId> = reserved.placed.iter().map(|&(_, page)| page).collect();
    world.with(1, |table| {
        table.begin_copy(&pages, Direction::Store).unwrap()
    });
    world.with(1, |table| table.fail(&pages[..1]));
    // The store is gone, and then its copy; or its process, and then the copy.
    world.with(0, |table| table.abort(&pages[1..]));
    assert_eq!(
        world.with(0, |table| (table.stats().free, table.stats().writing)),
        (0, 2)
    );
    world.with(1, |table| table.unpin(&pages));
    assert_eq!(
        world.with(0, |table| table.commit(&pages[..1])),
        Err(Error::CopyFailed { pages: 1 })
    );
    world.with(1, |table| {
        table.begin_copy(&pages[..1], Direction::Store).unwrap()
    });
    world.processes[1].pins.push(pages[..1].to_vec());
    world.die(0);
    world.sweep(0);
    world.check();
    assert_eq!(
        world.with(0, |table| (table.stats().free, table.stats().writing)),
        (1, 1)
    );
    world.processes[0].pins.clear();
    world.with(0, |table| table.unpin(&pages));
    assert_eq!(world.with(0, |table| table.stats().free), 2);
    world.check();
}

/// A part of the bytes may be there.
#[test]
fn a_store_whose_worker_was_killed_is_not_committed() {
    for is_repaired in [false, true] {
        let mut world = World::new(Geometry::new(2, 8).unwrap(), 2);
        let reserved = world.with(0, |table| table.reserve(&[world::key(1)]).unwrap());
        let pages: Vec<PageId> = reserved.placed.iter().map(|&(_, page)| page).collect();
        world.with(1, |table| {
            table.begin_copy(&pages, Direction::Store).unwrap()
        });
        world.die(1);
        world.with(0, |table| match is_repaired {
            true => table.take_over().unwrap(),
            false => assert!(table.sweep_ended(Duration::ZERO).unwrap()),
        });
        assert_eq!(
            world.with(0, |table| table.commit(&pages)),
            Err(Error::CopyFailed { pages: 1 })
        );
        world.with(0, |table| table.abort(&pages));
        assert_eq!(world.with(0, |table| table.stats().free), 2);
    }
}

/// More pages than are read side by side, and among them numbers that no page has, which a worker may be told.
#[test]
fn a_worker_takes_all_of_many_pages_or_none() {
    for geometry in [
        Geometry::new(100, 8),
        Geometry::of_extents(14, 8192, &SIZES),
    ] {
        let mut world = World::new(geometry.unwrap(), 2);
        let keys: Vec<Key> = (0..100).map(world::key).collect();
        world.store_keys(0, &keys);
        let pages = world.with(0, |table| table.pin(&keys).unwrap());
        world.processes[0].pins.push(pages.clone());
        for wrong in [u32::MAX.into(), u64::MAX >> 1, pages[0].to_bits() | 1 << 38] {
            for at in [0, 31, 32, 70, 99] {
                let mut told = pages.clone();
                told[at] = PageId::from_bits(wrong);
                let begun = world.with(1, |table| table.begin_copy(&told, Direction::Load));
                assert!(matches!(begun, Err(Error::WrongState { .. })), "{begun:?}");
                world.check();
            }
        }
        world.with(1, |table| {
            table.begin_copy(&pages, Direction::Load).unwrap();
        });
        world.with(0, |table| table.unpin(&pages));
        assert_eq!(world.with(0, |table| table.stats().pinned), 100);
        world.with(1, |table| table.unpin(&pages));
        assert_eq!(world.with(0, |table| table.stats().pinned), 0);
        assert_eq!(world.with(0, |table| table.remove(&keys).len()), 100);
    }
}
