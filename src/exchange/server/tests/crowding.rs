//! Too many connections, sessions, fds and events, and too much at once.

use tokio::io::AsyncWriteExt;

use super::hostile::{hung_up, raise_fd_limit, tcp};
use super::*;
use crate::server::connection;

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
    let (_directory, address, server) = start_at_unix(loopback().limits(limits)).await;
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
    let (_directory, address, server) = start_at_unix(loopback().limits(limits)).await;
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
    let mut one = one.resume(&server).await;
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
        let (answer, _) = raw.ask(Ask::Ping).await;
        assert_eq!(answer, Answer::Done);
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_hellos_keep_nobody_out() {
    raise_fd_limit();
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let half = |len: u32| [&len.to_be_bytes()[..], &vec![0; len as usize / 2 + 1]].concat();
    let mut halves = Vec::new();
    for half in [half(256 << 10), half(4 << 10)] {
        for _ in 0..490 {
            let mut stream = tcp(&server).await;
            // The server may have closed it.
            let _ = stream.write_all(&half).await;
            halves.push(stream);
        }
    }
    let mut raw = Raw::open(&server).await;
    assert_eq!(raw.ask(Ask::Ping).await.0, Answer::Done);
    drop((raw, halves));
    close(server, &driver).await;
}

/// Large answers have few permits: only they wait for one, and no longer than their session lasts.
#[tokio::test]
async fn large_answers_that_a_peer_does_not_read_hold_up_only_large_ones() {
    let driver = driver();
    let options = options().limits(limits());
    let (_directory, address, server) = start_at_unix(options).await;
    let peer = PeerName::User(rustix::process::geteuid().as_raw());
    let name = |parts: u64| {
        let buffer = Buffer::on(NodeId(0)).bytes(parts * 2 * MIB).shareable();
        let buffer = buffer.chunk(2 * MIB).allocate(&driver).unwrap();
        let name = format!("{parts}-parts");
        server.publish(name, buffer).now().unwrap()
    };
    // The answer about one does not fit into a socket, and that about the other does.
    let published = [name(2048), name(400)];
    let list = |of: &Published| {
        let prefix = of.name().into();
        Ask::List(List {
            prefix,
            after: None,
        })
    };
    let (long, short) = (list(&published[0]), list(&published[1]));
    let open = async || Raw::open_at(&address, &Security::Plain, &hello()).await;
    let mut unread = Vec::new();
    for _ in 0..4 {
        let mut raw = open().await;
        raw.send(long.clone()).await;
        unread.push(raw);
    }
    let writes = server.handle.inner.quota.large(&peer);
    let is_taken = || {
        let permit = std::pin::pin!(writes.clone().permit());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        permit.poll(&mut context).is_pending()
    };
    until("all permits are taken", is_taken).await;
    let [mut raw, mut other] = [open().await, open().await];
    let mut ids = Vec::new();
    for raw in [&mut raw, &mut other] {
        ids.push(raw.send(short.clone()).await);
        assert!(
            raw.is_answered().await,
            "the large answer is not waited for"
        );
    }
    drop(unread.pop());
    let (answer, _) = raw.answer(ids[0]).await;
    assert!(matches!(answer, Answer::Names(names) if names.entries.len() == 1));
    // The other one may have taken the permit first; now it waits again.
    drop(raw);
    other.answer(ids[1]).await;
    let mut raw = open().await;
    raw.send(long.clone()).await;
    unread.push(raw);
    until("all permits are taken again", is_taken).await;
    other.send(short.clone()).await;
    assert!(other.is_answered().await);
    server.end_sessions(&peer);
    assert!(matches!(other.notice().await, Event::Dismissed(_)));
    other.hung_up().await;
    drop((unread, published));
    until("they are gone", || server.stats().connections == 0).await;
    close(server, &driver).await;
}

#[tokio::test]
async fn a_large_answer_waits_for_its_permit_for_the_time_of_a_write_and_nothing_is_granted() {
    const PARTS: u64 = 300;
    let driver = driver();
    let limits = Limits {
        write: ms(50),
        ..limits()
    };
    let server = loopback().limits(limits).start().await.unwrap();
    let buffer = Buffer::on(NodeId(0)).bytes(PARTS * 2 * MIB).shareable();
    let buffer = buffer.chunk(2 * MIB).allocate(&driver).unwrap();
    let published = server.publish("a", buffer).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let mut permits = Vec::new();
    for _ in 0..4 {
        let writes = server.handle.inner.quota.large(&PeerName::Local);
        permits.push(writes.permit().await);
    }
    assert_eq!(raw.fetch(fetch("a")).await.unwrap_err(), Refusal::TimedOut);
    let stats = server.stats();
    assert_eq!((stats.fetches, stats.leases), (0, 0));
    permits.clear();
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    raw.release(granted.lease).await;
    drop((published, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn an_entry_that_waited_for_its_permit_is_only_for_peers_that_may_still_see_it() {
    let driver = driver();
    let server = loopback().limits(limits()).start().await.unwrap();
    let buffer = Buffer::on(NodeId(0)).bytes(300 * 2 * MIB).shareable();
    let buffer = buffer.chunk(2 * MIB).allocate(&driver).unwrap();
    let published = server.publish("a", buffer).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let mut permits = Vec::new();
    for _ in 0..4 {
        let writes = server.handle.inner.quota.large(&PeerName::Local);
        permits.push(writes.permit().await);
    }
    let name = "a".into();
    let id = raw.send(Ask::Wait { name, ms: 0 }).await;
    assert!(raw.is_answered().await);
    published.set_who(PeerList::nobody());
    drop(permits);
    let (answer, _) = raw.answer(id).await;
    assert!(matches!(&answer, Answer::Refused(why) if why.reason == Refusal::NotFound.word()));
    drop((published, raw));
    close(server, &driver).await;
}

/// A lease begins as its grant is written: no recall can overtake the grant, and no lease begins whose grant is not written
/// at once.
#[tokio::test]
async fn no_lease_begins_before_its_grant_is_written() {
    let driver = driver();
    let server = loopback().limits(limits()).start().await.unwrap();
    let core = Arc::clone(&server.handle.inner);
    let buffer = Buffer::on(NodeId(0)).bytes(300 * 2 * MIB).shareable();
    let buffer = buffer.chunk(2 * MIB).allocate(&driver).unwrap();
    let published = server.publish("a", buffer).now().unwrap();
    let (near, far) = tokio::io::duplex(1 << 10);
    let mut connection = Connection::over(near, &limits());
    let (attached, _) = core.begin(&mut connection, &hello(), false).unwrap();
    let serving = tokio::spawn(connection::serve(connection, attached));
    let mut client = Connection::over(far, &limits());
    let mut permits = Vec::new();
    for _ in 0..4 {
        permits.push(core.quota.large(&PeerName::Local).permit().await);
    }
    let tasks = server.stats().tasks;
    // The fetch waits for a permit, and the answer after it has no room.
    let held = Held {
        leases: (0..1000).collect(),
        ..Held::default()
    };
    for request in [(1, Ask::Fetch(fetch("a"))), (2, Ask::Held(held))] {
        let request = encode(&request);
        client.writer.write(&request, &[]).await.unwrap();
    }
    until("both are asked", || server.stats().requests == 2).await;
    drop(permits);
    until("the fetch is decided", || server.stats().tasks == tasks).await;
    assert_eq!(server.stats().leases, 0);
    published.withdraw(Duration::ZERO).await.unwrap();
    let mut answers = Vec::new();
    for _ in 0..2 {
        let frame = client.reader.read(1 << 20).await.unwrap().unwrap();
        answers.push(decode::<FromServer>(&frame.bytes).unwrap());
    }
    assert!(matches!(
        answers[0],
        FromServer::Reply(2, Answer::Expired { .. })
    ));
    let refused = &answers[1];
    assert!(
        matches!(refused, FromServer::Reply(1, Answer::Refused(why)) if why.reason == "not_found"),
        "{refused:?}"
    );
    assert_eq!(server.stats().fetches, 0);
    // A recall while the grant is being written comes after it.
    let buffer = Buffer::on(NodeId(0)).bytes(300 * 2 * MIB).shareable();
    let buffer = buffer.chunk(2 * MIB).allocate(&driver).unwrap();
    let other = server.publish("b", buffer).now().unwrap();
    let request = encode(&(3, Ask::Fetch(fetch("b"))));
    client.writer.write(&request, &[]).await.unwrap();
    until("the lease begins", || server.stats().leases == 1).await;
    other.set_who_within(PeerList::nobody(), LONG);
    let mut messages = Vec::new();
    for _ in 0..2 {
        let frame = client.reader.read(1 << 20).await.unwrap().unwrap();
        messages.push(decode::<FromServer>(&frame.bytes).unwrap());
    }
    let [
        FromServer::Reply(3, Answer::Granted(granted)),
        FromServer::Event(Event::Withdrawing { lease, .. }),
    ] = &messages[..]
    else {
        panic!("{messages:?}")
    };
    assert_eq!(granted.lease, *lease);
    drop((published, other, client));
    serving.await.unwrap();
    close(server, &driver).await;
}

/// Otherwise the exporter would get memory back that fds of this process pin.
#[tokio::test]
async fn a_withdrawal_waits_for_the_handles_of_a_fetch_that_is_not_granted() {
    let driver = driver();
    let (_directory, address, server) = start_at_unix(options().limits(limits())).await;
    let buffer = Buffer::on(NodeId(0)).bytes(300 * 2 * MIB).shareable();
    let buffer = buffer.chunk(2 * MIB).allocate(&driver).unwrap();
    let published = server.publish("a", buffer).now().unwrap();
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let peer = PeerName::User(rustix::process::geteuid().as_raw());
    let mut permits = Vec::new();
    for _ in 0..4 {
        let writes = server.handle.inner.quota.large(&peer);
        permits.push(writes.permit().await);
    }
    // Nobody reads the queue, and the fetch waits for its permit.
    let id = raw.send(Ask::Fetch(fetch_fds("a"))).await;
    until("fds are open", || server.stats().fds > 1).await;
    let mut withdrawal = Box::pin(published.withdraw(LONG));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(withdrawal.as_mut().poll(&mut context).is_pending());
    drop(permits);
    let (memory, answer) = tokio::join!(withdrawal, raw.answer(id));
    assert_eq!(server.stats().fds, 0);
    drop(memory.unwrap());
    let (Answer::Refused(why), _) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(why.reason, Refusal::Closing.word());
    drop((published, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn handles_that_stay_open_keep_the_memory() {
    let driver = driver();
    let limits = Limits {
        write: ms(10),
        ..limits()
    };
    let server = loopback().limits(limits).start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let open = published.publication.exports.token();
    let error = published.withdraw(Duration::ZERO).await.unwrap_err();
    assert!(error.to_string().contains("handles that are being sent"));
    let left = published.leave();
    let mut resolved = Box::pin(left.resolved());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(resolved.as_mut().poll(&mut context).is_pending());
    drop(open);
    assert!(resolved.await);
    drop((published, left));
    close(server, &driver).await;
}

/// No request is so long, so that the frames of many connections take little memory.
#[tokio::test]
async fn a_frame_that_is_longer_than_any_request_is_not_read() {
    let driver = driver();
    let server = loopback().limits(limits()).start().await.unwrap();
    let mut raw = Raw::open(&server).await;
    assert_eq!(raw.welcome().frame_bytes, MAX_REQUEST);
    raw.write(&(MAX_REQUEST + 1).to_be_bytes()).await;
    raw.hung_up().await;
    assert_eq!(server.stats().protocol_errors, 1);
    close(server, &driver).await;
}

#[tokio::test]
async fn long_lists_of_leases_come_in_parts() {
    let driver = driver();
    let server = loopback().limits(limits()).start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let mut leases = Vec::new();
    for _ in 0..600 {
        leases.push(raw.fetch(fetch("a")).await.unwrap().0.lease);
    }
    leases.sort_unstable();
    // Every third is gone; of the others the client has all, and two that never were.
    let mut kept = leases.clone();
    kept.retain(|lease| lease % 3 > 0);
    let (first, last) = (leases[0] / 2, u64::MAX);
    let all: Vec<u64> = [&[first][..], &kept, &[last]].concat();
    let held = |part: &[u64], after, more| {
        Ask::Held(Held {
            leases: part.to_vec(),
            after,
            more,
        })
    };
    let expired = |leases: &[u64]| Answer::Expired {
        leases: leases.to_vec(),
    };
    let (begin, end) = all.split_at(300);
    let between = begin.last().copied();
    let of_begin = |lease: &&u64| Some(**lease) <= between;
    let (answer, _) = raw.ask(held(begin, None, true)).await;
    assert_eq!(answer, expired(&[first]));
    let after = leases.len() - leases.iter().filter(of_begin).count();
    // The leases after those of the first part are as they were.
    assert_eq!(server.stats().leases as usize, begin.len() - 1 + after);
    let (answer, _) = raw.ask(held(end, between, false)).await;
    assert_eq!(answer, expired(&[last]));
    let known = kept.len() as u64;
    assert_eq!(
        (server.stats().leases, published.importers().len() as u64),
        (known, known)
    );
    // Of a range without leases none ends.
    for (after, more) in [
        (between, true),
        (Some(u64::MAX), true),
        (Some(u64::MAX), false),
    ] {
        assert_eq!(raw.ask(held(&[], after, more)).await.0, expired(&[]));
    }
    assert_eq!(
        raw.ask(held(&[1], Some(u64::MAX), true)).await.0,
        expired(&[1])
    );
    assert_eq!(server.stats().leases, known);
    for lease in kept {
        raw.release(lease).await;
    }
    drop((published, raw));
    close(server, &driver).await;
}

fn news(lease: u64) -> Event {
    Event::Withdrawing { lease, ms: 0 }
}

fn notify_all(server: &Server, lease: u64) {
    for record in server.handle.inner.state().sessions.values() {
        record.session.notify(lease, news(lease), None);
    }
}

#[tokio::test]
async fn a_peer_with_many_notices_is_heard_meanwhile() {
    const MUCH: u64 = 5000;
    let driver = driver();
    let (_directory, address, server) = start_at_unix(options()).await;
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let id = raw.send(Ask::Ping).await;
    for lease in 0..MUCH {
        notify_all(&server, lease);
    }
    let (answer, _) = raw.answer(id).await;
    assert_eq!(answer, Answer::Done);
    let before = raw.notices.len();
    assert!(
        before < MUCH as usize / 2,
        "{before} notices before the answer"
    );
    for lease in 0..MUCH {
        assert_eq!(raw.notice().await, news(lease), "and all are told");
    }
    drop(raw);
    close(server, &driver).await;
}

#[tokio::test]
async fn news_without_end_is_no_sign_of_life() {
    let driver = driver();
    let options = options().heartbeat(short()).lease(soon_over());
    let (_directory, address, server) = start_at_unix(options).await;
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let telling = tokio::spawn({
        let server = server.clone();
        async move {
            for lease in 0.. {
                if server.stats().sessions == 0 {
                    break;
                }
                notify_all(&server, lease);
                tokio::task::yield_now().await;
            }
        }
    });
    raw.hung_up().await;
    telling.await.unwrap();
    assert_eq!(server.stats().dropped_peers, 1);
    close(server, &driver).await;
}
