//! Barriers and gathers of ranks that are tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use egmem::Driver;
use egmem::driver::HandleType;
use egmem::exchange::group::{Error, Group, GroupOptions, Host, MAX_GATHER, Map};
use egmem::exchange::{self, Address, Limits};
use egmem::share::Shared;

use super::leaving::Wire;
use super::{LONG, all, buffer, fabric, free_address, no_fabric, options, server, until};
use egmem_tests::ms;

fn missing(missing: Vec<u32>, size: u32) -> Error {
    Error::RanksMissing {
        group: "job".into(),
        missing,
        size,
    }
}

/// Ranks without memory.
async fn groups(size: u32, with: impl Fn(GroupOptions) -> GroupOptions) -> Vec<Group> {
    let address = free_address();
    all(size, |rank| {
        let join = with(options(rank, size, &address));
        async move { join.join(&fabric()).await.unwrap() }
    })
    .await
}

async fn leave_all(groups: Vec<Group>) {
    let mut leaving = tokio::task::JoinSet::new();
    for group in groups {
        leaving.spawn(group.leave(LONG));
    }
    for left in leaving.join_all().await {
        left.unwrap();
    }
}

/// Returns the result of each rank's call.
async fn each<T: Send + 'static, F>(groups: &[Arc<Group>], call: impl Fn(Arc<Group>) -> F) -> Vec<T>
where
    F: Future<Output = T> + Send + 'static,
{
    let size = u32::try_from(groups.len()).unwrap();
    all(size, |rank| call(Arc::clone(&groups[rank as usize]))).await
}

fn shared(groups: Vec<Group>) -> Vec<Arc<Group>> {
    groups.into_iter().map(Arc::new).collect()
}

async fn leave_shared(groups: Vec<Arc<Group>>) {
    let own = |group| Arc::into_inner(group).expect("nobody else has it");
    leave_all(groups.into_iter().map(own).collect()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_rank_passes_a_barrier_before_all_have_entered() {
    const ROUNDS: u64 = 50;
    let groups = shared(groups(5, |join| join).await);
    let entered = Arc::new(AtomicU64::new(0));
    each(&groups, |group| {
        let entered = Arc::clone(&entered);
        async move {
            for round in 1..=ROUNDS {
                entered.fetch_add(1, Ordering::SeqCst);
                group.barrier(LONG).await.unwrap();
                assert!(entered.load(Ordering::SeqCst) >= 5 * round);
            }
        }
    })
    .await;
    leave_shared(groups).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_rank_gets_the_bytes_of_all() {
    // Small frames: the longest bytes come in pages.
    let mut limits = Limits::default();
    limits.frame_bytes = 300 << 10;
    let groups = shared(groups(5, |join| join.limits(limits.clone())).await);
    for len in [0, 1, 128, MAX_GATHER, 16] {
        let results = each(&groups, |group| async move {
            let own = vec![group.own_rank() as u8; len];
            group.gather(&own, LONG).await.unwrap()
        })
        .await;
        let expected: Vec<_> = (0..5_u8).map(|rank| vec![rank; len]).collect();
        assert!(results.iter().all(|result| *result == expected), "{len}");
    }
    let error = groups[0].gather(&vec![0; MAX_GATHER + 1], LONG).await;
    let error = error.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Exchange(exchange::Error::Share(egmem::share::Error::Memory(
                egmem::Error::InvalidArgument { .. }
            )))
        ),
        "{error}"
    );
    // That was no call.
    let passed = each(&groups, |group| async move { group.barrier(LONG).await }).await;
    assert_eq!(passed, vec![Ok(()); 5]);
    leave_shared(groups).await;
}

/// Ranks bring new memory again and again; rank 1 brings none.
async fn gather_memory(driver: Driver, via: HandleType, map: Map) {
    let address = free_address();
    let results = all(3, |rank| {
        let (driver, address) = (driver.clone(), address.clone());
        async move {
            let group = options(rank, 3, &address).map(map).join(&driver).await?;
            assert_eq!(group.via(), via);
            for round in 0..4 {
                let mark = |rank: u32| 100 * round + u64::from(rank);
                let own = (rank != 1).then(|| Shared::from(buffer(&driver, mark(rank))));
                let gathered = group.gather_memory(own, LONG).await?;
                assert_eq!(gathered.size(), 3);
                for other in (0..3).filter(|other| *other != 1) {
                    assert!(gathered.description(other)?.is_some());
                    assert_eq!(gathered.rank(other)?.get::<u64>(0)?, mark(other));
                    gathered.rank(other)?.put(8 * u64::from(rank + 1), rank)?;
                }
                assert_eq!(gathered.description(1)?, None);
                assert!(gathered.rank(1).is_err() && gathered.rank(3).is_err());
                let own = gathered.memory().cloned();
                assert_eq!(own.is_some(), rank != 1);
                drop(gathered);
                group.barrier(LONG).await?;
                // No other rank has it mapped any more, and all have written.
                for other in 0..3_u32 {
                    if let Some(own) = &own {
                        let own = own.buffer().unwrap();
                        assert_eq!(own.get::<u32>(8 * u64::from(other + 1))?, other);
                    }
                }
            }
            group.leave(LONG).await.map(drop)
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
    until("all memory is given back", || {
        driver.sim().unwrap().held().is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_gathered_again_and_again_by_fabric_handles() {
    gather_memory(fabric(), HandleType::Fabric, Map::All).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_gathered_again_and_again_by_fds() {
    gather_memory(no_fabric(), HandleType::PosixFd, Map::Lazy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_disagree_all_hear_the_difference() {
    let groups = shared(groups(3, |join| join).await);
    let errors = each(&groups, |group| async move {
        match group.own_rank() {
            2 => group.gather(&[0; 16], LONG).await.map(drop),
            _ => group.barrier(LONG).await,
        }
    })
    .await;
    let Err(Error::RanksDisagree { group, reasons }) = &errors[0] else {
        panic!("{errors:?}");
    };
    assert_eq!(group, "job");
    assert!(
        reasons.contains(&"rank 2: a gather of 16 bytes".into()),
        "{reasons:?}"
    );
    assert!(reasons.iter().any(|reason| reason.ends_with(": a barrier")));
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    let errors = each(&groups, |group| async move {
        let len = 8 + usize::from(group.own_rank() == 0);
        group.gather(&vec![0; len], LONG).await.unwrap_err()
    })
    .await;
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    let text = errors[0].to_string();
    assert!(text.contains("rank 0: a gather of 9 bytes"), "{text}");
    assert!(text.contains(": a gather of 8 bytes"), "{text}");
    // The next call is another one.
    let passed = each(&groups, |group| async move { group.barrier(LONG).await }).await;
    assert_eq!(passed, vec![Ok(()); 3]);
    leave_shared(groups).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_rank_hears_the_same_as_the_others() {
    let groups = shared(groups(3, |join| join).await);
    let errors = each(&groups[..2], |group| async move {
        // The shorter time decides for both.
        let within = [ms(500), LONG][group.own_rank() as usize];
        group.barrier(within).await.unwrap_err()
    })
    .await;
    // On a busy machine the second rank may be late as well.
    let late = groups[2].barrier(LONG).await.unwrap_err();
    assert!(
        [missing(vec![2], 3), missing(vec![1, 2], 3)].contains(&late),
        "{late}"
    );
    assert_eq!(errors, vec![late; 2]);
    // All try again.
    let passed = each(&groups, |group| async move { group.barrier(LONG).await }).await;
    assert_eq!(passed, vec![Ok(()); 3]);
    leave_shared(groups).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_calls_twice_does_not_pass_early() {
    let groups = shared(groups(2, |join| join).await);
    let passed = Arc::new(AtomicU64::new(0));
    let calls: Vec<_> = (0..2)
        .map(|_| {
            let (group, passed) = (Arc::clone(&groups[0]), Arc::clone(&passed));
            tokio::spawn(async move {
                group.barrier(LONG).await.unwrap();
                passed.fetch_add(1, Ordering::SeqCst);
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(
        passed.load(Ordering::SeqCst),
        0,
        "the other has not entered"
    );
    groups[1].barrier(LONG).await.unwrap();
    until("one passes", || passed.load(Ordering::SeqCst) == 1).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(passed.load(Ordering::SeqCst), 1, "and one alone");
    groups[1].barrier(LONG).await.unwrap();
    for call in calls {
        call.await.unwrap();
    }
    leave_shared(groups).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_dropped_does_not_shift_the_next() {
    let groups = shared(groups(2, |join| join).await);
    for waited in [Duration::ZERO, Duration::from_millis(200)] {
        let dropped = tokio::time::timeout(waited, groups[0].barrier(LONG)).await;
        assert!(dropped.is_err());
    }
    // The other makes both calls, too: where the rank has gone on, they fail; where it may come, they wait.
    let next = Arc::clone(&groups[0]);
    let next = tokio::spawn(async move { next.gather(&[7; 3], LONG).await });
    let (mut calls, mut result) = (0, None);
    while calls < 2 {
        let passed = groups[1].barrier(LONG).await;
        // A dropped call may have entered; then the other passes.
        assert!(
            matches!(&passed, Ok(()) | Err(Error::RanksMissing { .. })),
            "{passed:?}"
        );
        calls += 1;
    }
    result.get_or_insert(groups[1].gather(&[8; 3], LONG).await.unwrap());
    let expected = vec![vec![7; 3], vec![8; 3]];
    assert_eq!(result.unwrap(), expected);
    assert_eq!(next.await.unwrap().unwrap(), expected);
    leave_shared(groups).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_leaves_ends_the_barriers_of_the_others() {
    let mut groups = groups(3, |join| join.host(Host::Rank(0))).await;
    let last = groups.pop().unwrap();
    let groups = shared(groups);
    let waiting = Arc::clone(&groups[0]);
    let waiting = tokio::spawn(async move { waiting.barrier(LONG).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(last);
    let expected = missing(vec![2], 3);
    assert_eq!(waiting.await.unwrap(), Err(expected.clone()));
    // The first call of the other, and every later one.
    assert_eq!(groups[1].barrier(LONG).await, Err(expected.clone()));
    let errors = each(&groups, |group| async move { group.barrier(LONG).await }).await;
    assert_eq!(errors, vec![Err(expected); 2]);
    leave_shared(groups).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_join_again_begin_at_the_first_barrier() {
    let server = server().await;
    let address = server.addresses()[0].clone();
    let join = |rank| {
        let options = options(rank, 2, &address).host(Host::Elsewhere);
        async move { options.join(&fabric()).await.unwrap() }
    };
    let (first, second) = tokio::join!(join(0), join(1));
    let (one, two) = tokio::join!(first.barrier(LONG), second.barrier(LONG));
    one.and(two).unwrap();
    drop(second);
    assert_eq!(first.barrier(LONG).await, Err(missing(vec![1], 2)));
    drop(first);
    let (first, second) = tokio::join!(join(0), join(1));
    let (one, two) = tokio::join!(first.barrier(LONG), second.barrier(LONG));
    one.and(two).unwrap();
    let (one, two) = tokio::join!(first.leave(LONG), second.leave(LONG));
    one.and(two).unwrap();
    until("nothing is left", || server.stats().groups == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_gathers_though_its_connection_breaks() {
    let server = server().await;
    let Address::Tcp { port, .. } = server.addresses()[0].clone() else {
        panic!("a TCP address");
    };
    let wire = Wire::to(port).await;
    let addresses = [server.addresses()[0].clone(), wire.address.clone()];
    let join = |rank: u32| {
        let options = options(rank, 2, &addresses[rank as usize]).host(Host::Elsewhere);
        async move { options.join(&fabric()).await.unwrap() }
    };
    let (first, second) = tokio::join!(join(0), join(1));
    let second = Arc::new(second);
    for round in 0..3_u8 {
        let group = Arc::clone(&second);
        let waiting = tokio::spawn(async move { group.gather(&[round; 4], LONG).await });
        // Long enough for it to wait for the other; if not, there is less to see.
        tokio::time::sleep(Duration::from_millis(300)).await;
        wire.cut.notify_waiters();
        let expected = vec![vec![9; 4], vec![round; 4]];
        assert_eq!(first.gather(&[9; 4], LONG).await.unwrap(), expected);
        assert_eq!(waiting.await.unwrap().unwrap(), expected);
    }
    leave_all(vec![first, Arc::into_inner(second).unwrap()]).await;
}

#[test]
fn ranks_without_async_gather_too() {
    let address = free_address();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let address = address.clone();
            scope.spawn(move || {
                let driver = fabric();
                let join = options(rank, 3, &address);
                let group = egmem::exchange::blocking::Group::join(join, &driver).unwrap();
                for round in 0..5_u8 {
                    group.barrier(LONG).unwrap();
                    let all = group.gather(&[round, rank as u8], LONG).unwrap();
                    assert_eq!(all, [[round, 0], [round, 1], [round, 2]]);
                    let own = Shared::from(buffer(&driver, u64::from(rank)));
                    let gathered = group.gather_memory(Some(own), LONG).unwrap();
                    let next = (rank + 1) % 3;
                    let mark = gathered.rank(next).unwrap().get::<u64>(0).unwrap();
                    assert_eq!(mark, u64::from(next));
                }
                group.leave(LONG).unwrap();
            });
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_a_dropped_call_is_kept_for_the_others() {
    let driver = fabric();
    let address = free_address();
    let groups = all(2, |rank| {
        let (driver, options) = (driver.clone(), options(rank, 2, &address).map(Map::All));
        async move { options.join(&driver).await.unwrap() }
    })
    .await;
    let groups = shared(groups);
    let sim = driver.sim().unwrap();
    // Until the dropped call had entered.
    loop {
        let memory = Shared::from(buffer(&driver, 7));
        let call = groups[0].gather_memory(Some(memory), LONG);
        let dropped = tokio::time::timeout(ms(1000), call).await;
        assert!(dropped.is_err());
        match groups[1].gather_memory(None, ms(1000)).await {
            Ok(gathered) => {
                assert_eq!(gathered.rank(0).unwrap().get::<u64>(0).unwrap(), 7);
                break;
            }
            Err(error) => assert_eq!(error, missing(vec![0], 2)),
        }
    }
    // A later call that succeeds gives it back.
    assert!(!sim.held().is_empty());
    let passed = each(&groups, |group| async move { group.barrier(LONG).await }).await;
    assert_eq!(passed, vec![Ok(()); 2]);
    until("the memory is given back", || sim.held().is_empty()).await;
    // A call that fails for all ranks keeps nothing.
    let memory = Shared::from(buffer(&driver, 7));
    let failed = groups[0].gather_memory(Some(memory), ms(100)).await;
    assert_eq!(failed.unwrap_err(), missing(vec![1], 2));
    assert!(sim.held().is_empty());
    leave_shared(groups).await;
}
