mod charges;
mod returned;
mod room;

use crate::{MemoryError, ShareError};

use std::cell::Cell;
use std::time::Duration;

use super::request::ended;
use super::*;
use crate::backing::choose::choose_for_others;
use crate::driver::{Access, AccessDesc, Call, Code, Location};
use crate::exchange::PeerName;
use crate::memory::Memory;
use crate::topology::free_now;
use crate::{Backing, Reuse};
use crate::{Driver, Machine, Refusal};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(300);

const A: PeerName = PeerName::User(1);
const B: PeerName = PeerName::User(2);

fn plan() -> Plan {
    Plan {
        handle_types: HandleTypes::POSIX_FD,
        backing: Chosen::DRIVER,
        reserve: ReserveConfig {
            node: NodeId(0),
            bytes: 32 * MIB,
            chunk: 8 * MIB,
            min_chunk: 2 * MIB,
        },
        limits: NodeConfig {
            headroom: 0,
            quiet: Duration::ZERO,
            retry: Duration::from_millis(5),
            ..NodeConfig::default()
        },
        reuse: ReuseConfig {
            keep: 32 * MIB,
            threads: 2,
            ..ReuseConfig::default()
        },
        overcommit: Overcommit::Refuse,
        unready: None,
    }
}

fn start(driver: &Driver, mut plan: Plan) -> (Reserve, Result<()>) {
    let unready = Arc::new(watch::Sender::new(1));
    plan.unready = Some(Arc::clone(&unready));
    let reserve = Reserve::start(driver, plan).unwrap();
    until(&reserve, |_| *unready.borrow() == 0);
    let filled = reserve.state().filled.clone().unwrap();
    (reserve, filled)
}

/// Takes chunks of `bytes` together; none after an error.
fn take(reserve: &Reserve, peer: Option<&PeerName>, bytes: u64) -> Result<Vec<Chunk>> {
    let mut taken = Vec::new();
    match reserve.fill_up(peer, bytes, &mut taken, &|| Ok(())) {
        Ok(()) => Ok(taken),
        Err(error) => {
            reserve.give_back(taken, None);
            Err(error)
        }
    }
}

fn driver() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

/// Waits until the levels are as expected.
fn until(reserve: &Reserve, what: impl Fn(Levels) -> bool) -> Levels {
    let end = Instant::now() + PATIENCE;
    loop {
        let levels = reserve.levels();
        if what(levels) {
            return levels;
        }
        assert!(Instant::now() < end, "still {levels:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes `byte` everywhere, as a peer would; returns the previous contents.
fn use_by(chunks: &mut [Chunk], peer: PeerName, byte: u8) -> Vec<u8> {
    let mut found = Vec::new();
    for chunk in chunks {
        chunk.past.shown(Some(&peer));
        let mut mapping = chunk.memory.map().unwrap();
        let host = [AccessDesc::new(Location::Host, Access::ReadWrite)];
        mapping.set_access(&host).unwrap();
        let mut bytes = vec![1; mapping.len() as usize];
        let cpu = mapping.cpu().unwrap();
        cpu.read_at(0, &mut bytes).unwrap();
        found.extend(bytes);
        cpu.fill(0, mapping.len(), byte).unwrap();
    }
    found.sort_unstable();
    found.dedup();
    found
}

#[test]
fn a_warm_request_asks_the_driver_for_nothing_and_the_reserve_fills_up_again() {
    let driver = driver();
    let (reserve, filled) = start(&driver, plan());
    filled.unwrap();
    let levels = reserve.levels();
    assert_eq!((levels.warm, levels.pinned), (32 * MIB, 32 * MIB));
    let taken = take(&reserve, Some(&A), 24 * MIB).unwrap();
    assert_eq!(taken.len(), 3);
    assert_eq!(reserve.counts().taken_warm_bytes, 24 * MIB);
    assert_eq!(reserve.counts().taken_cold_bytes, 0);
    until(&reserve, |levels| levels.warm == 32 * MIB);
    assert_eq!(reserve.levels().pinned, 56 * MIB);
    drop(taken);
    drop(reserve);
    assert!(driver.sim().unwrap().held().is_empty());
}

#[test]
fn the_target_is_reached_whatever_its_size() {
    // The remainder of the third is smaller than the smallest chunk; that of the last is so after a shortage.
    for (bytes, shortages) in [(2, 0), (12, 0), (10, 0), (14, 1)] {
        let driver = driver();
        for call in 1..=shortages {
            let sim = driver.sim().unwrap();
            sim.fail(Call::MemCreate, call, Code::OUT_OF_MEMORY);
        }
        let mut odd = plan();
        odd.reserve.bytes = bytes * MIB;
        odd.reserve.min_chunk = 4 * MIB;
        let (reserve, filled) = start(&driver, odd);
        filled.unwrap();
        let levels = reserve.levels();
        assert_eq!((levels.warm, levels.target), (bytes * MIB, bytes * MIB));
    }
}

#[test]
fn what_the_reserve_lacks_is_made_and_the_rest_is_exact() {
    let driver = driver();
    let (reserve, _) = start(&driver, plan());
    let taken = take(&reserve, Some(&A), 43 * MIB + 1).unwrap();
    assert_eq!(total(&taken), 44 * MIB);
    // No peer has seen it, so it is kept as it is, except memory that the reserve has no room for.
    until(&reserve, |levels| levels.warm == 32 * MIB);
    reserve.give_back(taken, None);
    let levels = reserve.levels();
    assert_eq!((levels.warm, levels.pinned), (32 * MIB, 32 * MIB));
    assert!(take(&reserve, None, 0).is_err());
    drop(reserve);
    assert!(driver.sim().unwrap().held().is_empty());
}

#[test]
fn a_request_asks_before_each_chunk_whether_it_is_still_wanted() {
    let driver = driver();
    let mut empty = plan();
    empty.reserve.bytes = 0;
    let (reserve, _) = start(&driver, empty);
    let (asked, mut taken) = (Cell::new(0), Vec::new());
    let wanted = || {
        asked.set(asked.get() + 1);
        if asked.get() == 3 {
            Err(ended())
        } else {
            Ok(())
        }
    };
    let stopped = reserve.fill_up(None, 32 * MIB, &mut taken, &wanted);
    assert_eq!(stopped, Err(ended()));
    assert_eq!((taken.len(), total(&taken)), (2, 16 * MIB));
    assert_eq!(driver.sim().unwrap().count(Call::MemCreate), 2);
}

#[test]
fn chunks_are_halved_where_memory_is_short() {
    let driver = driver();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemCreate, 1, Code::OUT_OF_MEMORY);
    sim.fail(Call::MemCreate, 2, Code::OUT_OF_MEMORY);
    let (reserve, filled) = start(&driver, plan());
    filled.unwrap();
    assert_eq!(reserve.levels().warm, 32 * MIB);
    let taken = take(&reserve, None, 32 * MIB).unwrap();
    assert!(taken.len() > 4, "{} parts", taken.len());
    assert_eq!(reserve.counts().failed_chunks, 2);
}

#[test]
fn a_failure_that_is_no_shortage_is_told_and_tried_again() {
    let driver = driver();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemCreate, 1, Code::NOT_PERMITTED);
    let (reserve, filled) = start(&driver, plan());
    assert!(filled.is_err());
    assert_eq!(reserve.state().filled, Some(filled));
    until(&reserve, |levels| levels.warm == 32 * MIB);
}

#[test]
fn what_comes_back_while_the_reserve_is_filled_does_not_make_it_larger_than_planned() {
    let driver = driver();
    let mut plan = plan();
    plan.reserve.bytes = 16 * MIB;
    plan.reuse.keep = 0;
    plan.reserve.chunk = 4 * MIB;
    plan.reuse.policy = Reuse::Anyone;
    let (reserve, filled) = start(&driver, plan);
    filled.unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for round in 0..100 {
                    let mut taken = take(&reserve, Some(&A), 6 * MIB).unwrap();
                    if round % 4 != 0 {
                        taken
                            .iter_mut()
                            .for_each(|chunk| chunk.past.shown(Some(&A)));
                    }
                    reserve.give_back(taken, None);
                    let Levels {
                        warm,
                        dirty_warm: dirty,
                        ..
                    } = reserve.levels();
                    assert!(warm + dirty <= 16 * MIB, "{warm} bytes and {dirty} dirty");
                }
            });
        }
    });
    let levels = until(&reserve, |levels| {
        (levels.dirty_warm + levels.dirty_kept) == 0 && levels.warm > 14 * MIB
    });
    assert_eq!((levels.warm, levels.pinned), (16 * MIB, 16 * MIB));
}

#[test]
fn filling_leaves_the_driver_to_a_client_that_was_just_given_memory() {
    let driver = driver();
    let mut plan = plan();
    plan.limits.quiet = Duration::from_secs(3600);
    let (reserve, filled) = start(&driver, plan);
    filled.unwrap();
    let made = driver.sim().unwrap().count(Call::MemCreate);
    let _taken = take(&reserve, Some(&A), 32 * MIB).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(driver.sim().unwrap().count(Call::MemCreate), made);
    // It ends at once anyway.
}

#[test]
fn it_ends_in_the_middle_of_its_work() {
    for _ in 0..20 {
        let driver = driver();
        let reserve = Reserve::start(&driver, plan()).unwrap();
        let mut taken = take(&reserve, Some(&A), 12 * MIB).unwrap();
        for chunk in &mut taken {
            chunk.past.shown(Some(&A));
        }
        reserve.give_back(taken, None);
        drop(reserve);
        assert!(driver.sim().unwrap().held().is_empty());
    }
}

#[test]
fn memory_that_is_being_zeroed_at_the_end_goes_back_at_once() {
    for _ in 0..4 {
        let driver = driver();
        let mut none = plan();
        none.reserve.bytes = 0;
        let (reserve, _) = start(&driver, none);
        let mut taken = take(&reserve, Some(&A), 32 * MIB).unwrap();
        for chunk in &mut taken {
            chunk.past.shown(Some(&A));
        }
        let sim = driver.sim().unwrap();
        let mapped = sim.count(Call::MemMap);
        reserve.give_back(taken, None);
        until(&reserve, |_| sim.count(Call::MemMap) > mapped);
        reserve.stop();
        assert_eq!(reserve.levels(), Levels::default());
        assert!(sim.held().is_empty(), "still held: {}", sim.held());
        // The refusal says that the reserve ends, not that the request was wrong.
        let error = take(&reserve, Some(&A), MIB).map(drop).unwrap_err();
        let closing =
            matches!(&error, Error::Refused { reason, .. } if *reason == Refusal::Closing);
        assert!(closing, "{error}");
    }
}

/// The service needs no GPU for it: importers register it.
#[test]
fn registered_memory_is_kept_scrubbed_and_given_out_without_a_gpu() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let site = (NodeId(0).into(), HandleTypes::POSIX_FD);
    let mut plan = plan();
    plan.backing = choose_for_others(&driver, Backing::Auto, site, &[]).unwrap();
    let (reserve, filled) = start(&driver, plan);
    filled.unwrap();
    let mut taken = take(&reserve, Some(&A), 12 * MIB).unwrap();
    let kinds = taken.iter().map(|chunk| chunk.memory.backing());
    assert!(kinds.clone().all(|kind| kind == Backing::Registered));
    use_by(&mut taken, A, 7);
    let ids: Vec<_> = taken.iter().map(|chunk| chunk.memory.identity()).collect();
    reserve.give_back(taken, None);
    until(&reserve, |levels| {
        levels.kept == 12 * MIB && levels.warm == 32 * MIB
    });
    let mut again = take(&reserve, Some(&A), 12 * MIB).unwrap();
    let renewed = again.iter().map(|chunk| chunk.memory.identity());
    assert!(renewed.clone().all(|identity| !ids.contains(&identity)));
    assert!(use_by(&mut again, A, 8).iter().all(|&byte| byte == 0));
    drop(again);
    assert_eq!(driver.sim().unwrap().count(Call::MemHostRegister), 0);
    assert_eq!(driver.sim().unwrap().count(Call::MemCreate), 0);
    drop(reserve);
    assert!(driver.sim().unwrap().held().is_empty());
}
