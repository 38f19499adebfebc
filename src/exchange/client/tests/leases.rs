//! Leases: how they begin, change and end.

use std::task::Poll;

use super::*;
use crate::{ShareError, Unreachable};

/// Returns a client with one lease, number 5, on "x".
async fn leased(fake: &Fake, driver: &Driver, memory: &Memory) -> (Client, Peer, RemoteBuffer) {
    let (client, mut peer) = fake.client(driver).await;
    let (remote, fetch) = tokio::join!(client.fetch("x").probe(false).go(), peer.grant(5, memory));
    assert!(!fetch.probe);
    (client, peer, remote.unwrap())
}

#[tokio::test]
async fn a_release_is_unmapped_and_answered() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (_client, mut peer, remote) = leased(&fake, &driver, &memory).await;
    assert_eq!(remote.via(), crate::driver::HandleType::Fabric);
    assert_eq!((remote.name(), remote.no_fabric()), ("x", None));
    assert_eq!(remote.proved().by, None);
    let release = remote.release();
    let answer = async {
        let (id, ask) = peer.request().await.unwrap();
        assert_eq!(ask, Ask::Release { lease: 5 });
        // Unmapped before the release is sent.
        assert!(driver.sim().unwrap().held().is_empty());
        peer.done(id).await;
    };
    let (released, ()) = within(async { tokio::join!(release, answer) }).await;
    released.unwrap();
}

/// Polls `work` until `other` is done, then at most `more` times, and drops it.
async fn poll_some<T>(work: impl Future<Output = Result<T>>, other: impl Future, more: usize) {
    let (mut work, mut other) = (Box::pin(work), Box::pin(other));
    let mut polls = None;
    std::future::poll_fn(|cx| {
        match &mut polls {
            Some(polls) => *polls += 1,
            None if other.as_mut().poll(cx).is_ready() => polls = Some(0),
            None => {}
        }
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            drop(done.map_err(|error| panic!("{error}")));
            return Poll::Ready(());
        }
        if polls.is_some_and(|polls| polls >= more) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[tokio::test]
async fn a_fetch_that_is_given_up_leaves_no_lease() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    // Before the answer.
    assert!(timeout(soon(20), client.fetch("x").go()).await.is_err());
    peer.grant(1, &memory).await;
    assert_eq!(peer.released().await, 1);
    // At each step after it.
    for (lease, steps) in (2..40).zip(0..) {
        poll_some(
            client.fetch("x").probe(false).go(),
            peer.grant(lease, &memory),
            steps,
        )
        .await;
        assert_eq!(peer.released().await, lease);
    }
    nothing_held(&driver).await;
}

#[tokio::test]
async fn a_client_that_ends_while_a_grant_is_on_its_way_says_what_it_holds() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer, _kept) = leased(&fake, &driver, &memory).await;
    let (_, fetch) = tokio::select! {
        biased;
        asked = peer.request() => asked.unwrap(),
        fetched = client.fetch("y").go() => panic!("{fetched:?}"),
    };
    assert!(matches!(fetch, Ask::Fetch(_)), "{fetch:?}");
    let held = async { peer.request().await.unwrap() };
    let (held, ()) = within(async { tokio::join!(held, client.close()) }).await;
    let leases = vec![5];
    let expected = Held {
        leases,
        ..Held::default()
    };
    assert_eq!(held.1, Ask::Held(expected));
    assert_eq!(peer.request().await, None);
}

/// The exporter must not take memory for free whose fds are still open here.
#[tokio::test]
async fn handles_that_are_given_up_are_closed_before_the_release() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let (leased, _) = tokio::join!(client.fetch("x").lease(), peer.grant(5, &memory));
    let mut leased = leased.unwrap();
    let (queue, theirs) = crate::share::queue::pair().unwrap();
    leased.handles = crate::share::PartHandles::from_queue(theirs);
    // The thread waits for the first fds.
    assert!(timeout(Duration::ZERO, leased.receive()).await.is_err());
    let list = async {
        let (id, ask) = peer.request().await.unwrap();
        assert!(matches!(ask, Ask::List(_)), "{ask:?}");
        peer.answer(id, names(vec![], false)).await;
    };
    let (list, ()) = within(async { tokio::join!(client.list(""), list) }).await;
    list.unwrap();
    drop(queue);
    assert_eq!(peer.released().await, 5);
}

#[tokio::test]
async fn leases_that_ended_during_a_break_are_lost() {
    let (driver, mut fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (_client, peer, remote) = leased(&fake, &driver, &memory).await;
    drop(peer);
    fake.welcome.resumed = true;
    // An unknown lease does no harm.
    fake.ended = vec![4, 5];
    let (peer, _) = fake.greet().await;
    assert_eq!(peer.1, [5]);
    within(async {
        while !remote.state().is_lost() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A client that could not list its leases after a break would not learn which have ended.
#[tokio::test]
async fn a_client_lists_many_leases_in_parts() {
    let (driver, mut fake, memory) = (importer(), Fake::new().await, Memory::new());
    fake.welcome.frame_bytes = 64 + 9 * 20;
    let (client, mut peer) = fake.client(&driver).await;
    let mut all = Vec::new();
    for lease in u64::MAX - 45..u64::MAX {
        let fetch = client.fetch("x").probe(false).go();
        let (remote, _) = within(async { tokio::join!(fetch, peer.grant(lease, &memory)) }).await;
        all.push(remote.unwrap());
    }
    drop(peer);
    fake.welcome.resumed = true;
    let mut peer = fake.accept().await;
    peer.hello(&fake.welcome).await;
    let (mut listed, mut last): (Vec<u64>, _) = (Vec::new(), None);
    // Before anything else, and each frame is one that the server reads.
    for more in [true, true, false] {
        let frame = peer.frame().await.unwrap();
        assert!(frame.len() <= fake.welcome.frame_bytes as usize);
        let (_, ask) = decode::<Request>(&frame).unwrap();
        let Ask::Held(held) = ask else {
            panic!("{ask:?}");
        };
        assert_eq!((held.after, held.more), (last, more));
        last = held.leases.last().copied();
        listed.extend(held.leases);
    }
    assert_eq!(listed, (u64::MAX - 45..u64::MAX).collect::<Vec<_>>());
}

/// A server that ends, or ends the session, just when the client is back.
#[tokio::test]
async fn events_before_the_answer_about_leases_are_heard() {
    let why = Refused {
        reason: "forbidden".into(),
        detail: String::new(),
    };
    for (event, lost) in [
        (Event::Closing { ms: 60_000 }, false),
        (Event::Dismissed(why), true),
    ] {
        let (driver, mut fake, memory) = (importer(), Fake::new().await, Memory::new());
        let (_client, peer, remote) = leased(&fake, &driver, &memory).await;
        drop(peer);
        fake.welcome.resumed = true;
        let events = [event];
        let ((_peer, _), state) =
            within(async { tokio::join!(fake.greet_with(&events), remote.changed()) }).await;
        let forbidden = matches!(&state, LeaseState::Lost(error) if error.refusal() == Some(&Refusal::Forbidden));
        let withdrawing = matches!(state, LeaseState::Withdrawing { .. });
        assert!(if lost { forbidden } else { withdrawing }, "{state}");
    }
}

/// The connection that resumes the session is not read any more once the session has moved: the end of a lease that the
/// server reports there is learned at the socket.
#[tokio::test]
async fn a_lease_that_ends_while_the_session_moves_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (driver, mut fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, peer, remote) = leased(&fake, &driver, &memory).await;
    let socket = tokio::net::UnixListener::bind(&path).unwrap();
    drop(peer);
    fake.welcome.resumed = true;
    fake.welcome.boot = BootId::current().unwrap();
    fake.welcome.local = path.to_str().map(str::to_owned);
    let serve = async {
        let mut tcp = fake.accept().await;
        let hello = tcp.hello(&fake.welcome).await;
        assert!(hello.resume.is_some() && !hello.moves);
        let mut unix = Peer::at(&socket).await;
        assert!(unix.hello(&fake.welcome).await.moves);
        unix.held(&[], &[5]).await;
        (tcp, unix)
    };
    let (peers, state) = within(async { tokio::join!(serve, remote.changed()) }).await;
    assert_eq!(peers.1.1, [5]);
    let expired =
        matches!(&state, LeaseState::Lost(error) if error.refusal() == Some(&Refusal::Expired));
    assert!(expired, "{state}");
    assert!(client.session().terms().unix);
}

/// The server was silent for most of the time of a lease before it resumed the session, and its socket is for half of it.
#[tokio::test(start_paused = true)]
async fn a_socket_that_answers_nothing_costs_no_lease() {
    // While such a task runs, the clock moves only as the test says.
    let (end, ended) = std::sync::mpsc::channel::<()>();
    tokio::task::spawn_blocking(move || ended.recv());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let fake = Fake::new().await.times(2000, 10_000);
    let (driver, mut fake, memory) = (importer(), fake, Memory::new());
    let (client, _peer, remote) = leased(&fake, &driver, &memory).await;
    let socket = tokio::net::UnixListener::bind(&path).unwrap();
    fake.welcome.resumed = true;
    fake.welcome.boot = BootId::current().unwrap();
    fake.welcome.local = path.to_str().map(str::to_owned);
    let is_down = |link: &session::Link| matches!(link, session::Link::Down { .. }).then_some(());
    tokio::select! {
        () = client.session().link_is(is_down) => {}
        () = pass(500, 1000) => panic!("still connected"),
    }
    pass(500, 6).await;
    let serve = async {
        let mut tcp = fake.accept().await;
        assert!(tcp.hello(&fake.welcome).await.resume.is_some());
        let mut unix = Peer::at(&socket).await;
        let hello: Hello = decode(&unix.frame().await.unwrap()).unwrap();
        assert!(hello.moves);
        (tcp, unix)
    };
    let (mut tcp, _unix) = tokio::select! {
        served = serve => served,
        () = pass(10, 1000) => panic!("not connected"),
    };
    pass(500, 11).await;
    let (_, ask) = tcp.request().await.unwrap();
    assert!(matches!(ask, Ask::Held(held) if held.leases == [5]));
    assert_eq!(remote.state(), LeaseState::Held);
    drop(end);
}

/// Lets time pass in steps of so many milliseconds, between which all tasks run.
pub(super) async fn pass(ms: u64, steps: u32) {
    for _ in 0..steps {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        tokio::time::advance(Duration::from_millis(ms)).await;
    }
}

#[tokio::test]
async fn a_session_goes_on_after_a_break() {
    let (driver, mut fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, peer, remote) = leased(&fake, &driver, &memory).await;
    drop(peer);
    fake.welcome.resumed = true;
    let (mut peer, hello) = fake.greet().await;
    assert_eq!(hello.resume, Some(fake.welcome.session.clone()));
    assert_eq!(peer.1, [5]);
    let (list, ()) = within(async {
        tokio::join!(client.list(""), async {
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, names(vec![], false)).await;
        })
    })
    .await;
    list.unwrap();
    assert_eq!(remote.state(), LeaseState::Held);
    // Released while there is no connection: sent on the next one.
    drop(peer);
    drop(remote);
    let (mut peer, _) = fake.greet().await;
    assert_eq!(peer.1, [5]);
    let (id, ask) = peer.request().await.unwrap();
    assert_eq!(ask, Ask::Release { lease: 5 });
    // Without an answer it is sent again.
    drop(peer);
    let (mut peer, _) = fake.greet().await;
    assert!(id > 0);
    assert_eq!(peer.released().await, 5);
}

#[tokio::test]
async fn a_session_that_has_ended_loses_its_leases() {
    for restarted in [false, true] {
        let (driver, mut fake, memory) = (importer(), Fake::new().await, Memory::new());
        let (client, peer, remote) = leased(&fake, &driver, &memory).await;
        drop(peer);
        if restarted {
            fake.welcome.instance = InstanceId::random().unwrap();
        }
        let (mut peer, _) = fake.greet().await;
        let state = within(remote.changed()).await;
        match restarted {
            true => assert!(
                matches!(&state, LeaseState::Lost(Error::Stale { .. })),
                "{state}"
            ),
            false => assert!(
                matches!(
                    &state,
                    LeaseState::Lost(Error::Refused {
                        reason: Refusal::Expired,
                        ..
                    })
                ),
                "{state}"
            ),
        }
        assert_eq!(client.instance(), fake.welcome.instance);
        // The same number at another instance is another lease.
        let lease = if restarted { 5 } else { 6 };
        let (again, _) = within(async {
            let fetch = client.fetch("x").probe(false).go();
            tokio::join!(fetch, peer.grant(lease, &memory))
        })
        .await;
        let again = again.unwrap();
        assert_eq!(again.state(), LeaseState::Held);
        remote.put(0, 7_u8).unwrap();
        // A server that still runs learns that the memory is unmapped.
        let told = async {
            if !restarted {
                assert_eq!(peer.released().await, 5);
            }
        };
        let (released, ()) = within(async { tokio::join!(remote.release(), told) }).await;
        assert!(released.is_err());
        drop(again);
        assert_eq!(peer.released().await, lease);
        drop(client);
        gone(&mut peer).await;
        nothing_held(&driver).await;
    }
}

#[tokio::test]
async fn the_exporter_wants_its_memory_back() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (_client, mut peer, remote) = leased(&fake, &driver, &memory).await;
    peer.notice(Event::Withdrawing {
        lease: 5,
        ms: 3_600_000,
    })
    .await;
    let state = within(remote.changed()).await;
    assert!(
        matches!(state, LeaseState::Withdrawing { until } if until > std::time::Instant::now())
    );
    let why = Refused {
        reason: "closing".into(),
        detail: "too late".into(),
    };
    peer.notice(Event::Ended { lease: 5, why }).await;
    let state = within(remote.changed()).await;
    assert!(
        matches!(
            &state,
            LeaseState::Lost(Error::Refused {
                reason: Refusal::Closing,
                ..
            })
        ),
        "{state}"
    );
    // Final, and still mapped.
    peer.notice(Event::Withdrawing {
        lease: 5,
        ms: 3_600_000,
    })
    .await;
    assert!(within(remote.changed()).await.is_lost());
    remote.put(0, 1_u8).unwrap();
}

#[tokio::test]
async fn notices_about_leases_that_were_never_granted_are_ignored() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let serve = async {
        let (id, _) = peer.request().await.unwrap();
        for lease in 0..1000 {
            let ms = 60_000;
            peer.notice(Event::Withdrawing { lease, ms }).await;
        }
        peer.answer(id, Answer::Granted(memory.granted(7))).await;
    };
    let (remote, ()) =
        within(async { tokio::join!(client.fetch("x").probe(false).go(), serve) }).await;
    assert_eq!(remote.unwrap().state(), LeaseState::Held);
}

#[tokio::test]
async fn a_server_that_ends_says_so() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer, remote) = leased(&fake, &driver, &memory).await;
    // Another grant is on its way.
    let serve = async {
        let (id, _) = peer.request().await.unwrap();
        peer.notice(Event::Closing { ms: u64::MAX }).await;
        peer.answer(id, Answer::Granted(memory.granted(6))).await;
    };
    let (other, ()) =
        within(async { tokio::join!(client.fetch("x").probe(false).go(), serve) }).await;
    for remote in [remote, other.unwrap()] {
        let state = within(remote.changed()).await;
        assert!(matches!(state, LeaseState::Withdrawing { .. }), "{state}");
    }
}

#[tokio::test]
async fn silence_loses_leases_after_their_time() {
    let driver = importer();
    let (fake, memory) = (Fake::new().await.times(50, 200), Memory::new());
    let begun = Instant::now();
    let (_client, peer, remote) = leased(&fake, &driver, &memory).await;
    // The server answers nothing, neither on this connection nor on the next ones.
    let state = within(remote.changed()).await;
    assert!(
        matches!(
            &state,
            LeaseState::Lost(Error::Share(ShareError::PeerLost { .. }))
        ),
        "{state}"
    );
    assert!(begun.elapsed() >= soon(150));
    drop(peer);
}

#[tokio::test]
async fn the_reason_of_a_long_silence_stays_short() {
    let driver = importer();
    let (fake, memory) = (Fake::new().await.times(50, 200), Memory::new());
    let (client, peer, remote) = leased(&fake, &driver, &memory).await;
    within(client.session().link_is(|link| link.away().cloned())).await;
    for _ in 0..1000 {
        client.session().tick(Duration::from_millis(25));
    }
    let why = client.session().down().to_string();
    assert!(why.len() < 500, "{} bytes: {}", why.len(), &why[..500]);
    drop((peer, remote));
}

#[tokio::test]
async fn where_nobody_listens_leases_are_lost_sooner() {
    let driver = importer();
    let (fake, memory) = (Fake::new().await.times(40, 3_600_000), Memory::new());
    let (client, peer, remote) = leased(&fake, &driver, &memory).await;
    drop((peer, fake));
    let state = within(remote.changed()).await;
    assert!(
        matches!(
            &state,
            LeaseState::Lost(Error::Share(ShareError::PeerLost { .. }))
        ),
        "{state}"
    );
    drop(remote);
    let error = expect_err(
        timeout(soon(300), client.list(""))
            .await
            .unwrap_or(Err(Error::peer_lost(String::new(), String::new()))),
    );
    assert!(
        matches!(error, Error::Share(ShareError::PeerLost { .. })),
        "{error}"
    );
}

#[tokio::test]
async fn where_nobody_listens_leases_are_lost_before_the_next_attempt_to_connect() {
    let driver = importer();
    let (fake, memory) = (Fake::new().await.times(40, 3_600_000), Memory::new());
    let hour = Duration::from_secs(3600);
    let options = fake.options().reconnect(Reconnect::backoff(hour, hour));
    let (client, mut peer) = fake.client_of(options, &driver).await;
    let (remote, _) = tokio::join!(client.fetch("a").go(), peer.grant(7, &memory));
    let remote = remote.unwrap();
    drop((peer, fake));
    let is_down = |link: &session::Link| matches!(link, session::Link::Down { .. }).then_some(());
    within(client.session().link_is(is_down)).await;
    let refused = ShareError::Unreachable {
        peer: "test".into(),
        cause: Unreachable::NobodyListens,
        why: "connection refused".into(),
    };
    client.session().still_down(refused.into());
    assert!(within(remote.changed()).await.is_lost());
}

#[tokio::test]
async fn pings_come_twice_in_a_heartbeat() {
    let driver = importer();
    let fake = Fake::new().await.times(60, 60_000);
    let begun = Instant::now();
    let (_client, mut peer) = fake.client(&driver).await;
    for _ in 0..5 {
        let (id, ask): Request = decode(&peer.frame().await.unwrap()).unwrap();
        assert_eq!(ask, Ask::Ping);
        peer.done(id).await;
    }
    // The first attempt comes at once.
    assert!(
        begun.elapsed() >= soon(4 * 30 - 15),
        "{:?}",
        begun.elapsed()
    );
}
