//! Ranks that are missing, late, dead or unable: all learn it.

use std::net::TcpListener;
use std::time::Instant;

use super::*;
use egmem_tests::ms;

const SHORT: Duration = Duration::from_millis(700);

fn missing(error: Error) -> Vec<u32> {
    match error {
        Error::RanksMissing { missing, .. } => missing,
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_that_have_come_learn_which_ranks_are_missing() {
    let folder = tempfile::tempdir().unwrap();
    let at = unix(folder.path());
    let found = all(4, |rank| match rank {
        1 => None,
        rank => Some(rendezvous(&at, rank, 4, None, SHORT).err().unwrap()),
    });
    for error in found.into_iter().flatten() {
        assert_eq!(missing(error), [1]);
    }
    // Without rank 0, too.
    let error = rendezvous(&at, 1, 4, None, SHORT).err().unwrap();
    assert_eq!(missing(error), [0]);
}

#[test]
fn a_rank_that_dies_or_is_late_fails_the_gather_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let at = unix(folder.path());
    for dies in [true, false] {
        let meet = Barrier::new(3);
        let found = all(3, |rank| {
            let mut ranks = rendezvous(&at, rank, 3, None, ms(2000)).unwrap();
            meet.wait();
            if rank == 2 {
                if dies {
                    drop(ranks);
                    meet.wait();
                } else {
                    meet.wait();
                    drop(ranks);
                }
                return None;
            }
            let begun = Instant::now();
            let error = ranks.all_gather(b"x").unwrap_err();
            assert!(begun.elapsed() < LONG);
            // The connections are out of step, and so it stays.
            assert_eq!(ranks.all_gather(b"x").unwrap_err(), error);
            meet.wait();
            Some(error)
        });
        for error in found.into_iter().flatten() {
            assert_eq!(missing(error), [2]);
        }
    }
}

#[test]
fn ranks_without_a_common_handle_type_learn_why_before_any_handle_is_made() {
    let tables = Table::of(2, |_, _, _| {});
    let found = all(2, |rank| {
        let driver = no_fabric();
        let mut table = tables[rank as usize].lock().unwrap().take().unwrap();
        let own = Shared::from(buffer(&driver, 1, 0));
        let via = [HandleType::PosixFd, HandleType::Fabric][rank as usize];
        let before = driver.sim().unwrap().held();
        let options = GatherOptions::new().via(via);
        let error = options
            .gather(&mut table, Some(own.clone()), &driver)
            .unwrap_err();
        assert_eq!(driver.sim().unwrap().held(), before);
        error
    });
    assert_eq!(found[0], found[1]);
    let text = found[0].to_string();
    assert!(
        text.contains("rank 0: no fabric (excluded by the options"),
        "{text}"
    );
    assert!(
        text.contains("rank 1: no fabric (its memory was made without"),
        "{text}"
    );
    assert!(
        text.contains("no POSIX fd (excluded by the options"),
        "{text}"
    );
}

#[test]
fn if_one_rank_cannot_map_the_memory_all_learn_it() {
    use egmem::driver::{Call, Code};
    for via in [HandleType::PosixFd, HandleType::Fabric] {
        let tables = Table::of(3, |_, _, _| {});
        let found = all(3, |rank| {
            let driver = fabric();
            let mut table = tables[rank as usize].lock().unwrap().take().unwrap();
            let own = Shared::from(buffer(&driver, 1, 0));
            let options = GatherOptions::new().via(via);
            if rank == 1 {
                let simulator = driver.sim().unwrap();
                simulator.fail(Call::MemImportFromShareableHandle, 1, Code::UNKNOWN);
            }
            options.gather(&mut table, Some(own), &driver).unwrap_err()
        });
        assert!(matches!(found[1], Error::Import { .. }), "{:?}", found[1]);
        for error in [&found[0], &found[2]] {
            let Error::RanksFailed { reasons } = error else {
                panic!("{error:?}");
            };
            assert!(
                reasons[0].starts_with("rank 1: the memory of rank 2"),
                "{reasons:?}"
            );
        }
    }
}

#[test]
fn ranks_that_cannot_be_are_refused_at_once() {
    let at: Address = "unix:/nowhere/group".parse().unwrap();
    for (rank, size, expected) in [(2, 2, "2 of 2"), (0, 0, "0 of 0"), (0, 1025, "of 1025")] {
        let error = rendezvous(&at, rank, size, None, LONG).err().unwrap();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let error = rendezvous(&Address::loopback(1), 1, 2, None, LONG)
        .err()
        .unwrap();
    assert!(error.to_string().contains("EGMEM_SECRET"), "{error}");
    // Nobody can listen there.
    assert!(rendezvous(&at, 0, 2, None, LONG).is_err());
}

#[test]
fn another_size_and_a_rank_that_is_taken_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = unix(folder.path());
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| rendezvous(&at, 0, 3, None, LONG));
        let refused = |rank, size| match rendezvous(&at, rank, size, None, LONG).err().unwrap() {
            Error::AllGather { detail } => detail,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(1, 4), "size 4 here, 3 in rank 0");
        // Of two that claim one rank, the second is refused, and the ranks come together without it.
        let both = [(); 2].map(|()| scope.spawn(|| rendezvous(&at, 1, 3, None, LONG)));
        while !both.iter().any(|one| one.is_finished()) {
            std::thread::sleep(ms(2));
        }
        assert!(rendezvous(&at, 2, 3, None, LONG).is_ok());
        let results = both.map(|one| one.join().unwrap());
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
        assert!(zero.join().unwrap().is_ok());
    });
}

#[test]
fn rank_0_waits_until_its_port_is_free() {
    let before = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = Address::loopback(before.local_addr().unwrap().port());
    std::thread::scope(|scope| {
        let met = |rank| rendezvous(&at, rank, 2, Some(&secret(1)), LONG).map(drop);
        let ranks = [0, 1].map(|rank| scope.spawn(move || met(rank)));
        // Rank 1 comes, and again.
        for _ in 0..2 {
            drop(before.accept().unwrap());
        }
        drop(before);
        for rank in ranks {
            rank.join().unwrap().unwrap();
        }
    });
}

/// A pod's name is in the directory once the pod is ready, and `/etc/hosts` may have it as a loopback address.
#[test]
fn rank_0_needs_no_address_for_its_name() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    for name in ["rank-0.invalid", "localhost"] {
        let met = all(2, |rank| {
            let host = [name, "127.0.0.2"][rank as usize].into();
            let at = Address::Tcp { host, port };
            rendezvous(&at, rank, 2, Some(&secret(1)), LONG).map(drop)
        });
        assert_eq!(met, [Ok(()), Ok(())], "{name}");
    }
}
