//! Peers without the right, or not admitted by the ranks, that try to join groups.

use egmem::exchange::group::{Admission, Error, GroupOptions, Host};
use egmem::exchange::{self, Address, Refusal, Server, Who};

use super::{Group, free_address};
use super::{LONG, buffer, fabric, secret, until};
use crate::refused::assert_refused;
use egmem_tests::ms;

/// Rank `rank` of two, at a server of its own.
fn rank(rank: u32, address: &Address, admission: Admission) -> GroupOptions {
    Group::options("job", rank, 2, address.clone(), admission)
        .host(Host::Elsewhere)
        .deadline(LONG)
}

fn missing(rank: u32) -> Error {
    Error::RanksMissing {
        group: "job".into(),
        missing: vec![rank],
        size: 2,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_gives_no_peer_the_right_to_join_by_default() {
    let server = Server::options().listen(Address::loopback(0));
    let server = server.start().await.unwrap();
    let address = &server.addresses()[0];
    let error = rank(0, address, secret(7)).join(&fabric()).await;
    assert_refused(error.unwrap_err().exchange().unwrap(), Refusal::Forbidden);
    assert_eq!(server.stats().groups, 0);
    server
        .set_groups([("job".to_owned(), Who::anyone())])
        .unwrap();
    let alone = Group::options("job", 0, 1, address.clone(), secret(7)).host(Host::Elsewhere);
    let group = alone.join(&fabric()).await.unwrap();
    group.leave(LONG).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_neither_joins_nor_ends_a_group() {
    let server = super::server().await;
    let address = server.addresses()[0].clone();
    let driver = fabric();
    let first = tokio::spawn({
        let (join, driver) = (rank(0, &address, secret(7)), driver.clone());
        async move { join.memory(buffer(&driver, 1)).join(&driver).await }
    });
    until("rank 0 waits", || server.stats().groups == 1).await;
    // With another secret, as the rank that is missing and as the one that is there.
    for stranger in [0, 1] {
        let join = rank(stranger, &address, secret(8)).deadline(ms(1500));
        let error = join.join(&driver).await.unwrap_err();
        assert_eq!(error, missing(1 - stranger), "as if nobody else had joined");
    }
    let second = rank(1, &address, secret(7)).memory(buffer(&driver, 2));
    let second = second.join(&driver).await.unwrap();
    let first = first.await.unwrap().unwrap();
    assert_eq!(second.rank(0).unwrap().get::<u64>(0).unwrap(), 1);
    let (first, second) = tokio::join!(first.leave(LONG), second.leave(LONG));
    first.and(second).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_of_the_same_user_come_together_over_unix_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let address = Address::Unix(folder.path().join("group"));
    let own = format!("uid:{}", rustix::process::geteuid().as_raw());
    for admission in [
        Admission::SamePeer,
        Admission::Peers(Who::list([own.as_str(), "uid:1"]).unwrap()),
    ] {
        let join = |rank| {
            let join = Group::options("job", rank, 2, address.clone(), admission.clone());
            async move { join.deadline(LONG).join(&fabric()).await.unwrap() }
        };
        let (first, second) = tokio::join!(join(0), join(1));
        let (first, second) = tokio::join!(first.leave(LONG), second.leave(LONG));
        first.and(second).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_leaves_out_the_rank_itself_is_refused() {
    let list = Who::list(["node.example"]).unwrap();
    let join = Group::options("job", 0, 2, free_address(), Admission::Peers(list));
    let error = join.join(&fabric()).await.unwrap_err();
    assert_refused(error.exchange().unwrap(), Refusal::Forbidden);
    let Error::Exchange(exchange::Error::Refused { detail, .. }) = &error else {
        panic!("{error}");
    };
    assert!(detail.contains("uid:"), "{detail}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_plain_tcp_admission_of_the_same_peer_is_refused() {
    let server = Server::options()
        .listen(Address::loopback(0))
        .local_socket(false);
    let server = server.groups("job", Who::anyone()).start().await.unwrap();
    let join = rank(0, &server.addresses()[0], Admission::SamePeer);
    let error = join.join(&fabric()).await.unwrap_err();
    assert_refused(error.exchange().unwrap(), Refusal::Forbidden);
}
