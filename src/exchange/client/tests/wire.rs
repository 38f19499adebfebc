//! Faults on the wire, and connections that are not established.

use super::leases::pass;
use super::*;
use crate::{Machine, ShareError};

/// Returns the error that ends the connection: the pending request fails, and the client reconnects.
async fn broken_by(wrong: impl AsyncFnOnce(&mut Peer)) -> Error {
    let (driver, fake) = (importer(), Fake::new().await);
    let (client, mut peer) = fake.client(&driver).await;
    let (error, _next) = within(async {
        tokio::join!(
            // Sent once only.
            client.call(Ask::Ping, LONG),
            async {
                let _: Request = decode(&peer.frame().await.unwrap()).unwrap();
                wrong(&mut peer).await;
                fake.greet().await
            }
        )
    })
    .await;
    error.expect_err("broken")
}

#[tokio::test]
async fn frames_that_break_the_protocol_end_the_connection() {
    let garbage = broken_by(async |peer| peer.raw(b"\xff\x00garbage").await).await;
    assert!(
        matches!(garbage, Error::Share(ShareError::Protocol { .. })),
        "{garbage}"
    );
    let empty = broken_by(async |peer| peer.raw(b"").await).await;
    assert!(
        matches!(empty, Error::Share(ShareError::Protocol { .. })),
        "{empty}"
    );
    let unasked = broken_by(async |peer| peer.done(4711).await).await;
    assert!(
        matches!(unasked, Error::Share(ShareError::Protocol { .. })),
        "{unasked}"
    );
    let huge = broken_by(async |peer| {
        use tokio::io::AsyncWriteExt;
        peer.0.write_u32(u32::MAX).await.unwrap();
    })
    .await;
    assert!(
        matches!(huge, Error::Share(ShareError::Protocol { .. })),
        "{huge}"
    );
}

#[tokio::test]
async fn a_connection_that_ends_is_told_and_made_anew() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    // In the middle of a frame; a list can be requested twice.
    let serve = async {
        use tokio::io::AsyncWriteExt;
        peer.request().await.unwrap();
        peer.0.write_all(&[0, 0, 1, 0, 0xa2]).await.unwrap();
        drop(peer);
        let (mut peer, _) = fake.greet().await;
        let (id, _) = peer.request().await.unwrap();
        peer.answer(id, names(vec![memory.entry("x")], false)).await;
        // A fetch cannot.
        peer.request().await.unwrap();
        drop(peer);
        fake.greet().await
    };
    let work = async {
        assert_eq!(client.list("").await.unwrap().len(), 1);
        expect_err(client.fetch("x").go().await)
    };
    let (_, error) = within(async { tokio::join!(serve, work) }).await;
    assert!(
        matches!(error, Error::Share(ShareError::PeerLost { .. })),
        "{error}"
    );
}

#[tokio::test]
async fn unknown_fields_are_skipped() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (client, mut peer) = fake.client(&driver).await;
    let serve = async {
        // {"event": {"closing": {"ms": 1, "tomorrow": {}}}}
        peer.raw(b"\xa1\x65event\xa1\x67closing\xa2\x62ms\x01\x68tomorrow\xa0")
            .await;
        let (id, _) = peer.request().await.unwrap();
        // {"reply": [id, {"names": {"entries": [], "tomorrow": {}}}]}
        let body = b"\xa1\x65names\xa2\x67entries\x80\x68tomorrow\xa0";
        peer.raw(&[b"\xa1\x65reply\x82", &[id as u8][..], body].concat())
            .await;
    };
    let work = async { client.list("").await.unwrap() };
    within(async { tokio::join!(serve, work) }).await;
}

#[tokio::test]
async fn requests_have_deadlines_and_limits() {
    // No heartbeat is due within the test.
    let mut fake = Fake::new().await.times(80_000_000, 86_000_000);
    let driver = importer();
    fake.welcome.frame_bytes = 200;
    let mut options = fake.options();
    options.limits.requests_in_flight = 2;
    let (client, mut peer) = fake.client_of(options, &driver).await;
    let error = expect_err(within(client.list(&"x".repeat(300))).await);
    assert!(
        matches!(error, Error::LimitReached { limit: 200, .. }),
        "{error}"
    );
    // More requests than may be in flight: they wait for each other, but not forever.
    tokio::time::pause();
    let lists = (0..4).map(|_| client.list(""));
    for list in lists.collect::<Vec<_>>() {
        let error = expect_err(list.await);
        assert!(
            matches!(error, Error::Share(ShareError::TimedOut { .. })),
            "{error}"
        );
    }
    tokio::time::resume();
    // Late answers are valid.
    for _ in 0..2 {
        let (id, _) = peer.request().await.unwrap();
        peer.answer(id, names(vec![], false)).await;
    }
    let (list, ()) = within(async {
        tokio::join!(client.call(Ask::List(List::default()), LONG), async {
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, names(vec![], false)).await;
        })
    })
    .await;
    list.unwrap();
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_waited_for_as_long_as_the_client_says() {
    // No heartbeat is due within the test.
    let fake = Fake::new().await.times(80_000_000, 86_000_000);
    let driver = importer();
    // Connecting may take as long, on a busy machine.
    let timeout = LONG;
    let (client, _peer) = fake
        .client_of(fake.options().timeout(timeout), &driver)
        .await;
    tokio::time::pause();
    let begun = tokio::time::Instant::now();
    let mut errors = Vec::new();
    errors.push(client.list("").await.map(drop));
    errors.push(client.list("").await.map(drop));
    errors.push(client.fetch("x").go().await.map(drop));
    errors.push(
        client
            .create_or_get(CreateOptions::new("x", 1))
            .await
            .map(drop),
    );
    errors.push(client.wait("x", Duration::ZERO).await.map(drop));
    errors.push(client.wait("x", timeout).await.map(drop));
    let each = begun.elapsed() / 6;
    assert!(each >= timeout && each < timeout + soon(100), "{each:?}");
    for error in errors {
        let error = expect_err(error);
        assert!(
            matches!(error, Error::Share(ShareError::TimedOut { .. })),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_greeting_may_be_a_refusal_or_wrong_or_never_come() {
    let (driver, fake) = (importer(), Fake::new().await);
    let refusal = async {
        let mut peer = fake.accept().await;
        peer.frame().await.unwrap();
        peer.send(&Greeting::Refused(Refused {
            reason: "version".into(),
            detail: "7 to 9".into(),
        }))
        .await;
    };
    let connect = || fake.options().connect(&driver);
    let (refused, ()) = within(async { tokio::join!(connect(), refusal) }).await;
    let error = expect_err(refused);
    assert!(
        matches!(
            &error,
            Error::Refused {
                reason: Refusal::Version,
                ..
            }
        ),
        "{error}"
    );
    let mut welcomes = vec![fake.welcome.clone(); 2];
    welcomes[0].version = VERSION + 1;
    welcomes[1].resumed = true;
    for welcome in welcomes {
        let wrong = async {
            let mut peer = fake.accept().await;
            peer.frame().await.unwrap();
            peer.send(&Greeting::Welcome(welcome)).await;
        };
        let error = expect_err(within(async { tokio::join!(connect(), wrong) }).await.0);
        assert!(
            matches!(error, Error::Share(ShareError::Protocol { .. })),
            "{error}"
        );
    }
    let silent = async {
        let _peer = fake.accept().await;
        std::future::pending::<()>().await;
    };
    let patient = fake.options().timeout(soon(60)).connect(&driver);
    let error = within(async {
        tokio::select! { client = patient => expect_err(client), () = silent => unreachable!() }
    })
    .await;
    assert!(
        matches!(error, Error::Share(ShareError::TimedOut { .. })),
        "{error}"
    );
}

#[tokio::test]
async fn nobody_there_is_told_at_once_or_waited_for() {
    let driver = importer();
    let fake = Fake::new().await;
    let (options, late) = (fake.options(), fake.options());
    drop(fake);
    let error = expect_err(within(options.connect(&driver)).await);
    assert!(
        matches!(error, Error::Share(ShareError::Unreachable { .. })),
        "{error}"
    );
    let late = late.patient(true).timeout(soon(100));
    let never = Reconnect::backoff(Duration::MAX, Duration::MAX);
    for late in [late.clone(), late.reconnect(never)] {
        let error = expect_err(within(late.connect(&driver)).await);
        assert!(
            matches!(
                error,
                Error::Share(ShareError::Unreachable { .. } | ShareError::TimedOut { .. })
            ),
            "{error}"
        );
    }
}

#[tokio::test]
async fn without_reconnecting_the_end_is_the_end() {
    let (driver, fake, memory) = (importer(), Fake::new().await, Memory::new());
    let options = fake.options().reconnect(Reconnect::never());
    let (client, mut peer) = fake.client_of(options, &driver).await;
    let (remote, _) = tokio::join!(client.fetch("x").probe(false).go(), peer.grant(5, &memory));
    let remote = remote.unwrap();
    drop(peer);
    assert!(within(remote.changed()).await.is_lost());
    let error = expect_err(within(client.list("")).await);
    assert!(
        matches!(error, Error::Share(ShareError::PeerLost { .. })),
        "{error}"
    );
    drop(remote);
    nothing_held(&driver).await;
    within(client.close()).await;
}

#[tokio::test]
async fn agents_are_cut() {
    let fake = Fake::new().await;
    let options = fake.options().agent("x".repeat(400));
    assert_eq!(options.agent.len(), 255);
}

/// A client that may take 10 s to connect: without fabric handles here and a slow greeting at the socket, or none, and with
/// fabric handles.
#[tokio::test(start_paused = true)]
async fn a_slow_greeting_at_the_socket_is_waited_for_where_only_that_serves_a_fetch() {
    for (machine, greets, seconds) in [
        (Machine::gh200x4(), true, 9.9),
        (Machine::gh200x4(), false, 10.0),
        (Machine::gh200(), false, 2.5),
    ] {
        // While such a task runs, the clock moves only as the test says.
        let (end, ended) = std::sync::mpsc::channel::<()>();
        tokio::task::spawn_blocking(move || ended.recv());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let socket = tokio::net::UnixListener::bind(&path).unwrap();
        let mut fake = Fake::new().await.times(2000, 10_000);
        fake.welcome.boot = BootId::current().unwrap();
        fake.welcome.local = path.to_str().map(str::to_owned);
        let options = fake.options().timeout(Duration::from_secs(10));
        let driver = Driver::simulated(machine).unwrap();
        let connecting = tokio::spawn(async move { options.connect(&driver).await });
        let mut tcp = fake.accept().await;
        tcp.hello(&fake.welcome).await;
        let mut unix = Peer::at(&socket).await;
        let hello: Hello = decode(&unix.frame().await.unwrap()).unwrap();
        assert!(hello.moves);
        tokio::time::advance(Duration::from_secs_f64(seconds - 0.1)).await;
        if greets {
            let resumed = true;
            let welcome = Welcome {
                resumed,
                ..fake.welcome.clone()
            };
            unix.send(&Greeting::Welcome(welcome)).await;
        } else {
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert!(!connecting.is_finished());
            tokio::time::advance(soon(200)).await;
        }
        let client = connecting.await.unwrap().unwrap();
        let terms = client.session().terms();
        assert_eq!((terms.unix, terms.no_unix.is_none()), (greets, greets));
        // Behind the pings of the meantime.
        let serving = if greets { &mut unix } else { &mut tcp };
        let serve = async {
            let (id, _list) = serving.request().await.unwrap();
            serving.answer(id, names(vec![], false)).await;
        };
        let (list, ()) = tokio::join!(client.list(""), serve);
        assert_eq!(list.unwrap(), []);
        drop(end);
    }
}

/// A server at a Unix socket that reads no more, and sends nothing: writes fail, and reads have no end.
struct Deaf {
    client: Client,
    _peer: Peer,
    _folder: tempfile::TempDir,
    /// While it lives, the clock moves only as the test says.
    _clock: std::sync::mpsc::Sender<()>,
}

impl Deaf {
    async fn with_heartbeat(ms: u64) -> Self {
        let (clock, ended) = std::sync::mpsc::channel::<()>();
        tokio::task::spawn_blocking(move || ended.recv());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let socket = tokio::net::UnixListener::bind(&path).unwrap();
        let fake = Fake::new().await.times(ms, 600_000);
        let mut options = fake.options();
        options.address = Address::Unix(path);
        options.limits.write = LONG;
        let driver = importer();
        let serve = async {
            let stream = socket.accept().await.unwrap().0.into_std().unwrap();
            let same = stream.try_clone().unwrap();
            let stream = tokio::net::UnixStream::from_std(stream).unwrap();
            let mut peer = Peer(Box::new(stream), Vec::new());
            peer.hello(&fake.welcome).await;
            same.shutdown(std::net::Shutdown::Read).unwrap();
            peer
        };
        let (client, peer) = tokio::join!(options.connect(&driver), serve);
        Self {
            client: client.unwrap(),
            _peer: peer,
            _folder: folder,
            _clock: clock,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_cannot_write_reads_on_for_a_heartbeat() {
    let deaf = Deaf::with_heartbeat(2000).await;
    let is_down = |link: &session::Link| matches!(link, session::Link::Down { .. }).then_some(());
    tokio::select! {
        () = deaf.client.session().link_is(is_down) => {}
        // The next ping comes after half a heartbeat at most.
        () = pass(100, 35) => panic!("still connected"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_cannot_write_ends_as_soon_as_it_is_closed() {
    let deaf = Deaf::with_heartbeat(200_000).await;
    let other = deaf.client.clone();
    let is_user = |request: &session::Request| request.user.is_some();
    let ends = async {
        while !other.session().lock().pending.values().any(is_user) {
            tokio::task::yield_now().await;
        }
        // The task that has taken the request from the queue has written it, which failed, before it let others run.
        other.close().await;
    };
    tokio::select! {
        (list, ()) = async { tokio::join!(deaf.client.list(""), ends) } => {
            expect_err(list);
        }
        () = pass(100, 35) => panic!("still connected"),
    }
}
