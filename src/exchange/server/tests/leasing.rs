use super::*;
use crate::Error;
use crate::exchange::server::leases::MAX_EXPIRED;
use crate::exchange::server::process::Process;
use crate::exchange::server::{HolderState, ServerEvent};

/// A server whose leases end soon after their holder's last word.
async fn hasty() -> Server {
    let options = loopback().heartbeat(LEASE / 4).lease(LEASE);
    options.start().await.unwrap()
}

/// Members of a group are forgotten in time, whether or not anybody asks for them.
#[tokio::test]
async fn the_janitor_forgets_a_groups_members() {
    let driver = driver();
    // They are kept this long and a lease: enough to be asked for twice on a busy machine.
    let limits = Limits {
        request: LEASE * 3,
        ..limits()
    };
    let options = loopback().heartbeat(LEASE / 4).lease(LEASE);
    let server = options.limits(limits).start().await.unwrap();
    let mut raw = Raw::open(&server).await;
    let join = Join {
        group: "g".into(),
        rank: 0,
        size: 1,
        can: vec![HandleType::Fabric],
        cannot: vec![],
        memory: None,
        ms: 1000,
    };
    let Answer::Agreed(agreed) = raw.ask(Ask::Join(join)).await.0 else {
        panic!()
    };
    let offer = Ask::Offer(Offer {
        group: "g".into(),
        round: agreed.round,
        fabric: vec![],
        first: 0,
    });
    for _ in 0..2 {
        let (answer, _) = raw.ask(offer.clone()).await;
        assert!(matches!(answer, Answer::Members(_)), "{answer:?}");
    }
    let groups = &server.handle.inner.groups;
    let begun = std::time::Instant::now();
    while groups.deadline().is_some() {
        assert!(begun.elapsed() < LONG);
        raw.ask(Ask::Ping(Empty {})).await;
        tokio::time::sleep(LEASE / 20).await;
    }
    assert_eq!(groups.len(), 1, "it is a group all the same");
    assert_eq!(raw.refusal(offer).await, Refusal::Stale);
    drop(raw);
    close(server, &driver).await;
}

#[tokio::test]
async fn holders_are_asked_and_waited_for() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let holder = async {
        let Event::Withdrawing(notice) = raw.notice().await else {
            panic!()
        };
        assert_eq!(notice.lease, granted.lease);
        assert!(notice.ms <= LONG.as_millis() as u64 && notice.ms > 0);
        assert_eq!(raw.fetch(fetch("a")).await.unwrap_err(), Refusal::Closing);
        assert!(raw.names("").await.is_empty());
        raw.release(granted.lease).await;
    };
    let (memory, ()) = tokio::join!(published.withdraw(LONG), holder);
    assert_eq!(memory.unwrap().len(), MIB);
    assert_eq!(raw.fetch(fetch("a")).await.unwrap_err(), Refusal::NotFound);
    // The name is free again, and other memory under it is another publication.
    let again = server
        .publish("a", published.shared().clone())
        .now()
        .unwrap();
    drop(published);
    assert_eq!(raw.names("").await, ["a"]);
    drop((again, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn who_was_away_is_asked_when_it_comes_back() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let Raw {
        connection,
        welcome,
        ..
    } = raw;
    drop(connection);
    until("it is noticed", || server.stats().connections == 0).await;
    let holder = async {
        until("it is withdrawn", || {
            published.importers()[0].state == HolderState::Withdrawing
        })
        .await;
        let hello = Hello {
            resume: welcome.map(|welcome| welcome.session),
            held: Some(vec![granted.lease]),
            ..hello()
        };
        let address = &server.addresses()[0];
        let mut raw = Raw::open_at(address, &Security::Plain, &hello).await;
        let Event::Withdrawing(notice) = raw.notice().await else {
            panic!()
        };
        assert_eq!(notice.lease, granted.lease);
        assert!(notice.ms > 1000, "{}", notice.ms);
        raw.release(granted.lease).await;
    };
    let (memory, ()) = tokio::join!(published.withdraw(LONG), holder);
    memory.unwrap();
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn who_still_holds_is_named() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let error = published.withdraw(SHORT / 3).await.unwrap_err();
    let Error::StillHeld { name, holders } = error else {
        panic!("{error}");
    };
    assert_eq!((&*name, holders.len()), ("a", 1));
    assert!(holders[0].starts_with("local (for "), "{holders:?}");
    assert_eq!(published.importers()[0].state, HolderState::Withdrawing);
    // Given up, it ends for the holder without its doing.
    drop(published);
    loop {
        if let Event::Ended(ended) = raw.notice().await {
            assert_eq!(ended.lease, granted.lease);
            assert_eq!(ended.why.reason, Refusal::Closing.word());
            break;
        }
    }
    drop(raw);
    close(server, &driver).await;
}

#[tokio::test]
async fn a_silent_holder_expires_and_stays_doubted() {
    let driver = driver();
    // A peer with a name: any local process could be another one over plain TCP.
    let (_directory, address) = at_unix();
    let options = Server::options().listen(address).heartbeat(LEASE / 4);
    let server = options.lease(LEASE).start().await.unwrap();
    let mut events = server.events();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    // It neither speaks nor hangs up.
    loop {
        let event = tokio::time::timeout(LONG, events.recv()).await.unwrap();
        if let ServerEvent::LeaseExpired { lease, name, .. } = event.unwrap() {
            assert_eq!((lease, &*name), (granted.lease, "a"));
            break;
        }
    }
    raw.hung_up().await;
    assert_eq!(server.stats().dropped_peers, 1);
    let error = published.withdraw(LONG).await.unwrap_err();
    assert!(error.to_string().contains("may still have it"), "{error}");
    // Its session is no more, but it can say that it has unmapped the memory.
    let mut raw = raw.resume(&server, Some(vec![granted.lease])).await;
    assert!(!raw.welcome().resumed);
    raw.release(granted.lease).await;
    published.withdraw(Duration::ZERO).await.unwrap();
    drop((published, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_name_goes_and_its_silent_holder_is_still_listened_to() {
    let driver = driver();
    let (_directory, address) = at_unix();
    let options = Server::options().listen(address).heartbeat(LEASE / 4);
    let server = options.lease(LEASE).start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    until("it is silent", || server.stats().expired == 1).await;
    raw.hung_up().await;
    let doubt = published.leave();
    drop(published);
    // The memory is the server's no more, and the name is free.
    gone(&driver);
    let again = server.publish("a", memory(&driver)).now().unwrap();
    {
        let resolved = std::pin::pin!(doubt.resolved());
        let waited = tokio::time::timeout(Duration::ZERO, resolved).await;
        waited.expect_err("it has said nothing, and its process runs");
    }
    let hear = async { tokio::time::timeout(LONG, doubt.resolved()).await.unwrap() };
    let say = async {
        let mut raw = raw.resume(&server, Some(vec![granted.lease])).await;
        raw.release(granted.lease).await;
    };
    let (heard, ()) = tokio::join!(hear, say);
    assert!(heard);
    drop((again, doubt));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_doubt_ends_with_the_processes_however_many_there_were() {
    let driver = driver();
    let (_directory, address) = at_unix();
    let options = Server::options().listen(address).heartbeat(LEASE / 4);
    let server = options.lease(LEASE).start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let count = MAX_EXPIRED as u32 + 1;
    for n in 0..count {
        let ask = Fetch {
            probe: false,
            ..fetch("a")
        };
        let (granted, _) = raw.fetch(ask).await.unwrap();
        let process = Process::without(n);
        let inner = &server.handle.inner;
        (inner.state().leases).set_process(granted.lease, process);
    }
    drop(raw);
    until("it is silent", || {
        server.stats().expired == u64::from(count)
    })
    .await;
    assert!(published.withdraw(Duration::ZERO).await.is_err());
    let doubt = published.leave();
    drop(published);
    let resolved = tokio::time::timeout(LONG, doubt.resolved()).await;
    assert!(resolved.unwrap());
    drop(doubt);
    close(server, &driver).await;
}

/// Only a machine that starts anew has certainly nothing mapped of what it had before.
#[cfg(feature = "certs")]
#[tokio::test]
async fn a_doubt_ends_when_the_holders_machine_has_started_anew() {
    let driver = driver();
    let authority = crate::certs::Authority::create("test", 1).unwrap();
    let options = loopback().security(tls(&authority, "server.test"));
    // Nobody is silent for as long as the test takes.
    let options = options.heartbeat(LONG).lease(LONG);
    let server = options.start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let address = server.addresses()[0].clone();
    let boot = |n| Hello {
        boot: BootId::from_bytes([n; 16]),
        ..hello()
    };
    let [node, other] = ["node.test", "other.test"].map(|name| tls(&authority, name));
    let mut raw = Raw::open_at(&address, &node, &boot(1)).await;
    raw.fetch(fetch("a")).await.unwrap();
    drop(raw);
    until("it is noticed", || server.stats().connections == 0).await;
    (server.handle.inner).expire(std::time::Instant::now() + 2 * LONG);
    assert_eq!(server.stats().expired, 1);
    let doubt = published.leave();
    drop(published);
    let unresolved = async |why| {
        let waited = tokio::time::timeout(Duration::ZERO, doubt.resolved()).await;
        waited.expect_err(why);
    };
    unresolved("nobody came").await;
    let other = Raw::open_at(&address, &other, &boot(2)).await;
    unresolved("somebody else came").await;
    let before = Raw::open_at(&address, &node, &boot(1)).await;
    let after = Raw::open_at(&address, &node, &boot(2)).await;
    unresolved("the same machine is there still").await;
    drop(before);
    let resolved = tokio::time::timeout(LONG, doubt.resolved()).await;
    assert!(resolved.unwrap());
    drop((doubt, other, after));
    close(server, &driver).await;
}

#[tokio::test]
async fn nobody_listens_any_more_when_the_server_has_ended() {
    let driver = driver();
    let (_directory, address) = at_unix();
    let server = Server::options().listen(address).start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    raw.fetch(fetch("a")).await.unwrap();
    let doubt = published.leave();
    drop(published);
    // It holds it, and the server waits for that to change.
    assert_eq!(server.stats().leases, 1);
    let end = async {
        server.close(Duration::ZERO).await.unwrap();
    };
    let (heard, ()) = tokio::join!(doubt.resolved(), end);
    assert!(!heard);
    drop((doubt, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn pings_keep_a_lease() {
    let driver = driver();
    let server = hasty().await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let begun = std::time::Instant::now();
    while begun.elapsed() < 2 * LEASE {
        let (answer, _) = raw.ask(Ask::Ping(Empty {})).await;
        assert_eq!(answer, Answer::Done(Empty {}));
        tokio::time::sleep(SHORT / 20).await;
    }
    assert_eq!(published.importers()[0].state, HolderState::Held);
    raw.release(granted.lease).await;
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn a_session_outlives_its_connection() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (kept, _) = raw.fetch(fetch("a")).await.unwrap();
    let (lost, _) = raw.fetch(fetch("a")).await.unwrap();
    // The connection before need not have ended: the cut may not have been noticed.
    let mut again = raw.resume(&server, Some(vec![kept.lease, 99])).await;
    assert!(again.welcome().resumed);
    raw.hung_up().await;
    let Event::Ended(ended) = again.notice().await else {
        panic!()
    };
    assert_eq!(
        (ended.lease, &*ended.why.reason),
        (99, Refusal::Expired.word())
    );
    assert_eq!(
        published.importers().len(),
        1,
        "{} never arrived",
        lost.lease
    );
    drop(raw);
    drop(again.connection.reader);
    drop(again.connection.writer);
    until("it is noticed", || server.stats().connections == 0).await;
    let stats = server.stats();
    assert_eq!((stats.sessions, stats.leases), (1, 1));
    let hello = Hello {
        resume: Some(again.welcome.unwrap().session),
        ..hello()
    };
    let address = &server.addresses()[0];
    let mut again = Raw::open_at(address, &Security::Plain, &hello).await;
    assert!(again.welcome().resumed);
    again.release(kept.lease).await;
    assert_eq!(server.stats().resumed, 2);
    drop((published, again));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_session_is_its_own_peers_alone() {
    let driver = driver();
    let (_directory, address) = at_unix();
    let server = loopback().listen(address.clone()).start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    assert_eq!(
        raw.welcome().local.as_ref().map(PathBuf::from),
        Some(address.to_string().trim_start_matches("unix:").into())
    );
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let token = raw.welcome().session.clone();
    let mut guess = token.expose().to_vec();
    guess[20] ^= 1;
    for (at, token) in [
        (&address, token.clone()),
        (&server.addresses()[0], Secret::new(&guess).unwrap()),
    ] {
        let hello = Hello {
            resume: Some(token),
            ..hello()
        };
        let mut other = Raw::open_at(at, &Security::Plain, &hello).await;
        assert!(!other.welcome().resumed);
        let release = Release {
            lease: granted.lease,
        };
        assert_eq!(
            other.refusal(Ask::Release(release)).await,
            Refusal::NotFound
        );
    }
    raw.release(granted.lease).await;
    drop((published, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn the_end_is_announced_and_who_does_not_let_go_is_named() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let client = async {
        assert!(matches!(raw.notice().await, Event::Closing(_)));
        assert_eq!(raw.fetch(fetch("a")).await.unwrap_err(), Refusal::Closing);
        let Event::Ended(ended) = raw.notice().await else {
            panic!()
        };
        assert_eq!(ended.lease, granted.lease);
        raw.hung_up().await;
    };
    let (closed, ()) = tokio::join!(server.close(LEASE), client);
    assert!(matches!(closed, Err(Error::StillHeld { .. })), "{closed:?}");
    assert_eq!(server.stats().tasks, 0);
    let refused = server.publish("b", memory(&driver)).now().unwrap_err();
    let Error::Refused { reason, .. } = refused else {
        panic!("{refused}");
    };
    assert_eq!(reason, Refusal::Closing);
    drop((published, server));
    gone(&driver);
}

#[tokio::test]
async fn dropped_it_ends_too() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    drop(server);
    raw.hung_up().await;
    drop(published);
    gone(&driver);
}

#[tokio::test]
async fn time_in_which_nothing_ran_is_no_silence() {
    let driver = driver();
    let server = hasty().await;
    let mut raw = Raw::open(&server).await;
    assert!(matches!(
        raw.ask(Ask::Ping(Empty {})).await.0,
        Answer::Done(_)
    ));
    // Both ends are in this thread.
    std::thread::sleep(LEASE * 2);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(matches!(
        raw.ask(Ask::Ping(Empty {})).await.0,
        Answer::Done(_)
    ));
    // But silence is.
    raw.hung_up().await;
    close(server, &driver).await;
}

#[tokio::test]
async fn for_ever_is_no_overflow() {
    let driver = driver();
    let options = loopback().lease(Duration::MAX).ticket(Duration::MAX);
    let server = options.start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let (memory, ()) = tokio::join!(
        published.withdraw(Duration::MAX),
        raw.release(granted.lease)
    );
    assert!(memory.is_ok());
    drop((memory, published, raw));
    server.close(Duration::MAX).await.unwrap();
    drop(server);
    gone(&driver);
}
