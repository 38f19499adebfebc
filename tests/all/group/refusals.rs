//! Groups that do not come together, and the error that each rank gets.

use std::time::Duration;

use egmem::Buffer;
use egmem::driver::{HandleType, HandleTypes, NodeId};
use egmem::exchange::group::{Error, Host};
use egmem::exchange::{self, Address, Refusal, Server, Who};

use super::{LONG, all, buffer, fabric, free_address, no_fabric, options, server, until};
use crate::refused::assert_refused;
use egmem_tests::ms;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_ranks_are_named_to_all_alike() {
    let address = free_address();
    let results = all(3, |rank| {
        let address = address.clone();
        async move {
            let driver = fabric();
            options(rank, 5, &address)
                .deadline(ms(8000))
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
    let Error::Exchange(exchange::Error::NoCommonHandle { reasons }) = &results[0] else {
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
async fn wrong_ranks_and_sizes_are_refused() {
    let server = server().await;
    let address = server.addresses()[0].clone();
    let elsewhere = |rank, size| options(rank, size, &address).host(Host::Elsewhere);
    let driver = fabric();
    let waiting = tokio::spawn({
        let (join, driver) = (elsewhere(0, 2), driver.clone());
        async move { join.join(&driver).await.unwrap_err() }
    });
    until("rank 0 has come", || server.stats().groups == 1).await;
    let error = elsewhere(1, 3).join(&driver).await.unwrap_err();
    assert_refused(error.exchange().unwrap(), Refusal::Invalid);
    for (rank, size) in [(2, 2), (0, 0)] {
        let error = elsewhere(rank, size).join(&driver).await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Exchange(exchange::Error::Share(egmem::share::Error::Memory(
                    egmem::Error::InvalidArgument { .. }
                )))
            ),
            "{error}"
        );
    }
    // The same rank again takes the place of the first.
    let again = elsewhere(0, 2).deadline(ms(5000));
    let again = again.join(&driver).await.unwrap_err();
    assert!(
        matches!(&again, Error::RanksMissing { missing, .. } if missing == &[1]),
        "{again}"
    );
    let first = waiting.await.unwrap();
    assert_refused(first.exchange().unwrap(), Refusal::Exists);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused() {
    let server = Server::options()
        .listen(Address::loopback(0))
        .groups("*", Who::list(["node.example"]).unwrap())
        .start()
        .await
        .unwrap();
    let error = options(0, 1, &server.addresses()[0])
        .host(Host::Elsewhere)
        .join(&fabric())
        .await
        .unwrap_err();
    assert_refused(error.exchange().unwrap(), Refusal::Forbidden);
}
