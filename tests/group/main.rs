//! Groups through the public interface: ranks as tasks, and as processes that are killed.
#![cfg(feature = "exchange")]

mod processes;

use std::time::Duration;

use egmem::driver::{HandleType, HandleTypes, NodeId};
use egmem::exchange::group::{Group, GroupOptions, Host, Map};
use egmem::exchange::{Address, Server, Who};
use egmem::{Buffer, Driver, Error, Machine, Refusal};
use tokio::task::JoinSet;

/// Far beyond every deadline of these tests.
pub const LONG: Duration = Duration::from_secs(120);

/// With an IMEX channel.
fn fabric() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

/// Without one.
fn no_fabric() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

fn buffer(driver: &Driver, mark: u64) -> Buffer {
    let buffer = Buffer::on(NodeId(0))
        .bytes(1 << 20)
        .shareable()
        .allocate(driver)
        .unwrap();
    buffer.put(0, mark).unwrap();
    buffer
}

/// A port that was free just now.
fn free_address() -> Address {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    Address::loopback(listener.local_addr().unwrap().port())
}

fn options(rank: u32, size: u32, address: &Address) -> GroupOptions {
    Group::options("job", rank, size, address.clone())
        .deadline(Duration::from_secs(60))
        .lease(Duration::from_secs(2))
}

/// Runs all ranks as tasks; their results in the order of ranks.
async fn all<T: Send + 'static, F>(size: u32, rank: impl Fn(u32) -> F) -> Vec<T>
where
    F: Future<Output = T> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    for index in 0..size {
        let work = rank(index);
        tasks.spawn(async move { (index, work.await) });
    }
    let mut done = tokio::time::timeout(LONG, tasks.join_all())
        .await
        .expect("a rank hangs");
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Each rank reads what every rank wrote, writes its own mark beside, and finds everybody's.
async fn exchange_and_verify(
    size: u32,
    driver: Driver,
    map: Map,
    via: HandleType,
    address: Address,
) {
    let results = all(size, |rank| {
        let (driver, address) = (driver.clone(), address.clone());
        async move {
            let group = options(rank, size, &address)
                .memory(buffer(&driver, 1000 + u64::from(rank)))
                .map(map)
                .join(&driver)
                .await?;
            assert_eq!(
                (group.via(), group.size(), group.own_rank()),
                (via, size, rank)
            );
            let others = (0..size).filter(|other| *other != rank);
            for other in others {
                let memory = group.rank(other)?;
                assert_eq!(memory.get::<u64>(0)?, 1000 + u64::from(other));
                memory.put(
                    8 * (1 + u64::from(rank)),
                    u64::from(rank) << 32 | u64::from(other),
                )?;
            }
            let own = group.leave(LONG).await?.unwrap();
            // All have left, so that nobody writes any more.
            let own = own.buffer().unwrap();
            for other in (0..size).filter(|other| *other != rank) {
                let found = own.get::<u64>(8 * (1 + u64::from(other)))?;
                assert_eq!(found, u64::from(other) << 32 | u64::from(rank));
            }
            Ok::<_, Error>(())
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_ranks_by_fabric_handles() {
    exchange_and_verify(8, fabric(), Map::All, HandleType::Fabric, free_address()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_ranks_by_fds_through_the_socket_that_rank_0_makes() {
    exchange_and_verify(
        8,
        no_fabric(),
        Map::All,
        HandleType::PosixFd,
        free_address(),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_ranks_by_fds_at_a_unix_socket() {
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix(folder.path().join("group"));
    exchange_and_verify(8, no_fabric(), Map::Lazy, HandleType::PosixFd, address).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seventy_two_ranks() {
    // One driver, so that what is imported is let go with it; one rank's memory each.
    // ThreadSanitizer and emulators make each ten times as slow.
    let thread_sanitizer = std::env::var("EGMEM_SANITIZER").is_ok_and(|which| which == "thread");
    let slow = thread_sanitizer || std::env::var_os("EGMEM_TEST_RUNNER").is_some();
    let size = if slow { 16 } else { 72 };
    let address = free_address();
    let driver = fabric();
    let results = all(size, |rank| {
        let (driver, address) = (driver.clone(), address.clone());
        async move {
            let group = options(rank, size, &address)
                .memory(buffer(&driver, rank.into()))
                .map(Map::Lazy)
                .join(&driver)
                .await?;
            let next = (rank + 1) % size;
            assert_eq!(group.rank(next)?.get::<u64>(0)?, u64::from(next));
            group.leave(LONG).await.map(|_| ())
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_ranks_are_named_to_all_alike() {
    let address = free_address();
    let results = all(3, |rank| {
        let address = address.clone();
        async move {
            let driver = fabric();
            options(rank, 5, &address)
                .deadline(Duration::from_secs(2))
                .join(&driver)
                .await
                .unwrap_err()
        }
    })
    .await;
    let expected = Error::RanksMissing {
        group: "job".into(),
        missing: vec![3, 4],
        size: 5,
    };
    assert_eq!(results, [expected.clone(), expected.clone(), expected]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_rank_0_there_is_no_server() {
    let address = free_address();
    let driver = fabric();
    let error = options(1, 2, &address)
        .deadline(Duration::from_secs(1))
        .join(&driver)
        .await
        .unwrap_err();
    let missing = vec![0];
    let group = "job".into();
    assert_eq!(
        error,
        Error::RanksMissing {
            group,
            missing,
            size: 2
        }
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rank_0_may_come_late() {
    let address = free_address();
    let results = all(3, |rank| {
        let address = address.clone();
        async move {
            if rank == 0 {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            let driver = fabric();
            let group = options(rank, 3, &address).join(&driver).await?;
            assert_eq!(
                group.description((rank + 1) % 3)?,
                None,
                "no rank brings memory"
            );
            group.leave(LONG).await.map(|_| ())
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_without_fabric_decides_for_fds() {
    let address = free_address();
    let results = all(4, |rank| {
        let address = address.clone();
        async move {
            let driver = if rank == 2 { no_fabric() } else { fabric() };
            let group = options(rank, 4, &address)
                .memory(buffer(&driver, rank.into()))
                .join(&driver)
                .await?;
            let via = group.via();
            group.leave(LONG).await?;
            Ok::<_, Error>(via)
        }
    })
    .await;
    assert_eq!(results, vec![Ok(HandleType::PosixFd); 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_exclude_each_other_all_hear_why() {
    let address = free_address();
    let results = all(3, |rank| {
        let address = address.clone();
        async move {
            let driver = if rank == 2 { no_fabric() } else { fabric() };
            let types = match rank {
                1 => HandleTypes::FABRIC,
                _ => HandleTypes::POSIX_FD,
            };
            let buffer = Buffer::on(NodeId(0))
                .bytes(1)
                .handle_types(types)
                .allocate(&driver)
                .unwrap();
            options(rank, 3, &address)
                .memory(buffer)
                .join(&driver)
                .await
                .unwrap_err()
        }
    })
    .await;
    let Error::NoCommonHandle { reasons } = &results[0] else {
        panic!("{}", results[0]);
    };
    assert!(
        results.iter().all(|error| error == &results[0]),
        "{results:?}"
    );
    for (rank, says) in [(0, "without fabric"), (1, "without POSIX fds"), (2, "IMEX")] {
        let rank = format!("rank {rank}:");
        let reason = reasons.iter().find(|reason| reason.starts_with(&rank));
        assert!(
            reason.is_some_and(|reason| reason.contains(says)),
            "{rank} {reasons:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_elsewhere_serves_several_groups() {
    let server = Server::options()
        .listen(Address::loopback(0))
        .start()
        .await
        .unwrap();
    let address = server.addresses()[0].clone();
    let results = all(6, |index| {
        let address = address.clone();
        async move {
            let driver = fabric();
            let name = format!("job-{}", index / 2);
            let group = Group::options(name, index % 2, 2, address)
                .host(Host::Elsewhere)
                .memory(buffer(&driver, index.into()))
                .join(&driver)
                .await?;
            let other = group.rank(1 - index % 2)?.get::<u64>(0)?;
            assert_eq!(other, u64::from(index ^ 1));
            group.leave(LONG).await.map(|_| ())
        }
    })
    .await;
    for result in results {
        result.unwrap();
    }
    server.close(Duration::ZERO).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_ranks_and_sizes_are_refused() {
    let server = Server::options()
        .listen(Address::loopback(0))
        .start()
        .await
        .unwrap();
    let address = server.addresses()[0].clone();
    let elsewhere = |rank, size| {
        options(rank, size, &address)
            .host(Host::Elsewhere)
            .deadline(Duration::from_secs(3))
    };
    let driver = fabric();
    let waiting = tokio::spawn({
        let (join, driver) = (elsewhere(0, 2), driver.clone());
        async move { join.join(&driver).await.unwrap_err() }
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    let error = elsewhere(1, 3).join(&driver).await.unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                reason: Refusal::Invalid,
                ..
            }
        ),
        "{error}"
    );
    for (rank, size) in [(2, 2), (0, 0)] {
        let error = elsewhere(rank, size).join(&driver).await.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    // The same rank again takes the place of the first.
    let again = elsewhere(0, 2).join(&driver).await.unwrap_err();
    assert!(
        matches!(&again, Error::RanksMissing { missing, .. } if missing == &[1]),
        "{again}"
    );
    let first = waiting.await.unwrap();
    assert!(
        matches!(
            &first,
            Error::Refused {
                reason: Refusal::Exists,
                ..
            }
        ),
        "{first}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused() {
    let server = Server::options()
        .listen(Address::loopback(0))
        .groups(Who::list(["node.example"]).unwrap())
        .start()
        .await
        .unwrap();
    let error = options(0, 1, &server.addresses()[0])
        .host(Host::Elsewhere)
        .join(&fabric())
        .await
        .unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                reason: Refusal::Forbidden,
                ..
            }
        ),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_leave_is_named_and_who_drops_has_left() {
    let address = free_address();
    let driver = fabric();
    let join = |rank| {
        let (options, driver) = (options(rank, 3, &address), driver.clone());
        let buffer = buffer(&driver, 1);
        async move { options.memory(buffer).join(&driver).await.unwrap() }
    };
    let (mut first, second, third) = tokio::join!(join(0), join(1), join(2));
    // A rank that is dropped has left: it is not lost.
    drop(third);
    let error = second.leave(Duration::from_millis(300)).await.unwrap_err();
    let Error::StillHeld { holders, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(holders, &["rank 0"]);
    let news = tokio::time::timeout(Duration::from_millis(200), first.changed()).await;
    assert!(news.is_err(), "{news:?}");
    first.leave(LONG).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_joins_again_begins_a_new_round() {
    let server = Server::options()
        .listen(Address::loopback(0))
        .start()
        .await
        .unwrap();
    let address = server.addresses()[0].clone();
    for round in 0..3 {
        let results = all(2, |rank| {
            let join = options(rank, 2, &address).host(Host::Elsewhere);
            async move {
                let driver = fabric();
                let mark = 10 * round + u64::from(rank);
                let group = join.memory(buffer(&driver, mark)).join(&driver).await?;
                let other = u64::from(1 - rank);
                assert_eq!(group.rank(1 - rank)?.get::<u64>(0)?, 10 * round + other);
                group.leave(LONG).await.map(|_| ())
            }
        })
        .await;
        for result in results {
            result.unwrap();
        }
    }
}

/// Passes bytes on between TCP connections until they are cut.
struct Wire {
    address: Address,
    cut: std::sync::Arc<tokio::sync::Notify>,
}

impl Wire {
    async fn to(port: u16) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address::loopback(listener.local_addr().unwrap().port());
        let cut = std::sync::Arc::new(tokio::sync::Notify::new());
        let cutting = cut.clone();
        tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let far = tokio::net::TcpStream::connect(("127.0.0.1", port));
                let mut far = far.await.unwrap();
                let cut = cutting.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                        () = cut.notified() => {}
                    }
                });
            }
        });
        Self { address, cut }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_leaves_though_its_connection_breaks() {
    let server = Server::options().listen(Address::loopback(0)).door(None);
    let server = server.start().await.unwrap();
    let address = server.addresses()[0].clone();
    let Address::Tcp { port, .. } = address else {
        panic!("{address}");
    };
    let wire = Wire::to(port).await;
    let driver = fabric();
    let join = |rank, address: &Address| {
        let options = Group::options("job", rank, 2, address.clone()).host(Host::Elsewhere);
        let (options, driver) = (options.memory(buffer(&driver, 1)), driver.clone());
        async move { options.join(&driver).await.unwrap() }
    };
    let (first, second) = tokio::join!(join(0, &address), join(1, &wire.address));
    let second = tokio::spawn(second.leave(LONG));
    // Long enough for it to wait for the other; if not, there is less to see.
    tokio::time::sleep(Duration::from_millis(500)).await;
    wire.cut.notify_waiters();
    // Whether it asks once more before or after the round has ended, it is told.
    first.leave(LONG).await.unwrap();
    second.await.unwrap().unwrap();
    server.close(Duration::ZERO).await.unwrap();
}
