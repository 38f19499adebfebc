//! The table of several processes, each of which may be killed at any store.

mod check;
mod groups;
mod op;
mod workers;
mod world;

use std::time::Duration;

use fastrand::Rng;

use super::*;
use crate::Error;
use crate::page::Direction;
use crate::words::kill;
use op::Op;
use world::World;

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
                // The next call, too, may be a killed one's.
                let mut who = random.usize(0..trial.processes.len());
                let op = Op::random(&trial, random);
                let joins = trial.processes.len();
                if kill::after(random.u64(0..60), || trial.step(who, &op)).is_none() {
                    if matches!(op, Op::Join) {
                        who = joins;
                    }
                    trial.die(who);
                    let next = trial.next();
                    trial.sweep(next);
                    trial.check();
                }
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

/// A page that was freed by a process that was killed, and taken by another one that was killed, is no living member's.
#[test]
fn a_page_is_nobodys_after_two_kills() {
    let keys = [1, 2].map(world::key);
    for first in 0.. {
        let mut world = World::new(Geometry::new(2, 8).unwrap(), 3);
        let reserved = world.with(0, |table| table.reserve(&keys[..1]).unwrap());
        let pages = vec![reserved.placed[0].1];
        world.with(1, |table| {
            table.begin_copy(&pages, Direction::Store).unwrap();
        });
        world.with(0, |table| table.abort(&pages));
        let freed = || world.with(1, |table| table.unpin(&pages));
        if kill::after(first, freed).is_some() {
            break;
        }
        world.die(1);
        world.sweep(0);
        world.check();
        for second in 0.. {
            let mut trial = world.clone();
            let taken = || trial.with(1, |table| table.reserve(&keys[1..]).map(drop));
            if kill::after(second, taken).is_some() {
                break;
            }
            trial.die(1);
            trial.sweep(0);
            trial.check();
            let stats = trial.with(0, |table| table.stats());
            assert_eq!((stats.free, stats.writing), (2, 0), "{first}, {second}");
        }
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
        world.sweep(1);
        world.die(0);
        if is_needed {
            let more: Vec<Key> = (11..=14).map(world::key).collect();
            let reserved = world.with(0, |table| table.reserve(&more).unwrap());
            assert_eq!((reserved.placed.len(), reserved.evicted.len()), (4, 3));
            let pages = reserved.placed.iter().map(|&(_, page)| page).collect();
            world.processes[0].stores.push(pages);
        } else {
            // Another process was writing the key.
            world.processes[0].private.swept = None;
            let reserved = world.with(0, |table| table.reserve(&keys[3..]).unwrap());
            assert_eq!(reserved.placed.len(), 1);
            assert_eq!(world.with(0, |table| table.stats().pinned), 0);
            world.processes[0].stores.push(vec![reserved.placed[0].1]);
        }
        world.check();
    }
}

/// The page of an ended member's store is not free while a copy of a living member may write it.
#[test]
fn a_page_under_a_copy_is_not_found_unfinished() {
    let mut world = World::new(Geometry::new(4, 8).unwrap(), 2);
    let keys = [1, 2].map(world::key);
    let reserved = world.with(0, |table| table.reserve(&keys).unwrap());
    let pages = vec![reserved.placed[0].1];
    world.with(1, |table| {
        table.begin_copy(&pages, Direction::Store).unwrap();
    });
    world.processes[1].pins.push(pages.clone());
    world.die(0);
    let mut repair = || world.with(0, |table| table.repair(table.own.bit()).unwrap());
    let unfinished = [repair(), repair()].map(|found| found.unfinished);
    assert_eq!(unfinished, [1, 0]);
    world.with(0, |table| {
        assert_eq!((table.stats().free, table.stats().writing), (3, 1));
        table.unpin(&pages);
        assert_eq!((table.stats().free, table.stats().writing), (4, 0));
    });
}

/// A repair numbers the stamps of pinned pages too: they are not the most recently used ones once their member has ended.
#[test]
fn a_pinned_page_keeps_its_place_in_the_order_of_use() {
    let mut world = World::new(Geometry::new(4, 8).unwrap(), 2);
    let keys = [1, 2, 3].map(world::key);
    world.store(0, &[1, 2, 3]);
    world.with(0, |table| {
        (0..10).for_each(|_| keys.iter().for_each(|key| table.touch(&[*key])));
    });
    world.with(1, |table| table.pin(&keys[..1]).map(drop).unwrap());
    world.with(0, |table| {
        table.take_over().unwrap();
        table.touch(&[keys[1]]);
        table.touch(&[keys[2]]);
    });
    world.die(1);
    world.sweep(0);
    world.check();
    let ready = world.with(0, |table| table.keys().unwrap());
    assert_eq!(
        ready.into_iter().map(|(key, _)| key).collect::<Vec<_>>(),
        keys
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
    // Eight runs met damage 87 to 111 times.
    assert!(repairs > 30, "{repairs}");
}
