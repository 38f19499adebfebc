//! Leases of peers that are no longer on a name's list: the holders are asked for the memory, and the leases
//! end.

use std::process::{Command, Stdio};

use super::*;
use crate::server::HolderState;
use crate::server::publication::HolderProcess;
use crate::server::quota::What;

#[tokio::test]
async fn a_peer_off_the_list_is_asked_for_the_memory_and_its_lease_ends() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    published.set_who_within(PeerList::nobody(), short());
    match raw.notice().await {
        Event::Withdrawing { lease, .. } => assert_eq!(lease, granted.lease),
        other => panic!("{other:?}"),
    }
    match raw.notice().await {
        Event::Ended { lease, why } => {
            assert_eq!(lease, granted.lease);
            assert_eq!(Refusal::from_word(&why.reason), Refusal::Forbidden);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(published.importers()[0].state, HolderState::Expired);
    // The session survives, without the name.
    assert_eq!(raw.names("").await, [""; 0]);
    assert_eq!(server.stats().leases, 0);
    drop((raw, published));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_peer_back_on_the_list_keeps_its_lease() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    raw.fetch(fetch("a")).await.unwrap();
    published.set_who_within(PeerList::nobody(), short());
    published.set_who(PeerList::only(PeerName::Local));
    // A lease that is recalled later ends later: by then the first would have ended.
    let other = server.publish("b", memory(&driver)).now().unwrap();
    raw.fetch(fetch("b")).await.unwrap();
    other.set_who_within(PeerList::nobody(), short());
    until("the second ends", || {
        other.importers()[0].state == HolderState::Expired
    })
    .await;
    assert_ne!(published.importers()[0].state, HolderState::Expired);
    drop((raw, published, other));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_resumed_session_is_asked_again_for_what_was_recalled() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    published.set_who_within(PeerList::nobody(), LONG);
    let mut again = raw.resume(&server).await;
    assert!(again.held(vec![granted.lease]).await.is_empty());
    match again.notice().await {
        Event::Withdrawing { lease, .. } => assert_eq!(lease, granted.lease),
        other => panic!("{other:?}"),
    }
    drop((raw, again, published));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_dismissed_or_recalled_holder_is_gone_when_its_process_has_ended() {
    let driver = driver();
    let server = loopback().start().await;
    let server = server.unwrap();
    let names = ["recalled", "dismissed"];
    let names = names.map(|name| server.publish(name, memory(&driver)).now().unwrap());
    let mut raw = Raw::open(&server).await;
    let mut children = Vec::new();
    for published in &names {
        let (granted, _) = raw.fetch(fetch(published.name())).await.unwrap();
        let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = HolderProcess::of(child.id()).unwrap();
        let inner = &server.handle.inner;
        inner.state().set_process(granted.lease, process);
        children.push(child);
    }
    let [recalled, dismissed] = &names;
    let expired = |published: &Published| published.importers()[0].state == HolderState::Expired;
    recalled.set_who_within(PeerList::nobody(), Duration::ZERO);
    until("it is recalled", || expired(recalled)).await;
    assert_eq!(server.end_sessions(&PeerName::Local), 1);
    assert!(expired(dismissed));
    for (mut child, published) in children.into_iter().zip(&names) {
        assert!(expired(published), "its process runs");
        child.kill().unwrap();
        child.wait().unwrap();
        until("the holder is gone", || published.importers().is_empty()).await;
    }
    drop((raw, names));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_peer_without_room_for_the_notices_of_ended_leases_is_dropped_and_counted_once() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let [mut raw, mut away] = [Raw::open(&server).await, Raw::open(&server).await];
    for raw in [&mut raw, &mut away] {
        raw.fetch(fetch("a")).await.unwrap();
        raw.fetch(fetch("a")).await.unwrap();
    }
    drop(away);
    until("it is gone", || server.stats().connections == 1).await;
    let quota = server.handle.inner.quota.clone();
    let mut counts = Vec::new();
    for amount in (0..20).rev().map(|bits| 1 << bits) {
        while let Ok(counted) = quota.count(&PeerName::Local, What::Record, amount) {
            counts.push(counted);
        }
    }
    published.set_who_within(PeerList::nobody(), Duration::ZERO);
    raw.hung_up().await;
    until("all are ended", || server.stats().expired == 4).await;
    assert_eq!(server.stats().dropped_peers, 1);
    drop((published, raw, counts));
    close(server, &driver).await;
}
