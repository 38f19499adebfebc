//! Fds that come with requests, and their limits.

use std::io::Read;
use std::os::fd::AsFd;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::hostile::framed;
use super::*;

impl Raw {
    /// Sends a request with `count` fds, and returns their other end.
    async fn ask_with_fds(&mut self, ask: Ask, count: usize) -> (Answer, std::io::PipeReader) {
        let (reader, writer) = std::io::pipe().unwrap();
        self.last += 1;
        let request = (self.last, ask);
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
    let limits = Limits {
        frame: LONG * 10,
        ..Limits::default()
    };
    let options = Server::options().limits(limits);
    let (_directory, address, server) = start_at_unix(options.groups("*", Who::anyone())).await;
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
    let (answer, pipe) = raw.ask_with_fds(Ask::Ping, 1).await;
    assert_eq!(reason(answer), Refusal::Invalid.word());
    closed(pipe).await;
    let shared = memory(&driver);
    raw.join("g", &shared).await;
    let (answer, pipe) = raw.ask_with_fds(Ask::Ping, 1).await;
    assert_eq!(reason(answer), Refusal::Invalid.word());
    closed(pipe).await;
    // In a hello they violate the protocol.
    let null = std::fs::File::open("/dev/null").unwrap();
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
    let options = Server::options().limits(limits);
    let (_directory, address, server) = start_at_unix(options.groups("*", Who::anyone())).await;
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
    assert_eq!(answer, Answer::Done);
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
    let options = Server::options().groups("*", Who::anyone());
    let (_directory, address, server) = start_at_unix(options).await;
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
    assert_eq!(answer, Answer::Done);
    closed(second).await;
    drop((raw, shared));
    close(server, &driver).await;
}
