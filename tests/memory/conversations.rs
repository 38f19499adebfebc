//! Requests that succeed and leave something: names, leases, groups, long answers.

use egmem::driver::{Access, HandleType};
use egmem::exchange::Limits;
use egmem::exchange::protocol::*;

use crate::messages::{create, gather_of, memory, payload, secret};
use crate::peer::{PATIENCE, Peer, request};
use crate::setting::{CONNECTION, CONNECTIONS, REQUEST, Setting, Transport};

/// Names, or groups, of each peer.
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
        access: Access::ReadWrite,
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
    let probe = Probe { lease, wrote: None };
    let answer = peer.ask(Ask::Probe(probe)).await;
    assert!(matches!(answer, Answer::Probed(_)), "{answer:?}");
    for ask in [
        Ask::Release(Release { lease }),
        Ask::Delete(Delete { name, ms: 0 }),
    ] {
        let answer = peer.ask(ask).await;
        assert!(matches!(answer, Answer::Done), "{answer:?}");
    }
}

/// Every peer gets events for the names of all peers.
fn names(transport: Transport) {
    let mut setting = Setting::with(transport, Limits::default(), 60, 0);
    let name = |index, id| format!("{index}/{id}");
    let watch = async |_, peer: &mut Peer| {
        let prefix = String::new();
        let answer = peer.ask(Ask::Watch(Watch { prefix })).await;
        assert!(matches!(answer, Answer::Names(_)), "{answer:?}");
    };
    let make_all = async |index, peer: &mut Peer| {
        let mut leases = Vec::new();
        for id in 0..EACH {
            leases.push(make(peer, name(index, id)).await);
        }
        leases
    };
    let mut first = setting.greet(1);
    all(&setting, &mut first, watch);
    let lease = all(&setting, &mut first, async |_, peer| {
        make(peer, "x".into()).await
    });
    all(&setting, &mut first, async |_, peer| {
        unmake(peer, "x".into(), lease[0]).await
    });
    drop(first);
    let before = setting.before();
    let mut peers = setting.greet(CONNECTIONS);
    all(&setting, &mut peers, watch);
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

async fn gather(peer: &mut Peer, group: String, parts: u64) -> u64 {
    let join = Join {
        group: group.clone(),
        rank: 0,
        size: 1,
        admission: Admission::Secret(secret(16)),
        can: vec![HandleType::Fabric],
        cannot: Vec::new(),
        memory: (parts > 0).then(|| memory(parts)),
        ms: 1000,
    };
    let round = match peer.ask(Ask::Join(join)).await {
        Answer::Agreed(agreed) => agreed.round,
        other => panic!("{other:?}"),
    };
    let offer = Offer {
        group,
        round,
        fabric: vec![secret(64); parts as usize],
        first: 0,
    };
    let answer = peer.ask(Ask::Offer(offer)).await;
    assert!(matches!(answer, Answer::Members(_)), "{answer:?}");
    round
}

async fn leave(peer: &mut Peer, group: String, round: u64) {
    let ms = 1000;
    let answer = peer.ask(Ask::Leave(Leave { group, round, ms })).await;
    assert!(matches!(answer, Answer::Done), "{answer:?}");
}

fn groups(transport: Transport, parts: u64) {
    // A session that was in a group outlives its connection.
    let mut setting = Setting::with(transport, Limits::default(), 15, 0);
    let name = |index, id| format!("{index}/{id}");
    let mut first = setting.greet(1);
    let round = all(&setting, &mut first, async |_, peer| {
        gather(peer, "x".into(), parts).await
    });
    all(&setting, &mut first, async |_, peer| {
        leave(peer, "x".into(), round[0]).await
    });
    drop(first);
    let before = setting.before();
    let mut peers = setting.greet(CONNECTIONS);
    let rounds = all(&setting, &mut peers, async |index, peer| {
        let mut rounds = Vec::new();
        for id in 0..EACH {
            rounds.push(gather(peer, name(index, id), parts).await);
        }
        rounds
    });
    let now = setting.host.settled(0);
    assert_eq!(now.groups, CONNECTIONS as u64 * EACH);
    let what = format!("groups with {parts} parts");
    let beside = CONNECTIONS * (CONNECTION + EACH as usize * REQUEST);
    setting.bounded(&what, &before, &now, received(&peers), beside);
    all(&setting, &mut peers, async |index, peer| {
        for (id, round) in (0..EACH).zip(&rounds[index]) {
            leave(peer, name(index, id), *round).await;
        }
    });
    setting.host.reset();
    setting.host.settled(0);
    let now = setting.host.trimmed();
    assert_eq!(now.groups, 0);
    setting.bounded("no groups", &before, &now, 0, CONNECTIONS * CONNECTION);
    drop(peers);
    setting.given_back(&what, &before);
}

#[test]
fn groups_are_bounded_until_their_ranks_leave() {
    groups(Transport::Tcp, 0);
}

#[test]
fn groups_with_memory_are_bounded_until_their_ranks_leave() {
    groups(Transport::Tls, 40);
}

/// A group of two ranks of one peer, each with its session; both have their members.
async fn pair(peers: &mut [Peer], group: String) -> u64 {
    let join = |rank| {
        Ask::Join(Join {
            group: group.clone(),
            rank,
            size: 2,
            admission: Admission::Secret(secret(16)),
            can: vec![HandleType::Fabric],
            cannot: Vec::new(),
            memory: None,
            ms: 60_000,
        })
    };
    let [first, second] = peers else {
        panic!("two peers");
    };
    let (agreed, again) = tokio::join!(first.ask(join(0)), second.ask(join(1)));
    assert_eq!(agreed, again);
    let Answer::Agreed(Agreed { round, .. }) = agreed else {
        panic!("{agreed:?}");
    };
    let offer = || {
        Ask::Offer(Offer {
            group: group.clone(),
            round,
            fabric: Vec::new(),
            first: 0,
        })
    };
    tokio::join!(first.ask(offer()), second.ask(offer()));
    round
}

/// Checks gathers of a round: the server keeps the bytes of its last gather once, those of the gather under way, and
/// none of earlier gathers.
fn gathers(what: &str, operation: impl Fn(u64) -> Operation) {
    const GROUPS: u64 = 8;
    const ROUNDS: u64 = 12;
    let mut setting = Setting::with(Transport::Tcp, Limits::default(), 15, 0);
    let ask = |group: u64, round, number| {
        Ask::Gather(Gather {
            group: format!("{group}"),
            ..gather_of(round, number, operation(number))
        })
    };
    let before = setting.before();
    let mut peers = setting.greet(2);
    let runtime = setting.runtime.handle().clone();
    let rounds = runtime.block_on(async {
        let mut rounds = Vec::new();
        for group in 0..GROUPS {
            rounds.push(pair(&mut peers, format!("{group}")).await);
        }
        rounds
    });
    let mut last = 0;
    runtime.block_on(async {
        for number in 1..=ROUNDS {
            last = peers.iter().map(|peer| peer.sent).sum();
            for (group, round) in (0..).zip(&rounds) {
                let ask = || ask(group, *round, number);
                let [first, second] = &mut peers[..] else {
                    panic!("two peers");
                };
                let (one, two) = tokio::join!(first.ask(ask()), second.ask(ask()));
                assert_eq!(one, two);
                let told = matches!(one, Answer::Members(_) | Answer::Agreed(_) | Answer::Done);
                assert!(told, "{one:?}");
            }
        }
        // A rank of each enters one more.
        for (group, round) in (0..).zip(&rounds) {
            let ask = ask(group, *round, ROUNDS + 1);
            peers[0].send(&request(1000 + group, ask)).await;
        }
    });
    let asked = GROUPS * (2 * (2 + ROUNDS) + 1);
    let now = setting.host.settled(before.requests + asked);
    // Of all that was received, the last two gathers.
    let received = received(&peers) - last;
    let beside = 2 * CONNECTION + GROUPS as usize * 4 * REQUEST;
    setting.bounded(what, &before, &now, received, beside);
    // Once as it came or encoded, and nothing of earlier gathers.
    let kept = now.live.saturating_sub(before.live);
    assert!(
        kept <= 2 * received + beside,
        "{what}: {kept} bytes for {received}"
    );
    drop(peers);
    setting.given_back(what, &before);
}

#[test]
fn barriers_are_bounded() {
    gathers("barriers", |_| Operation::Barrier);
}

#[test]
fn gathered_bytes_are_bounded_and_given_back() {
    gathers("gathered bytes", |number| {
        Operation::Bytes(payload(MAX_GATHER - number as usize))
    });
}

#[test]
fn gathered_memory_is_bounded_and_given_back() {
    gathers("gathered memory", |_| {
        Operation::Memory(Brought {
            memory: Some(memory(40)),
            fabric: vec![secret(64); 40],
        })
    });
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
    assert!(answer > 50_000, "{answer}");
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
