use std::io::Read;
use std::sync::{Arc, Mutex, OnceLock};

use tokio::io::AsyncWriteExt;

use super::hostile::{framed, tcp};
use super::*;
use crate::PeerList;
use crate::server::quota::What;
use crate::server::{Allocate, Allocation};
use crate::{Error, MemoryError, ShareError};

fn wait(name: &str, wait: Duration) -> Ask {
    Ask::Wait {
        name: name.into(),
        ms: wait.as_millis() as u64,
    }
}

#[tokio::test]
async fn names_come_in_pages() {
    let driver = driver();
    let mut limits = limits();
    limits.list_page = 2;
    limits.names = 5;
    let server = loopback().limits(limits).start().await.unwrap();
    let shared = memory(&driver);
    let publish = |name: &str| server.publish(name, shared.clone()).now();
    let published: Vec<_> = ["b/2", "a", "b/1", "b/3", "c"]
        .map(|name| publish(name).unwrap())
        .into();
    assert!(matches!(publish("d"), Err(Error::LimitReached { .. })));
    assert!(matches!(
        publish("a b"),
        Err(Error::Share(ShareError::Memory(
            MemoryError::InvalidArgument { .. }
        )))
    ));
    let mut raw = Raw::open(&server).await;
    let mut list = List {
        prefix: "b/".into(),
        after: None,
    };
    let Answer::Names(first) = raw.ask(Ask::List(list.clone())).await.0 else {
        panic!()
    };
    let names: Vec<_> = first.entries.iter().map(|entry| &*entry.name).collect();
    assert_eq!((&names[..], first.more), (&["b/1", "b/2"][..], true));
    assert_eq!(first.entries[0].memory.len, MIB);
    list.after = Some("b/2".into());
    let Answer::Names(rest) = raw.ask(Ask::List(list)).await.0 else {
        panic!()
    };
    assert_eq!((rest.entries.len(), rest.more), (1, false));
    drop((published, shared, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn names_among_many_that_a_peer_may_not_see_are_listed() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let shared = memory(&driver);
    // More than the server visits at once, and the last part is full.
    let publish = |number: usize| {
        let publish = server.publish(format!("{number:04}"), shared.clone());
        let publish = match number % 200 {
            0 => publish,
            _ => publish.who(PeerList::nobody()),
        };
        publish.now().unwrap()
    };
    let published: Vec<_> = (0..768).map(publish).collect();
    let mut raw = Raw::open(&server).await;
    let names = ["0000", "0200", "0400", "0600"];
    assert_eq!(raw.names("").await, names);
    assert_eq!(raw.names("04").await, names[2..3]);
    drop((published, shared, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn to_others_a_name_does_not_exist() {
    let driver = driver();
    let (_directory, address, server) = start_at_unix(loopback()).await;
    let own = PeerName::User(rustix::process::geteuid().as_raw());
    let shared = memory(&driver);
    let hidden = server.publish("hidden", shared.clone());
    let hidden = hidden.who(PeerList::only(own)).now().unwrap();
    let mut friend = Raw::open_at(&address, &Security::Plain, &hello()).await;
    let mut other = Raw::open(&server).await;
    assert_eq!(friend.names("").await, ["hidden"]);
    assert!(other.names("").await.is_empty());
    let refusal = other.fetch(fetch("hidden")).await.unwrap_err();
    assert_eq!(refusal, Refusal::NotFound);
    assert_eq!(
        other.refusal(wait("hidden", short() / 3)).await,
        Refusal::TimedOut
    );
    let (granted, _) = friend.fetch(fetch("hidden")).await.unwrap();
    // The list may change meanwhile: a holder that is no longer on it is asked for the memory.
    let waiting = other.send(wait("hidden", LONG)).await;
    hidden.set_who(PeerList::list(["local"]).unwrap());
    let Answer::Names(names) = other.answer(waiting).await.0 else {
        panic!()
    };
    assert_eq!(
        (&*names.entries[0].name, names.entries[0].leases),
        ("hidden", 1)
    );
    let asked = friend.notice().await;
    assert!(matches!(asked, Event::Withdrawing { .. }), "{asked:?}");
    assert_eq!(
        friend.fetch(fetch("hidden")).await.unwrap_err(),
        Refusal::NotFound
    );
    friend.release(granted.lease).await;
    drop((hidden, shared, friend, other));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_name_is_waited_for() {
    let driver = driver();
    let mut limits = limits();
    limits.wait = soon_over();
    limits.requests_in_flight = 1;
    let server = loopback().limits(limits).start().await.unwrap();
    let mut raw = Raw::open(&server).await;
    // The server's limit counts, not the client's.
    assert_eq!(raw.refusal(wait("a", LONG)).await, Refusal::TimedOut);
    let first = raw.send(wait("a", LONG)).await;
    assert_eq!(raw.refusal(wait("b", LONG)).await, Refusal::Limit);
    // Requests that need no wait are answered meanwhile.
    assert!(raw.names("").await.is_empty());
    let published = server.publish("a", memory(&driver)).now().unwrap();
    assert!(matches!(raw.answer(first).await.0, Answer::Names(_)));
    drop((published, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_server_that_is_closing_says_of_no_name_that_it_is_there() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let now = || wait("a", Duration::ZERO);
    assert!(matches!(raw.ask(now()).await.0, Answer::Names(_)));
    let holder = async {
        assert!(matches!(raw.notice().await, Event::Closing { .. }));
        assert_eq!(raw.refusal(now()).await, Refusal::TimedOut);
        assert_eq!(raw.fetch(fetch("a")).await.unwrap_err(), Refusal::Closing);
        raw.release(granted.lease).await;
    };
    let (closed, ()) = tokio::join!(server.close(LONG), holder);
    closed.unwrap();
    drop((published, raw));
    close(server, &driver).await;
}

/// Creates at most a MiB of memory.
#[derive(Default)]
struct Maker {
    driver: Option<Driver>,
    server: OnceLock<Server>,
    made: Mutex<Vec<Published>>,
}

impl Allocate for Maker {
    fn create<'a>(&'a self, peer: &'a PeerName, ask: &'a Create) -> Allocation<'a> {
        Box::pin(async move {
            if ask.bytes > MIB {
                return Err((Refusal::Quota, "a MiB is all there is".into()));
            }
            let (server, driver) = (self.server.get().unwrap(), self.driver.as_ref().unwrap());
            let options = server.publish(&*ask.name, memory(driver));
            let published = options.who(PeerList::only(peer.clone())).now();
            self.made.lock().unwrap().push(published.unwrap());
            Ok(())
        })
    }

    fn delete<'a>(&'a self, _: &'a PeerName, name: &'a str, _: Duration) -> Allocation<'a> {
        Box::pin(async move {
            let mut made = self.made.lock().unwrap();
            let before = made.len();
            made.retain(|published| published.name() != name);
            match made.len() < before {
                true => Ok(()),
                false => Err((Refusal::NotFound, String::new())),
            }
        })
    }
}

fn create(name: &str, bytes: u64) -> Ask {
    Ask::Create(Create {
        name: name.into(),
        bytes,
        node: None,
        peers: String::new(),
    })
}

#[tokio::test]
async fn an_allocator_makes_memory_and_goes_with_the_server() {
    let driver = driver();
    let maker = Arc::new(Maker {
        driver: Some(driver.clone()),
        ..Maker::default()
    });
    let server = loopback().allocator(maker.clone()).start().await.unwrap();
    maker.server.set(server.clone()).unwrap();
    let mut raw = Raw::open(&server).await;
    assert_eq!(
        raw.refusal(create("local/a", MIB + 1)).await,
        Refusal::Quota
    );
    assert_eq!(raw.refusal(create("a b", 1)).await, Refusal::Invalid);
    // Without rules of the allocator a peer creates names only under its own name.
    assert_eq!(raw.refusal(create("a", 1)).await, Refusal::WrongPrefix);
    let Answer::Names(names) = raw.ask(create("local/a", MIB)).await.0 else {
        panic!()
    };
    assert_eq!(
        (&*names.entries[0].name, names.entries[0].memory.len),
        ("local/a", MIB)
    );
    let delete = |name: &str| Ask::Delete {
        name: name.into(),
        ms: 0,
    };
    assert_eq!(raw.refusal(delete("b")).await, Refusal::NotFound);
    assert_eq!(raw.ask(delete("local/a")).await.0, Answer::Done);
    assert!(raw.names("").await.is_empty());
    drop(raw);
    server.close(LONG).await.unwrap();
    assert_eq!(Arc::strong_count(&maker), 1, "the server has let go of it");
    drop((maker, server));
    gone(&driver);
}

/// Refuses on request.
#[derive(Default)]
struct Hesitant(tokio::sync::Notify, tokio::sync::Notify);

impl Allocate for Hesitant {
    fn create<'a>(&'a self, _: &'a PeerName, _: &'a Create) -> Allocation<'a> {
        Box::pin(async move {
            self.0.notify_one();
            self.1.notified().await;
            Err((Refusal::Quota, String::new()))
        })
    }

    fn delete<'a>(&'a self, _: &'a PeerName, _: &'a str, _: Duration) -> Allocation<'a> {
        Box::pin(async { Err((Refusal::NotFound, String::new())) })
    }
}

// One thread, whose tasks run in the order of their wakeups: the answer is ready when the connection's task
// sees that the server ends, and is sent anyway.
#[tokio::test]
async fn answers_from_before_the_end_are_sent() {
    let driver = driver();
    let hesitant = Arc::new(Hesitant::default());
    let server = loopback().allocator(hesitant.clone());
    let server = server.start().await.unwrap();
    let mut raw = Raw::open(&server).await;
    let id = raw.send(create("local/a", MIB)).await;
    hesitant.0.notified().await;
    hesitant.1.notify_one();
    let (closed, (answer, _)) = tokio::join!(server.close(Duration::ZERO), raw.answer(id));
    closed.unwrap();
    let Answer::Refused(refused) = answer else {
        panic!("{answer:?}");
    };
    assert_eq!(Refusal::from_word(&refused.reason), Refusal::Quota);
    drop((raw, hesitant));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_name_that_is_published_after_its_request_ended_is_counted() {
    let driver = driver();
    let hesitant = Arc::new(Hesitant::default());
    let server = loopback().allocator(hesitant.clone());
    let server = server.start().await.unwrap();
    let mut raw = Raw::open(&server).await;
    raw.send(create("local/a", MIB)).await;
    hesitant.0.notified().await;
    drop(raw);
    let count = |what| server.handle.inner.quota.used(what);
    until("it has ended", || {
        count(What::Request) + count(What::Connection) == 0
    })
    .await;
    // Stands for an allocator's blocking work that cannot be stopped.
    let options = server.publish("local/a", memory(&driver));
    let published = options.owner(PeerName::Local).now().unwrap();
    assert_eq!(count(What::Name), 1);
    drop(published);
    assert_eq!(count(What::Name), 0);
    drop(hesitant);
    close(server, &driver).await;
}

#[tokio::test]
async fn a_server_that_ends_is_not_taken_for_one_without_an_allocator() {
    let driver = driver();
    let server = loopback().allocator(Arc::new(Hesitant::default()));
    let server = server.start().await.unwrap();
    assert!(server.handle.inner.allocator().is_ok());
    server.handle.inner.end();
    let refused = server.handle.inner.allocator().err().unwrap();
    assert_eq!(refused.0, Refusal::Closing);
    close(server, &driver).await;
}

#[tokio::test]
async fn without_an_allocator_nothing_is_made() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let mut raw = Raw::open(&server).await;
    assert_eq!(raw.refusal(create("a", 1)).await, Refusal::Unsupported);
    drop(raw);
    close(server, &driver).await;
}

/// Never creates. The undo of a creation reads from its client's socket until that ends.
#[derive(Default)]
struct Undoing {
    begun: tokio::sync::Notify,
    client: Mutex<Option<std::net::TcpStream>>,
    /// What the undo has read last: no byte if the server has closed the socket.
    last: OnceLock<std::io::Result<usize>>,
}

struct Undo<'a>(&'a Undoing);

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        let mut client = self.0.client.lock().unwrap().take().unwrap();
        let mut read = || client.read(&mut [0; 4096]);
        let last = std::iter::repeat_with(&mut read).find(|read| !matches!(read, Ok(1..)));
        self.0.last.set(last.unwrap()).unwrap();
    }
}

impl Allocate for Undoing {
    fn create<'a>(&'a self, _: &'a PeerName, _: &'a Create) -> Allocation<'a> {
        Box::pin(async move {
            let _undo = Undo(self);
            self.begun.notify_one();
            std::future::pending().await
        })
    }

    fn delete<'a>(&'a self, _: &'a PeerName, _: &'a str, _: Duration) -> Allocation<'a> {
        Box::pin(async { Err((Refusal::NotFound, String::new())) })
    }
}

// One thread, which the undo keeps.
#[tokio::test]
async fn a_connection_is_closed_before_its_requests_are_undone() {
    let driver = driver();
    let undoing = Arc::new(Undoing::default());
    let server = loopback().allocator(undoing.clone());
    let server = server.start().await.unwrap();
    let mut client = tcp(&server).await;
    let request = encode(&(1_u64, create("local/a", MIB)));
    for message in [encode(&hello()), request] {
        client.write_all(&framed(&message)).await.unwrap();
    }
    undoing.begun.notified().await;
    let client = client.into_std().unwrap();
    client.set_nonblocking(false).unwrap();
    client.set_read_timeout(Some(LONG / 10)).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    *undoing.client.lock().unwrap() = Some(client);
    until("it is undone", || undoing.last.get().is_some()).await;
    let last = undoing.last.get().unwrap();
    assert!(matches!(last, Ok(0)), "the socket was open: {last:?}");
    close(server, &driver).await;
}

/// Creates memory of 300 parts, and then of one.
#[derive(Default)]
struct Shrinking(Maker);

impl Allocate for Shrinking {
    fn create<'a>(&'a self, peer: &'a PeerName, ask: &'a Create) -> Allocation<'a> {
        if ask.bytes <= MIB {
            return self.0.create(peer, ask);
        }
        Box::pin(async move {
            let (server, driver) = (self.0.server.get().unwrap(), self.0.driver.as_ref());
            let buffer = Buffer::on(NodeId(0)).bytes(ask.bytes).shareable();
            let buffer = buffer.chunk(2 * MIB).allocate(driver.unwrap()).unwrap();
            let options = server.publish(&*ask.name, buffer);
            let published = options.who(PeerList::only(peer.clone())).now();
            self.0.made.lock().unwrap().push(published.unwrap());
            Ok(())
        })
    }

    fn delete<'a>(&'a self, peer: &'a PeerName, name: &'a str, wait: Duration) -> Allocation<'a> {
        self.0.delete(peer, name, wait)
    }
}

#[tokio::test]
async fn a_creation_that_is_undone_leaves_newer_memory_of_its_name() {
    const NAME: &str = "local/a";
    let driver = driver();
    let maker = Arc::new(Shrinking(Maker {
        driver: Some(driver.clone()),
        ..Maker::default()
    }));
    let options = loopback().limits(limits()).allocator(maker.clone());
    let options = options.heartbeat(LONG * 10).lease(LONG * 10);
    let server = options.start().await.unwrap();
    maker.0.server.set(server.clone()).unwrap();
    let [mut slow, mut raw] = [Raw::open(&server).await, Raw::open(&server).await];
    let mut permits = Vec::new();
    for _ in 0..4 {
        let writes = server.handle.inner.quota.large(&PeerName::Local);
        permits.push(writes.permit().await);
    }
    for is_renewed in [true, false] {
        let id = slow.send(create(NAME, 600 * MIB)).await;
        until("it is created", || server.stats().names == 1).await;
        if is_renewed {
            let name = NAME.into();
            let (deleted, _) = raw.ask(Ask::Delete { name, ms: 0 }).await;
            assert_eq!(deleted, Answer::Done);
            let (created, _) = raw.ask(create(NAME, MIB)).await;
            assert!(matches!(created, Answer::Names(_)), "{created:?}");
        }
        tokio::time::pause();
        tokio::time::advance(LONG).await;
        tokio::time::resume();
        let (answer, _) = slow.answer(id).await;
        assert!(
            matches!(&answer, Answer::Refused(why) if why.reason == Refusal::TimedOut.word()),
            "{answer:?}"
        );
        assert_eq!(server.stats().names, u64::from(is_renewed));
        maker.0.made.lock().unwrap().clear();
    }
    drop((permits, slow, raw));
    server.close(LONG).await.unwrap();
    drop((maker, server));
    gone(&driver);
}
