//! Requests that succeed and leave something: names, leases, long answers.

use egmem::driver::{Access, HandleType};
use egmem::exchange::Limits;
use egmem::exchange::protocol::*;

use crate::messages::create;
use crate::peer::{PATIENCE, Peer, request};
use crate::setting::{CONNECTION, CONNECTIONS, REQUEST, Setting, Transport};

/// Names of each peer.
const EACH: u64 = 32;

/// Has all peers do the same, each with its number.
fn all<T>(
    setting: &Setting,
    peers: &mut [Peer],
    act: impl AsyncFn(usize, &mut Peer) -> T,
) -> Vec<T> {
    setting.runtime.block_on(async {
        let mut results = Vec::new();
        for (index, peer) in peers.iter_mut().enumerate() {
            results.push(act(index, peer).await);
        }
        results
    })
}

fn received(peers: &[Peer]) -> usize {
    peers.iter().map(|peer| peer.sent).sum()
}

/// Creates a name for many, and fetches it.
async fn make(peer: &mut Peer, name: String) -> u64 {
    let answer = peer.ask(create(name.clone(), "ab")).await;
    assert!(matches!(answer, Answer::Names(_)), "{answer:?}");
    let fetch = Fetch {
        name,
        accept: vec![HandleType::Fabric],
        access: Some(Access::ReadWrite),
        probe: true,
        instance: None,
        owner: None,
    };
    match peer.ask(Ask::Fetch(fetch)).await {
        Answer::Granted(granted) => granted.lease,
        other => panic!("{other:?}"),
    }
}

async fn unmake(peer: &mut Peer, name: String, lease: u64) {
    let answer = peer.ask(Ask::Probe { lease }).await;
    assert!(matches!(answer, Answer::Probed(_)), "{answer:?}");
    for ask in [Ask::Release { lease }, Ask::Delete { name, ms: 0 }] {
        let answer = peer.ask(ask).await;
        assert!(matches!(answer, Answer::Done), "{answer:?}");
    }
}

/// Every peer makes names and holds them.
fn names(transport: Transport) {
    let mut setting = Setting::with(transport, Limits::default(), 60, 0);
    let name = |index, id| format!("{index}/{id}");
    let make_all = async |index, peer: &mut Peer| {
        let mut leases = Vec::new();
        for id in 0..EACH {
            leases.push(make(peer, name(index, id)).await);
        }
        leases
    };
    let mut first = setting.greet(1);
    let lease = all(&setting, &mut first, async |_, peer| {
        make(peer, "x".into()).await
    });
    all(&setting, &mut first, async |_, peer| {
        unmake(peer, "x".into(), lease[0]).await
    });
    drop(first);
    let before = setting.before();
    let mut peers = setting.greet(CONNECTIONS);
    let leases = all(&setting, &mut peers, make_all);
    let now = setting.host.settled(0);
    assert_eq!(now.names - before.names, CONNECTIONS as u64 * EACH);
    assert_eq!(now.leases, CONNECTIONS as u64 * EACH);
    let beside = CONNECTIONS * (CONNECTION + EACH as usize * REQUEST);
    setting.bounded("names", &before, &now, received(&peers), beside);
    all(&setting, &mut peers, async |index, peer| {
        for (id, lease) in (0..EACH).zip(&leases[index]) {
            unmake(peer, name(index, id), *lease).await;
        }
    });
    setting.host.reset();
    setting.host.settled(0);
    let now = setting.host.trimmed();
    // The peers are still there.
    setting.bounded("no names", &before, &now, 0, CONNECTIONS * CONNECTION);
    drop(peers);
    setting.given_back("names", &before);
}

#[test]
fn names_and_leases_are_bounded_until_they_are_deleted() {
    names(Transport::Tls);
    names(Transport::Unix);
}

/// A short request for a long answer, again and again, by peers that do not read: one answer of each
/// connection is kept, as the entries that it is made from, their encoding and the frame.
#[test]
fn answers_that_nobody_reads_are_bounded() {
    let mut limits = Limits::default();
    limits.write = PATIENCE;
    let mut setting = Setting::with(Transport::Tcp, limits, 60, 1000);
    let list = || request(1, Ask::List(List::default()));
    let mut first = setting.greet(1);
    let answers = all(&setting, &mut first, async |_, peer| {
        peer.send(&list()).await;
        peer.read().await.len()
    });
    drop(first);
    let answer = answers[0];
    assert!(answer > 30_000, "{answer}");
    let before = setting.before();
    let mut peers = setting.greet(CONNECTIONS);
    all(&setting, &mut peers, async |_, peer| {
        peer.send(&list().repeat(300)).await
    });
    let now = setting.host.settled(0);
    assert!(now.requests < 300 * CONNECTIONS as u64, "all were answered");
    let beside = CONNECTIONS * (CONNECTION + 4 * answer);
    setting.bounded("list", &before, &now, received(&peers), beside);
    drop(peers);
    setting.given_back("list", &before);
}
