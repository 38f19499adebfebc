//! Leases: how they begin, change and end.

use std::task::Poll;

use super::*;

/// A client with one lease, number 5, on "x".
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
    assert!(!remote.proved().is_some());
    let release = remote.release();
    let answer = async {
        let (id, ask) = peer.request().await.unwrap();
        assert_eq!(ask, Ask::Release(Release { lease: 5 }));
        // Unmapped before it is said.
        assert!(driver.sim().unwrap().held().is_empty());
        peer.done(id).await;
    };
    let (released, ()) = within(async { tokio::join!(release, answer) }).await;
    released.unwrap();
}

/// Polls `work` until `other` is done and then at most so many times more, and drops it.
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
    // At each step behind it.
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
async fn a_session_goes_on_after_a_break() {
    let (driver, mut fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, peer, remote) = leased(&fake, &driver, &memory).await;
    drop(peer);
    fake.welcome.resumed = true;
    let (mut peer, hello) = fake.greet().await;
    assert_eq!(hello.resume, Some(fake.welcome.session.clone()));
    assert_eq!(hello.held, Some(vec![5]));
    let (list, ()) = within(async {
        tokio::join!(client.list(""), async {
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, names(vec![], false)).await;
        })
    })
    .await;
    list.unwrap();
    assert_eq!(remote.state(), LeaseState::Held);
    // Released while there is no connection: told to the next.
    drop(peer);
    drop(remote);
    let (mut peer, hello) = fake.greet().await;
    assert_eq!(hello.held, Some(vec![5]));
    let (id, ask) = peer.request().await.unwrap();
    assert_eq!(ask, Ask::Release(Release { lease: 5 }));
    // Unanswered, it is said once more.
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
        // A new lease of the same number is another one.
        let (again, _) = within(async {
            tokio::join!(client.fetch("x").probe(false).go(), peer.grant(5, &memory))
        })
        .await;
        let again = again.unwrap();
        assert_eq!(again.state(), LeaseState::Held);
        remote.put(0, 7_u8).unwrap();
        // A server that lives on is told that the memory is unmapped.
        let told = async {
            if !restarted {
                assert_eq!(peer.released().await, 5);
            }
        };
        let (released, ()) = within(async { tokio::join!(remote.release(), told) }).await;
        assert!(released.is_err());
        drop(again);
        assert_eq!(peer.released().await, 5);
        drop(client);
        gone(&mut peer).await;
        nothing_held(&driver).await;
    }
}

#[tokio::test]
async fn the_exporter_wants_its_memory_back() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer, remote) = leased(&fake, &driver, &memory).await;
    peer.notice(Event::Withdrawing(Withdrawing {
        lease: 5,
        ms: 60_000,
    }))
    .await;
    let state = within(remote.changed()).await;
    assert!(
        matches!(state, LeaseState::Withdrawing { until } if until > std::time::Instant::now())
    );
    let why = Refused {
        reason: "closing".into(),
        detail: "too late".into(),
    };
    peer.notice(Event::Ended(Ended {
        lease: 5,
        why: why.clone(),
    }))
    .await;
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
    peer.notice(Event::Withdrawing(Withdrawing {
        lease: 5,
        ms: 60_000,
    }))
    .await;
    assert!(within(remote.changed()).await.is_lost());
    remote.put(0, 1_u8).unwrap();
    // Words that overtake their grant.
    let serve = async {
        peer.notice(Event::Ended(Ended { lease: 6, why })).await;
        peer.grant(6, &memory).await
    };
    let (early, _) =
        within(async { tokio::join!(client.fetch("y").probe(false).go(), serve) }).await;
    assert!(early.unwrap().state().is_lost());
}

#[tokio::test]
async fn a_server_that_ends_says_so() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (_client, mut peer, remote) = leased(&fake, &driver, &memory).await;
    peer.notice(Event::Closing(Closing { ms: u64::MAX })).await;
    let state = within(remote.changed()).await;
    assert!(matches!(state, LeaseState::Withdrawing { .. }), "{state}");
}

#[tokio::test]
async fn silence_loses_leases_after_their_time() {
    let driver = importer();
    let (fake, memory) = (Fake::new().await.times(50, 200), Memory::new());
    let (_client, peer, remote) = leased(&fake, &driver, &memory).await;
    // Nothing is answered, neither on this connection nor on the next ones.
    let begun = Instant::now();
    let state = within(remote.changed()).await;
    assert!(
        matches!(&state, LeaseState::Lost(Error::PeerLost { .. })),
        "{state}"
    );
    assert!(begun.elapsed() >= soon(150));
    drop(peer);
}

#[tokio::test]
async fn where_nobody_listens_leases_are_lost_sooner() {
    let driver = importer();
    let (fake, memory) = (Fake::new().await.times(40, 3_600_000), Memory::new());
    let (client, peer, remote) = leased(&fake, &driver, &memory).await;
    drop((peer, fake));
    let state = within(remote.changed()).await;
    assert!(
        matches!(&state, LeaseState::Lost(Error::PeerLost { .. })),
        "{state}"
    );
    drop(remote);
    let error = expect_err(timeout(soon(300), client.list("")).await.unwrap_or(Err(
        Error::PeerLost {
            peer: String::new(),
            why: String::new(),
        },
    )));
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
}

#[tokio::test]
async fn pings_come_twice_in_a_heartbeat() {
    let driver = importer();
    let fake = Fake::new().await.times(60, 60_000);
    let (_client, mut peer) = fake.client(&driver).await;
    let begun = Instant::now();
    for _ in 0..5 {
        let Request { id, ask } = decode(&peer.frame().await.unwrap()).unwrap();
        assert_eq!(ask, Some(Ask::Ping(Empty {})));
        peer.done(id).await;
    }
    // The first comes at once.
    assert!(
        begun.elapsed() >= soon(4 * 30 - 15),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn memory_that_cannot_be_imported_is_released() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let serve = async {
        let (id, _) = peer.request().await.unwrap();
        let mut granted = memory.granted(9);
        granted.handles = Handles::Fabric(vec![Secret::new(&[3; 64]).unwrap()]);
        peer.answer(id, Answer::Granted(granted)).await;
        assert_eq!(peer.released().await, 9);
    };
    let (remote, ()) = within(async { tokio::join!(client.fetch("x").go(), serve) }).await;
    match expect_err(remote) {
        Error::Import { end, source, .. } => {
            assert_eq!(end, crate::End::Between);
            assert!(source.driver_error().is_some());
        }
        other => panic!("{other}"),
    }
    assert!(driver.sim().unwrap().held().is_empty());
}

#[tokio::test]
async fn grants_that_cannot_be_are_refused_and_released() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let good = memory.granted(0);
    let mut wrong = Vec::new();
    let mut with = |change: &dyn Fn(&mut Granted)| {
        let mut granted = good.clone();
        granted.lease = wrong.len() as u64;
        change(&mut granted);
        wrong.push(granted);
    };
    with(&|granted| granted.memory.len = 0);
    with(&|granted| granted.memory.parts.clear());
    with(&|granted| granted.handles = Handles::Fabric(vec![]));
    with(&|granted| granted.handles = Handles::Fabric(vec![Secret::new(&[0; 63]).unwrap()]));
    with(&|granted| granted.handles = Handles::Fds(Fds { count: 1 }));
    with(&|granted| granted.handles = Handles::Ticket(Secret::new(&[0; 16]).unwrap()));
    with(&|granted| granted.probe = Some(granted.memory.padded()));
    with(&|granted| granted.probe = Some(u64::MAX));
    with(&|granted| granted.probe = Some(4));
    for granted in wrong {
        let lease = granted.lease;
        let serve = async {
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, Answer::Granted(granted)).await;
            assert_eq!(peer.released().await, lease);
        };
        let (remote, ()) = within(async { tokio::join!(client.fetch("x").go(), serve) }).await;
        let error = expect_err(remote);
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
    }
    assert!(driver.sim().unwrap().held().is_empty());
}

#[tokio::test]
async fn two_ends_prove_that_they_see_the_same_bytes() {
    let (driver, fake, mut memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let at = (2 << 20) - 64;
    memory.probe = Some(at);
    let words = async |peer: &mut Peer, right: bool| {
        let mut rounds = 0;
        loop {
            let (id, ask) = peer.request().await.unwrap();
            match ask {
                Ask::Probe(probe) => {
                    let found = memory.shared.word(at).unwrap();
                    assert_eq!(probe.wrote, Some(found));
                    rounds += 1;
                    let wrote = 0x1234_5678 + rounds;
                    if right {
                        memory.shared.put_word(at, wrote).unwrap();
                    }
                    peer.answer(id, Answer::Probed(Probed { found, wrote }))
                        .await;
                }
                Ask::Release(release) => {
                    peer.done(id).await;
                    return (rounds, release.lease);
                }
                other => panic!("{other:?}"),
            }
        }
    };
    let serve = async {
        assert!(peer.grant(1, &memory).await.probe);
        assert_eq!(
            words(&mut peer, true).await,
            (2, 1),
            "by the CPU and by a GPU"
        );
        peer.grant(2, &memory).await;
        words(&mut peer, false).await.1
    };
    let work = async {
        let remote = client.fetch("x").go().await.unwrap();
        assert_eq!(
            *remote.proved(),
            Proof {
                cpu: true,
                gpu: Some(0),
                both_ways: true,
                why_not: None
            }
        );
        remote.release().await.unwrap();
        expect_err(client.fetch("x").go().await)
    };
    let (lease, error) = within(async { tokio::join!(serve, work) }).await;
    assert_eq!(lease, 2);
    assert!(matches!(error, Error::DataPlane { .. }), "{error}");
    nothing_held(&driver).await;
}

#[tokio::test]
async fn handle_types_that_do_not_go_are_told() {
    let (driver, mut fake) = (importer(), Fake::new().await);
    let options = fake.options().fabric(false);
    let (client, greeted) = tokio::join!(options.connect(&driver), fake.greet());
    assert!(!greeted.1.fabric);
    let error = expect_err(client.unwrap().fetch("x").go().await);
    assert!(
        matches!(&error, Error::NoCommonHandle { reasons } if reasons.len() == 2),
        "{error}"
    );
    // On the same machine, fds come first.
    fake.welcome.boot = BootId::current().unwrap();
    fake.welcome.door = Some("/nowhere/door".into());
    let (client, mut peer) = fake.client(&driver).await;
    let serve = async {
        let (id, ask) = peer.request().await.unwrap();
        let Ask::Fetch(fetch) = ask else {
            panic!("{ask:?}")
        };
        use crate::driver::HandleType::{Fabric, PosixFd};
        assert_eq!(fetch.accept, [PosixFd, Fabric]);
        peer.refuse(id, "no_common_handle").await;
        let (id, ask) = peer.request().await.unwrap();
        assert!(matches!(ask, Ask::Fetch(fetch) if fetch.accept == [Fabric]));
        peer.refuse(id, "not_found").await;
    };
    let work = async {
        for (fetch, reason) in [
            (client.fetch("x"), Refusal::NoCommonHandle),
            (
                client.fetch("x").via(crate::driver::HandleType::Fabric),
                Refusal::NotFound,
            ),
        ] {
            let error = expect_err(fetch.go().await);
            assert!(
                matches!(&error, Error::Refused { reason: r, .. } if *r == reason),
                "{error}"
            );
        }
    };
    within(async { tokio::join!(serve, work) }).await;
}
