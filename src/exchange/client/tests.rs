//! The client with a scripted server.

use tokio::time::timeout;

use super::*;
use crate::Driver;
use crate::driver::NodeId;
use crate::protocol::*;
use crate::share::BootId;
use crate::{Refusal, ShareError};
use fake::*;

pub(crate) mod fake;
mod follow;
mod imports;
mod leases;
mod wire;

/// Expects the release to be recorded and the connection to end.
async fn gone(peer: &mut Peer) {
    assert_eq!(peer.request().await, None, "the connection ends");
}

#[tokio::test]
async fn answers_may_come_in_any_order() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let work = async { tokio::join!(client.list("a"), client.list("b"), client.list("c")) };
    let serve = async {
        let mut asked = Vec::new();
        for _ in 0..3 {
            let (id, ask) = peer.request().await.unwrap();
            let Ask::List(list) = ask else {
                panic!("{ask:?}")
            };
            asked.push((id, list.prefix));
        }
        for (id, prefix) in asked.into_iter().rev() {
            let entry = memory.entry(&format!("{prefix}1"));
            peer.answer(id, names(vec![entry], false)).await;
        }
    };
    let ((a, b, c), ()) = within(async { tokio::join!(work, serve) }).await;
    for (list, name) in [(a, "a1"), (b, "b1"), (c, "c1")] {
        assert_eq!(list.unwrap()[0].name, name);
    }
}

#[tokio::test]
async fn a_long_list_comes_in_pages() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let page = |from: u8, more| {
        names(
            vec![
                memory.entry(&format!("{from}")),
                memory.entry(&format!("{}", from + 1)),
            ],
            more,
        )
    };
    let serve = async {
        for (after, from, more) in [(None, 1, true), (Some("2"), 3, true), (Some("4"), 5, false)] {
            let (id, ask) = peer.request().await.unwrap();
            assert!(matches!(ask, Ask::List(list) if list.after.as_deref() == after));
            peer.answer(id, page(from, more)).await;
        }
        // The same page again and again would make an endless list.
        for answer in [page(1, true), page(1, true), names(vec![], true)] {
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, answer).await;
        }
    };
    let work = async {
        let list = client.list("").await.unwrap();
        let list: Vec<_> = list.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(list, ["1", "2", "3", "4", "5", "6"]);
        for _ in 0..2 {
            let error = expect_err(client.list("").await);
            assert!(
                matches!(error, Error::Share(ShareError::Protocol { .. })),
                "{error}"
            );
        }
    };
    within(async { tokio::join!(serve, work) }).await;
}

#[tokio::test]
async fn waiting_goes_on_where_the_server_waits_less_long() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let serve = async {
        let (id, _) = peer.request().await.unwrap();
        peer.refuse(id, "timed_out").await;
        let (id, _) = peer.request().await.unwrap();
        peer.answer(id, names(vec![memory.entry("x")], false)).await;
        loop {
            let (id, _) = peer.request().await.unwrap();
            peer.refuse(id, "timed_out").await;
        }
    };
    let work = async {
        assert_eq!(client.wait("x", LONG).await.unwrap().name, "x");
        let error = expect_err(client.wait("y", soon(60)).await);
        assert!(
            matches!(error, Error::Share(ShareError::TimedOut { .. })),
            "{error}"
        );
    };
    within(async {
        tokio::select! { () = serve => {}, () = work => {} }
    })
    .await;
}

#[tokio::test]
async fn create_and_delete() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let serve = async {
        let (id, ask) = peer.request().await.unwrap();
        let Ask::Create(create) = ask else {
            panic!("{ask:?}")
        };
        assert_eq!((create.bytes, create.node), (5, Some(NodeId(3))));
        assert_eq!(create.peers, "uid:7");
        peer.answer(id, names(vec![memory.entry("x")], false)).await;
        let (id, ask) = peer.request().await.unwrap();
        assert!(matches!(ask, Ask::Delete { ms: 1000, .. }));
        peer.done(id).await;
        let (id, _) = peer.request().await.unwrap();
        peer.refuse(id, "quota").await;
    };
    let work = async {
        let options = CreateOptions::new("x", 5)
            .node(NodeId(3))
            .share_with("uid:7");
        assert_eq!(client.create(options.clone()).await.unwrap().name, "x");
        client.delete("x", soon(1000)).await.unwrap();
        let error = expect_err(client.create(options).await);
        assert!(
            matches!(
                error,
                Error::Refused {
                    reason: Refusal::Quota,
                    ..
                }
            ),
            "{error}"
        );
    };
    within(async { tokio::join!(serve, work) }).await;
}

#[tokio::test]
async fn the_connection_closes_with_the_last_user() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let (remote, _) = tokio::join!(client.fetch("x").probe(false).go(), peer.grant(5, &memory));
    let remote = remote.unwrap();
    let clone = client.clone();
    drop(client);
    drop(clone);
    // The lease keeps it open.
    assert_eq!(remote.state(), LeaseState::Held);
    remote.put(8, 1_u64).unwrap();
    assert_eq!(memory.shared.word(8).unwrap(), 1);
    drop(remote);
    assert_eq!(peer.released().await, 5);
    gone(&mut peer).await;
    nothing_held(&driver).await;
}

#[tokio::test]
async fn closing_loses_what_is_held() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let (remote, _) = tokio::join!(client.fetch("x").probe(false).go(), peer.grant(5, &memory));
    let remote = remote.unwrap();
    let other = client.clone();
    within(client.close()).await;
    assert!(matches!(
        remote.state(),
        LeaseState::Lost(Error::Share(ShareError::PeerLost { .. }))
    ));
    assert!(remote.changed().await.is_lost());
    remote.put(0, 1_u8).unwrap();
    let error = expect_err(within(other.list("")).await);
    assert!(
        matches!(error, Error::Share(ShareError::PeerLost { .. })),
        "{error}"
    );
    assert!(within(remote.release()).await.is_err());
    gone(&mut peer).await;
    nothing_held(&driver).await;
}

#[tokio::test]
async fn a_panic_on_another_thread_does_not_unwind_here() {
    let error = run_blocking("mapping", || panic!("in a call")).await;
    let error = error.map(|(): ()| ()).unwrap_err().to_string();
    assert!(
        error.contains("mapping") && error.contains("in a call"),
        "{error}"
    );
}
