//! Too many connections, sessions, fds and events, and too much at once.

use std::io::Read;
use std::os::fd::AsFd;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::hostile::{framed, hung_up, tcp};
use super::*;

/// Returns why a session is refused; it is a limit.
async fn refused(at: &Address) -> String {
    let mut raw = Raw::connect(at, &Security::Plain).await;
    let greeting = raw.greet(&hello()).await;
    let Greeting::Refused(refused) = greeting else {
        panic!("{greeting:?}")
    };
    assert_eq!(refused.reason, Refusal::Limit.word());
    raw.hung_up().await;
    refused.detail
}

#[tokio::test]
async fn there_are_so_many_connections() {
    let driver = driver();
    let mut limits = limits();
    (limits.connections, limits.connections_per_peer) = (3, 2);
    limits.handshake = LONG;
    limits.leases_per_peer = 1;
    let (_directory, address) = at_unix();
    let server = loopback().listen(address.clone()).limits(limits);
    let server = server.start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut one = Raw::open(&server).await;
    let two = Raw::open(&server).await;
    let why = refused(&server.addresses()[0]).await;
    assert_eq!(why, "2 connections of this peer");
    let (granted, _) = one.fetch(fetch("a")).await.unwrap();
    assert_eq!(one.fetch(fetch("a")).await.unwrap_err(), Refusal::Limit);
    let three = Raw::open_at(&address, &Security::Plain, &hello()).await;
    assert_eq!(refused(&address).await, "3 connections");
    // A client that has not said hello takes no other's place.
    let silent = [tcp(&server).await, tcp(&server).await];
    until("they are there", || server.stats().handshakes == 2).await;
    assert_eq!(server.stats().connections, 5);
    drop(three);
    until("it is gone", || server.stats().connections == 4).await;
    let three = Raw::open_at(&address, &Security::Plain, &hello()).await;
    one.release(granted.lease).await;
    drop((published, one, two, three, silent));
    close(server, &driver).await;
}

#[tokio::test]
async fn there_are_so_many_sessions_and_so_many_of_a_peer() {
    let driver = driver();
    let mut limits = limits();
    (limits.sessions, limits.sessions_per_peer) = (3, 2);
    let (_directory, address) = at_unix();
    let server = loopback().listen(address.clone()).limits(limits);
    let server = server.start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut one = Raw::open(&server).await;
    let (granted, _) = one.fetch(fetch("a")).await.unwrap();
    let two = Raw::open(&server).await;
    let why = refused(&server.addresses()[0]).await;
    assert_eq!(why, "2 sessions of this peer");
    // Another peer has its own, up to the limit of all.
    let three = Raw::open_at(&address, &Security::Plain, &hello()).await;
    assert_eq!(refused(&address).await, "3 sessions");
    drop(three);
    until("it has ended", || server.stats().sessions == 2).await;
    // A session that waits for its client counts, and can be resumed.
    one.connection.writer.finish().await;
    one.hung_up().await;
    until("it is gone", || server.stats().connections == 1).await;
    let why = refused(&server.addresses()[0]).await;
    assert_eq!(why, "2 sessions of this peer");
    let mut one = one.resume(&server, None).await;
    assert!(one.welcome().resumed);
    one.release(granted.lease).await;
    drop(one);
    until("it has ended", || server.stats().sessions == 1).await;
    let one = Raw::open(&server).await;
    drop((published, one, two));
    close(server, &driver).await;
}

/// More silent connections than there is room for, an earlier client, and a new one.
async fn crowd(server: ServerOptions, client: &Security) {
    const ROOM: usize = 8;
    let driver = driver();
    let limits = Limits {
        handshakes: ROOM,
        connections: 2,
        // No deadline lets the client in.
        handshake: LONG * 10,
        ..Limits::default()
    };
    let server = server.limits(limits).start().await.unwrap();
    let address = server.addresses()[0].clone();
    let mut before = Raw::open_at(&address, client, &hello()).await;
    let mut silent = Vec::new();
    for _ in 0..2 * ROOM {
        silent.push(tcp(&server).await);
    }
    let mut late = Raw::open_at(&address, client, &hello()).await;
    for raw in [&mut before, &mut late] {
        let (answer, _) = raw.ask(Ask::Ping(Empty {})).await;
        assert_eq!(answer, Answer::Done(Empty {}));
    }
    // The oldest gave way: one for each newcomer, and no more.
    hung_up(&mut silent[0]).await;
    let dropped = ROOM as u64 + 1;
    until("all are counted", || {
        let stats = server.stats();
        (stats.dropped_handshakes, stats.failed_handshakes) == (dropped, dropped)
    })
    .await;
    let stats = server.stats();
    assert_eq!(stats.handshakes as usize, ROOM - 1);
    assert_eq!(stats.connections as usize, ROOM + 1);
    drop((before, late));
    close(server, &driver).await;
    for mut stream in silent {
        hung_up(&mut stream).await;
    }
}

#[tokio::test]
async fn silent_connections_keep_nobody_out() {
    crowd(loopback(), &Security::Plain).await;
}

#[tokio::test]
async fn silent_connections_keep_nobody_out_that_has_a_certificate() {
    let authority = crate::certs::Authority::create("test", 1).unwrap();
    let server = loopback().security(tls(&authority, "server.test"));
    crowd(server, &tls(&authority, "client.test")).await;
}

impl Raw {
    /// Sends a request with `count` fds, and returns their other end.
    async fn ask_with_fds(&mut self, ask: Ask, count: usize) -> (Answer, std::io::PipeReader) {
        let (reader, writer) = std::io::pipe().unwrap();
        self.last += 1;
        let request = Request {
            id: self.last,
            ask: Some(ask),
        };
        let fds = vec![writer.as_fd(); count];
        let connection = &mut self.connection.writer;
        connection.write(&encode(&request), &fds).await.unwrap();
        drop(writer);
        (self.answer(self.last).await.0, reader)
    }

    /// Joins a group of its own, with that memory.
    async fn join(&mut self, group: &str, memory: &Shared) -> u64 {
        let join = Join {
            group: group.into(),
            rank: 0,
            size: 1,
            admission: everybody(),
            can: vec![HandleType::PosixFd],
            cannot: Vec::new(),
            memory: Some(memory.describe(Access::ReadWrite).unwrap()),
            ms: 60_000,
        };
        match self.ask(Ask::Join(join)).await.0 {
            Answer::Agreed(agreed) => agreed.round,
            other => panic!("{other:?}"),
        }
    }
}

fn offer(group: &str, round: u64) -> Ask {
    Ask::Offer(Offer {
        group: group.into(),
        round,
        fabric: Vec::new(),
        first: 0,
    })
}

fn reason(answer: Answer) -> String {
    match answer {
        Answer::Refused(refused) => refused.reason,
        other => panic!("{other:?}"),
    }
}

/// Waits until every copy of its other end is closed.
async fn closed(mut pipe: std::io::PipeReader) {
    let read = tokio::task::spawn_blocking(move || pipe.read(&mut [0]).unwrap());
    let read = tokio::time::timeout(LONG, read);
    assert_eq!(read.await.expect("it is kept open").unwrap(), 0);
}

#[tokio::test]
async fn fds_come_with_offers_of_ranks_that_have_joined_alone() {
    let driver = driver();
    let (_directory, address) = at_unix();
    let limits = Limits {
        frame: LONG * 10,
        ..Limits::default()
    };
    let server = Server::options().listen(address.clone()).limits(limits);
    let server = server.groups("*", Who::anyone());
    let server = server.start().await.unwrap();
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    // They are closed before the frame is complete.
    let Address::Unix(path) = &address else {
        panic!()
    };
    let mut stream = tokio::net::UnixStream::connect(path).await.unwrap();
    stream.write_all(&framed(&encode(&hello()))).await.unwrap();
    assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0, "a welcome");
    let (pipe, writer) = std::io::pipe().unwrap();
    let sent = crate::share::fd::send(stream.as_fd(), &[0], &[writer.as_fd()]);
    assert_eq!(sent.unwrap(), 1);
    drop(writer);
    closed(pipe).await;
    drop(stream);
    // The connection survives, and nothing is kept open.
    let (answer, pipe) = raw.ask_with_fds(offer("g", 1), 300).await;
    assert_eq!(reason(answer), Refusal::NotFound.word());
    closed(pipe).await;
    let (answer, pipe) = raw.ask_with_fds(Ask::Ping(Empty {}), 1).await;
    assert_eq!(reason(answer), Refusal::Invalid.word());
    closed(pipe).await;
    let shared = memory(&driver);
    raw.join("g", &shared).await;
    let (answer, pipe) = raw.ask_with_fds(Ask::Ping(Empty {}), 1).await;
    assert_eq!(reason(answer), Refusal::Invalid.word());
    closed(pipe).await;
    // At the fd socket, and in a hello, they violate the protocol.
    let fd_socket = Address::Unix(raw.welcome().door.clone().unwrap().into());
    let null = std::fs::File::open("/dev/null").unwrap();
    let ping = encode(&Request {
        id: 1,
        ask: Some(Ask::Ping(Empty {})),
    });
    let mut at_fd_socket = Raw::open_at(&fd_socket, &Security::Plain, &hello()).await;
    (at_fd_socket
        .connection
        .writer
        .write(&ping, &[null.as_fd()])
        .await)
        .unwrap();
    at_fd_socket.hung_up().await;
    let mut early = Raw::connect(&address, &Security::Plain).await;
    (early
        .connection
        .writer
        .write(&encode(&hello()), &[null.as_fd()])
        .await)
        .unwrap();
    early.hung_up().await;
    until("they are gone", || server.stats().connections == 1).await;
    assert_eq!(server.stats().fds, 0);
    drop((raw, shared));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_peer_has_so_many_fds_here() {
    let driver = driver();
    let mut limits = limits();
    (limits.fds_per_connection, limits.fds_per_peer) = (2, 3);
    let (_directory, address) = at_unix();
    let server = Server::options().listen(address.clone()).limits(limits);
    let server = server.groups("*", Who::anyone());
    let server = server.start().await.unwrap();
    let shared = memory(&driver);
    let published = server.publish("a", shared.clone()).now().unwrap();
    let mut one = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let mut two = Raw::open_at(&address, &Security::Plain, &hello()).await;
    // Everything that groups keep counts, fds sent to the client included.
    let mut rounds = Vec::new();
    for group in ["a", "b"] {
        let round = one.join(group, &shared).await;
        let (answer, pipe) = one.ask_with_fds(offer(group, round), 1).await;
        assert!(matches!(answer, Answer::Members(_)), "{answer:?}");
        rounds.push((group, round, pipe));
    }
    let refusal = one.fetch(fetch_fds("a")).await.unwrap_err();
    assert_eq!(refusal, Refusal::Limit, "of the connection");
    let third = two.join("c", &shared).await;
    let (answer, _pipe) = two.ask_with_fds(offer("c", third), 1).await;
    assert!(matches!(answer, Answer::Members(_)), "{answer:?}");
    let fourth = two.join("d", &shared).await;
    let (answer, pipe) = two.ask_with_fds(offer("d", fourth), 1).await;
    assert_eq!(reason(answer), Refusal::Limit.word(), "of the peer");
    closed(pipe).await;
    assert_eq!(two.fetch(fetch_fds("a")).await.unwrap_err(), Refusal::Limit);
    assert_eq!((server.stats().fds, server.stats().leases), (3, 0));
    // Closing fds makes room.
    let (group, round, pipe) = rounds.remove(0);
    let leave = Leave {
        group: group.into(),
        round,
        ms: 0,
    };
    let (answer, _) = one.ask(Ask::Leave(leave)).await;
    assert_eq!(answer, Answer::Done(Empty {}));
    closed(pipe).await;
    let (granted, fds) = two.fetch(fetch_fds("a")).await.unwrap();
    assert_eq!(fds.len(), 1);
    until("they are sent", || server.stats().fds == 2).await;
    let (answer, _pipe) = two.ask_with_fds(offer("d", fourth), 1).await;
    assert!(matches!(answer, Answer::Members(_)), "{answer:?}");
    two.release(granted.lease).await;
    drop((published, shared, one, two, fds, rounds));
    close(server, &driver).await;
}

#[tokio::test]
async fn fds_of_a_gather_are_kept_until_the_next() {
    let driver = driver();
    let (_directory, address) = at_unix();
    let server = Server::options().listen(address.clone());
    let server = server.groups("*", Who::anyone());
    let server = server.start().await.unwrap();
    let shared = memory(&driver);
    let described = shared.describe(Access::ReadWrite).unwrap();
    let gather = |round, number, operation| {
        Ask::Gather(Gather {
            group: "a".into(),
            round,
            number,
            operation,
            first: None,
            ms: 600_000,
        })
    };
    let brought = || {
        Operation::Memory(Brought {
            memory: Some(described.clone()),
            fabric: Vec::new(),
        })
    };
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    // Before it has joined, and of a round that is not its own.
    let (answer, pipe) = raw.ask_with_fds(gather(1, 1, brought()), 1).await;
    assert_eq!(reason(answer), Refusal::NotFound.word());
    closed(pipe).await;
    let round = raw.join("a", &shared).await;
    let (answer, pipe) = raw.ask_with_fds(gather(round ^ 1, 1, brought()), 1).await;
    assert_eq!(reason(answer), Refusal::NotFound.word());
    closed(pipe).await;
    let (answer, _offered) = raw.ask_with_fds(offer("a", round), 1).await;
    assert!(matches!(answer, Answer::Members(_)), "{answer:?}");
    let before = server.stats().fds;
    let (answer, first) = raw.ask_with_fds(gather(round, 1, brought()), 1).await;
    assert!(matches!(answer, Answer::Agreed(_)), "{answer:?}");
    assert_eq!(server.stats().fds, before + 1);
    let (answer, second) = raw.ask_with_fds(gather(round, 2, brought()), 1).await;
    assert!(matches!(answer, Answer::Agreed(_)), "{answer:?}");
    closed(first).await;
    assert_eq!(server.stats().fds, before + 1);
    // Those of a gather that fails are closed at once.
    for (number, operation, fds) in [(3, brought(), 2), (4, Operation::Barrier, 1)] {
        let (answer, pipe) = raw
            .ask_with_fds(gather(round, number, operation), fds)
            .await;
        assert!(matches!(answer, Answer::Incomplete(_)), "{answer:?}");
        closed(pipe).await;
    }
    assert_eq!(server.stats().fds, before + 1);
    let (answer, _) = raw.ask(gather(round, 5, Operation::Barrier)).await;
    assert_eq!(answer, Answer::Done(Empty {}));
    closed(second).await;
    drop((raw, shared));
    close(server, &driver).await;
}

fn news() -> Event {
    Event::Closing(Closing { ms: 0 })
}

#[tokio::test]
async fn a_peer_with_many_notices_is_heard_meanwhile() {
    const MUCH: usize = 5000;
    let driver = driver();
    let (_directory, address) = at_unix();
    let server = Server::options().listen(address.clone());
    let server = server.start().await.unwrap();
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let id = raw.send(Ask::Ping(Empty {})).await;
    for _ in 0..MUCH {
        server.handle.inner.state().tell_all(&news());
    }
    let (answer, _) = raw.answer(id).await;
    assert_eq!(answer, Answer::Done(Empty {}));
    let before = raw.notices.len();
    assert!(before < MUCH / 2, "{before} notices before the answer");
    for _ in 0..MUCH {
        assert_eq!(raw.notice().await, news(), "and all are told");
    }
    drop(raw);
    close(server, &driver).await;
}

#[tokio::test]
async fn news_without_end_is_no_sign_of_life() {
    let driver = driver();
    let (_directory, address) = at_unix();
    let server = Server::options().listen(address.clone());
    let server = server
        .heartbeat(short())
        .lease(soon_over())
        .start()
        .await
        .unwrap();
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let telling = tokio::spawn({
        let server = server.clone();
        async move {
            while server.stats().sessions > 0 {
                server.handle.inner.state().tell_all(&news());
                tokio::task::yield_now().await;
            }
        }
    });
    raw.hung_up().await;
    telling.await.unwrap();
    assert_eq!(server.stats().dropped_peers, 1);
    close(server, &driver).await;
}
