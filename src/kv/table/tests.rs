//! The table of several processes, each of which may be killed at any store.

mod world;

use std::time::Duration;

use fastrand::Rng;

use super::*;
use crate::Error;
use crate::words::kill;
use world::{Op, World};

/// Three groups of 8, 4 and 2 pages in an extent.
const SIZES: [u64; 3] = [512, 1000, 2000];

fn worlds(random: &mut Rng) -> World {
    let geometry = match random.u32(0..3) {
        0 => Geometry::new(random.u64(1..14), 64).unwrap(),
        _ => Geometry::of_extents(random.u64(3..7), 8192, &SIZES).unwrap(),
    };
    World::new(geometry, random.usize(1..4))
}

/// Random calls of several processes leave a table in which everything has its place.
#[test]
fn calls_of_several_processes_agree() {
    for _ in 0..60 {
        let seed = fastrand::u64(..);
        println!("seed {seed}"); // shown if the test fails
        let random = &mut Rng::with_seed(seed);
        let mut world = worlds(random);
        for _ in 0..200 {
            let who = random.usize(0..world.processes.len());
            let op = Op::random(&world, random);
            let before = world.ready();
            let pinned = world.pinned_keys();
            world.step(who, &op);
            world.check();
            world.check_effect(&op, &before, &pinned);
        }
    }
}

/// A process is killed at each store of a call. The others, or the next one, find everything in its place, even if one of them is killed
/// while it repairs.
#[test]
fn processes_are_killed_at_every_store() {
    let rounds = match std::env::var("EGMEM_KV_KILLS") {
        Ok(rounds) => rounds.parse().unwrap(),
        Err(_) => 6,
    };
    let (mut kills, mut twice) = (0, 0);
    for _ in 0..rounds {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let random = &mut Rng::with_seed(seed);
        let mut world = worlds(random);
        for _ in 0..60 {
            let who = random.usize(0..world.processes.len());
            let op = Op::random(&world, random);
            let (before, pinned) = (world.ready(), world.pinned_keys());
            for stores in 0.. {
                let mut trial = world.clone();
                if kill::after(stores, || trial.step(who, &op)).is_some() {
                    break;
                }
                kills += 1;
                // One that joins is another process.
                let freed = trial.die(if matches!(op, Op::Join) {
                    world.processes.len()
                } else {
                    who
                });
                // Half of the time the next one is killed as well, in its repair.
                if random.bool() {
                    let next = trial.next();
                    let stores = random.u64(0..300);
                    if kill::after(stores, || trial.sweep(next)).is_none() {
                        trial.die(next);
                        twice += 1;
                    }
                }
                let next = trial.next();
                trial.sweep(next);
                trial.check();
                trial.check_effect(&op, &before, &(&pinned - &freed));
            }
            world.step(who, &op);
        }
    }
    println!("{kills} kills, {twice} of two processes");
    assert!(kills > 20 * rounds && twice > 0);
}

/// Only pages with memory are given out, each to one key at a time, and the first ones first.
#[test]
fn a_table_grows_at_any_time() {
    const PAGES: u32 = 24;
    for _ in 0..50 {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let random = &mut Rng::with_seed(seed);
        let mut world = World::with_memory(Geometry::new(PAGES.into(), 8).unwrap(), 1, 0);
        let (mut usable, mut taken) = (0, 0);
        for _ in 0..60 {
            let numbers: Vec<u64> = (0..random.usize(0..6)).map(|_| random.u64(0..40)).collect();
            let keys: Vec<Key> = numbers.iter().map(|&number| world::key(number)).collect();
            match random.u32(0..3) {
                0 => {
                    usable = (usable + random.u32(0..4)).min(PAGES);
                    world.with(0, |table| {
                        table.grow_to(usable);
                        // What is there already changes nothing.
                        table.grow_to(usable / 2);
                    });
                }
                1 => drop(world.with(0, |table| table.remove(&keys))),
                _ => match world.with(0, |table| table.reserve(&keys)) {
                    Ok(reserved) => {
                        for &(_, page) in &reserved.placed {
                            assert!(page.number() < usable && page.number() <= taken);
                            taken = taken.max(page.number() + 1);
                        }
                        world.write_and_commit(0, &keys, &reserved);
                    }
                    Err(Error::Full {
                        needed,
                        available,
                        missing,
                        pages,
                        ..
                    }) => {
                        assert!(needed > available && available <= usable as usize);
                        assert_eq!(
                            (missing, pages),
                            ((PAGES - usable) as usize, PAGES as usize)
                        );
                    }
                    Err(error) => panic!("{error}"),
                },
            }
            world.check();
            let stats = world.with(0, |table| table.stats());
            assert_eq!((stats.pages, stats.usable), (PAGES.into(), usable.into()));
            assert_eq!(stats.free + stats.ready, u64::from(usable));
            assert_eq!((stats.writing, stats.pinned), (0, 0));
        }
    }
}

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
            false => assert!(table.sweep_ended(Duration::ZERO)),
        });
        assert_eq!(
            world.with(0, |table| table.commit(&pages)),
            Err(Error::CopyFailed { pages: 1 })
        );
        world.with(0, |table| table.abort(&pages));
        assert_eq!(world.with(0, |table| table.stats().free), 2);
    }
}

/// Members that wait for the lock see that a repair of many pages goes on, whatever it does.
#[test]
fn a_repair_makes_steps() {
    let mut world = World::new(Geometry::new(140_000, 8).unwrap(), 1);
    world.store(0, &Vec::from_iter(0..140_000));
    let steps = world.with(0, |table| {
        let before = table.words.get(STEPS);
        table.take_over().unwrap();
        table.words.get(STEPS) - before
    });
    // Each 65,536: 262,144 buckets are cleared, the pages are looked at, compared and put into their order.
    assert!(steps >= 4 + 3 + 2 + 2, "{steps}");
    let steps = world.with(0, |table| {
        let before = table.words.get(STEPS);
        table.sweep(0);
        table.words.get(STEPS) - before
    });
    assert_eq!(steps, 3);
}

/// What an ended process held is free for whoever needs it.
#[test]
fn pages_of_ended_members_make_room() {
    for is_needed in [false, true] {
        let mut world = World::new(Geometry::new(4, 8).unwrap(), 2);
        world.store(0, &[1, 2, 3]);
        let keys: Vec<Key> = (1..=4).map(world::key).collect();
        world.with(0, |table| table.pin(&keys[..2]).unwrap());
        world.with(0, |table| table.reserve(&keys[3..]).unwrap());
        world.with(1, |table| table.sweep_ended(Duration::ZERO));
        world.die(0);
        if is_needed {
            let more: Vec<Key> = (11..=14).map(world::key).collect();
            let reserved = world.with(0, |table| table.reserve(&more).unwrap());
            assert_eq!((reserved.placed.len(), reserved.evicted.len()), (4, 3));
        } else {
            // Another process was writing the key.
            world.processes[0].private.swept = None;
            let reserved = world.with(0, |table| table.reserve(&keys[3..]).unwrap());
            assert_eq!(reserved.placed.len(), 1);
            assert_eq!(world.with(0, |table| table.stats().pinned), 0);
        }
        world.check();
    }
}

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

/// A member with the number of one that has ended has nothing of that one.
#[test]
fn a_number_is_given_out_without_its_pages() {
    let mut world = World::new(Geometry::new(4, 8).unwrap(), 2);
    world.store(0, &[1, 2]);
    world.with(1, |table| table.pin(&[world::key(1)]).map(drop).unwrap());
    world.with(1, |table| {
        table.reserve(&[world::key(3)]).map(drop).unwrap()
    });
    let name = world.processes[1].own.name();
    world.die(1);
    world.take_all_numbers();
    world.step(0, &Op::Join);
    assert_eq!(world.processes[1].own.name(), name);
    let stats = world.with(1, |table| table.stats());
    assert_eq!((stats.free, stats.writing, stats.pinned), (2, 0, 0));
    world.check();
}

/// Entries may be right by themselves, where another program has written them.
#[test]
fn a_repair_leaves_a_key_one_page() {
    let mut world = World::new(Geometry::new(2, 8).unwrap(), 1);
    world.store(0, &[1]);
    world.with(0, |table| {
        let (key, slot) = (table.named(&world::key(1)), table.slot(1));
        table.set_state(slot, table.status(slot), State::Ready);
        key.write(table.words, slot);
        table.words.put(slot + super::slot::CHECK, key.check(1));
        table.take_over().unwrap();
        assert_eq!((table.stats().ready, table.stats().free), (1, 1));
    });
    world.check();
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

/// Another program writes anything to the table, at any time: no call panics, or goes on for ever, and a repair puts everything in its place.
#[test]
fn anything_in_the_table_is_survived() {
    let mut repairs = 0;
    for _ in 0..100 {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let random = &mut Rng::with_seed(seed);
        let mut world = worlds(random);
        for _ in 0..60 {
            let who = random.usize(0..world.processes.len());
            world.step(who, &Op::random(&world, random));
        }
        for _ in 0..60 {
            for _ in 0..random.u32(0..3) {
                world.scribble(random);
            }
            let who = random.usize(0..world.processes.len());
            let op = Op::random(&world, random);
            world.step(who, &op);
        }
        repairs += world.repairs;
        world.settle();
        world.check();
    }
    assert!(repairs > 100, "{repairs}");
}
