use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::*;
use crate::server::HolderState;
use crate::{Error, MemoryError, ShareError};

/// A server whose leases end soon after their holder's last message.
async fn hasty() -> Server {
    let options = loopback().heartbeat(soon_over() / 4).lease(soon_over());
    options.start().await.unwrap()
}

#[tokio::test]
async fn releases_count_although_their_answers_cannot_be_sent() {
    async fn send(stream: &mut UnixStream, message: &impl serde::Serialize) {
        let bytes = encode(message);
        stream.write_u32(bytes.len() as u32).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
    }
    async fn receive(stream: &mut UnixStream) {
        let mut bytes = vec![0; stream.read_u32().await.unwrap() as usize];
        stream.read_exact(&mut bytes).await.unwrap();
    }
    let driver = driver();
    let (_folder, address, server) = start_at_unix(loopback().limits(limits())).await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let Address::Unix(path) = address else {
        panic!()
    };
    let mut client = UnixStream::connect(path).await.unwrap();
    send(&mut client, &hello()).await;
    receive(&mut client).await;
    for id in 1..=4 {
        let ask = Ask::Fetch(fetch("a"));
        send(&mut client, &(id, ask)).await;
        receive(&mut client).await;
    }
    let leases: Vec<u64> = published.importers().iter().map(|one| one.lease).collect();
    assert_eq!(leases.len(), 4);
    // From here on the server's writes fail at once.
    rustix::net::shutdown(&client, rustix::net::Shutdown::Read).unwrap();
    for (id, &lease) in (5..).zip(&leases[..3]) {
        let ask = Ask::Release { lease };
        send(&mut client, &(id, ask)).await;
    }
    // The grant of the last one has not been read.
    send(&mut client, &(8, Ask::Held(Held::default()))).await;
    until("all are released", || published.importers().is_empty()).await;
    drop((client, published));
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
        let Event::Withdrawing { lease, ms } = raw.notice().await else {
            panic!()
        };
        assert_eq!(lease, granted.lease);
        assert!(ms <= LONG.as_millis() as u64 && ms > 0);
        assert_eq!(raw.fetch(fetch("a")).await.unwrap_err(), Refusal::Closing);
        assert!(raw.names("").await.is_empty());
        raw.release(granted.lease).await;
    };
    let (memory, ()) = tokio::join!(published.withdraw(LONG), holder);
    let memory = memory.unwrap();
    assert_eq!(memory.len(), MIB);
    published.shared().unwrap_err();
    assert_eq!(raw.fetch(fetch("a")).await.unwrap_err(), Refusal::NotFound);
    // The name is free again, and other memory under it is another publication.
    let again = server.publish("a", memory).now().unwrap();
    drop(published);
    assert_eq!(raw.names("").await, ["a"]);
    drop((again, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_holder_that_was_away_is_asked_when_it_comes_back() {
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
            ..hello()
        };
        let address = &server.addresses()[0];
        let mut raw = Raw::open_at(address, &Security::Plain, &hello).await;
        let Event::Withdrawing { lease, ms } = raw.notice().await else {
            panic!()
        };
        assert_eq!(lease, granted.lease);
        assert!(ms > 1000, "{ms}");
        raw.release(granted.lease).await;
    };
    let (memory, ()) = tokio::join!(published.withdraw(LONG), holder);
    memory.unwrap();
    drop(published);
    close(server, &driver).await;
}

#[tokio::test]
async fn remaining_holders_are_named() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let error = published.withdraw(short() / 3).await.unwrap_err();
    let Error::Share(ShareError::Memory(MemoryError::StillHeld { name, holders })) = error else {
        panic!("{error}");
    };
    assert_eq!((&*name, holders.len()), ("a", 1));
    assert!(holders[0].starts_with("local (for "), "{holders:?}");
    assert_eq!(published.importers()[0].state, HolderState::Withdrawing);
    // Dropping the publication ends the lease for the holder.
    drop(published);
    loop {
        if let Event::Ended { lease, why } = raw.notice().await {
            assert_eq!(lease, granted.lease);
            assert_eq!(why.reason, Refusal::Closing.word());
            break;
        }
    }
    drop(raw);
    close(server, &driver).await;
}

#[tokio::test]
async fn pings_keep_a_lease() {
    let driver = driver();
    let server = hasty().await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let (mut raw, lease) = loop {
        let mut raw = Raw::open(&server).await;
        let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
        if pings_for_long(&mut raw).await {
            break (raw, granted.lease);
        }
    };
    let importers = published.importers();
    let held = importers.iter().find(|holder| holder.lease == lease);
    assert_eq!(held.unwrap().state, HolderState::Held);
    raw.release(lease).await;
    drop(published);
    close(server, &driver).await;
}

/// Pings for longer than a lease. Returns `false` if a busy machine made a pause in which the lease may have ended.
async fn pings_for_long(raw: &mut Raw) -> bool {
    let begun = std::time::Instant::now();
    let mut last = begun;
    while begun.elapsed() < 2 * soon_over() {
        let answered = raw.is_answered().await;
        if last.elapsed() > soon_over() / 2 {
            return false;
        }
        assert!(answered, "the server hung up");
        last = std::time::Instant::now();
        tokio::time::sleep(short() / 20).await;
    }
    true
}

/// Returns whether numbers are scattered below 2^32: a counter's would be sorted and close to each other.
fn is_scattered(numbers: &[u64]) -> bool {
    let (least, most) = (numbers.iter().min(), numbers.iter().max());
    !numbers.is_sorted() && least.unwrap() + (1 << 28) < *most.unwrap()
}

#[tokio::test]
async fn numbers_do_not_tell_what_other_sessions_are_granted() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut others = Raw::open(&server).await;
    let (mut leases, mut sessions, mut allocations) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..32 {
        others.fetch(fetch("a")).await.unwrap();
        let name = number.to_string();
        let own = server.publish(&name, memory(&driver)).now().unwrap();
        let mut raw = Raw::open(&server).await;
        let (granted, _) = raw.fetch(fetch(&name)).await.unwrap();
        leases.push(granted.lease);
        allocations.push(granted.memory.parts[0].identity.allocation);
        let token = raw.welcome().session.expose();
        sessions.push(u64::from_be_bytes(*token.first_chunk().unwrap()));
        raw.release(granted.lease).await;
        drop(own);
    }
    for numbers in [leases, sessions, allocations] {
        assert!(is_scattered(&numbers), "{numbers:?}");
    }
    drop((others, published));
    close(server, &driver).await;
}

#[tokio::test]
async fn the_end_is_announced_and_remaining_holders_are_named() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let client = async {
        assert!(matches!(raw.notice().await, Event::Closing { .. }));
        assert_eq!(raw.fetch(fetch("a")).await.unwrap_err(), Refusal::Closing);
        let Event::Ended { lease, .. } = raw.notice().await else {
            panic!()
        };
        assert_eq!(lease, granted.lease);
        raw.hung_up().await;
    };
    let (closed, ()) = tokio::join!(server.close(soon_over()), client);
    assert!(
        matches!(
            closed,
            Err(Error::Share(ShareError::Memory(
                MemoryError::StillHeld { .. }
            )))
        ),
        "{closed:?}"
    );
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
    let mut raw = loop {
        let mut raw = Raw::open(&server).await;
        assert!(raw.is_answered().await);
        // Both ends are in this thread.
        let begun = std::time::Instant::now();
        std::thread::sleep(soon_over() * 2);
        tokio::time::sleep(Duration::from_millis(1)).await;
        let answered = raw.is_answered().await;
        // The server does not ignore more than some leases' time. A busy machine may take longer.
        if begun.elapsed() < soon_over() * 3 {
            assert!(answered, "the server hung up");
            break raw;
        }
    };
    // Silence does end it.
    raw.hung_up().await;
    close(server, &driver).await;
}

#[tokio::test]
async fn for_ever_is_no_overflow() {
    let driver = driver();
    let options = loopback().lease(Duration::MAX);
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
