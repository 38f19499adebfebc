//! Names that are followed over withdrawals, restarts and changes of rights.

use std::net::Ipv4Addr;

use egmem::exchange::server::Published;
use egmem::exchange::{
    Absence, Address, Error, Follow, Followed, LeaseState, PeerList, Refusal, RemoteBuffer, Server,
};
use egmem::share::Shared;

use super::{
    LONG, buffer, client, fabric, let_go, ms, nothing_held, options, server, server_at, tls, within,
};
use crate::refused::assert_refused;

/// The next memory, past any other events before it; at most once between two memories.
async fn memory(follow: &mut Follow) -> RemoteBuffer {
    match within(follow.next()).await.unwrap() {
        Followed::Memory(memory) => *memory,
        Followed::Gone(_) => match within(follow.next()).await.unwrap() {
            Followed::Memory(memory) => *memory,
            other => panic!("gone twice in a row: {other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

async fn gone(follow: &mut Follow) -> Absence {
    match within(follow.next()).await.unwrap() {
        Followed::Gone(absence) => absence,
        other => panic!("{other:?}"),
    }
}

/// Nothing is said for a while.
async fn silent(follow: &mut Follow) {
    let next = tokio::time::timeout(ms(50), follow.next()).await;
    assert!(next.is_err(), "{next:?}");
}

/// An address of its own, with a port of the kernel's choice: while no server listens there, no other test
/// takes the port, nor does one of the connections that are tried.
fn own_address() -> Address {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let host = Ipv4Addr::new(127, 0x80 | a, b, c).to_string();
    Address::Tcp { host, port: 0 }
}

async fn restarted(address: &Address) -> Server {
    within(async {
        loop {
            match Server::options().listen(address.clone()).start().await {
                Ok(server) => break server,
                Err(_) => tokio::time::sleep(ms(10)).await,
            }
        }
    })
    .await
}

fn publish(server: &Server, name: &str, word: u64) -> Published {
    let memory = buffer(&fabric(), 1 << 20);
    memory.put(0, word).unwrap();
    server.publish(name, memory).now().unwrap()
}

#[tokio::test]
async fn an_exporter_that_restarts_is_followed() {
    let other = fabric();
    let first = server_at(own_address()).await;
    let address = first.addresses().remove(0);
    let published = publish(&first, "x", 1);
    let client = client(&first, &other).await;
    let mut follow = client.follow("x");
    let old = memory(&mut follow).await;
    assert_eq!(old.get::<u64>(0).unwrap(), 1);
    silent(&mut follow).await;
    let mut running = Some((first, published));
    for word in 2..4 {
        // It gives its holders no time.
        if let Some((server, published)) = running.take() {
            let _ = within(server.close(ms(0))).await;
            drop(published);
        }
        let server = restarted(&address).await;
        let again = publish(&server, "x", word);
        let new = memory(&mut follow).await;
        assert_eq!(new.get::<u64>(0).unwrap(), word);
        assert_eq!(new.state(), LeaseState::Held);
        // The holder still has the bytes of the old memory.
        assert_eq!(old.get::<u64>(0).unwrap(), 1);
        assert!(old.state().is_lost());
        silent(&mut follow).await;
        drop(new);
        let_go(&again).await;
        running = Some((server, again));
    }
    drop((follow, old, client));
    nothing_held(&other).await;
}

#[tokio::test]
async fn a_name_deleted_and_published_again_is_followed() {
    let other = fabric();
    let server = server().await;
    let client = client(&server, &other).await;
    let mut follow = client.follow("x");
    assert_eq!(gone(&mut follow).await, Absence::NotThere);
    let mut last = None;
    for word in 1..5 {
        // A longer name is another one.
        let _other = publish(&server, "xy", 99);
        let published = publish(&server, "x", word);
        let memory = memory(&mut follow).await;
        assert_eq!(memory.get::<u64>(0).unwrap(), word);
        let identity = memory.description().parts[0].identity;
        assert_ne!(last.replace(identity), Some(identity));
        silent(&mut follow).await;
        let (taken, ()) = within(async {
            tokio::join!(published.withdraw(LONG), async {
                // The absence comes before the exporter has the memory back, or the exporter would wait for ever.
                assert!(!matches!(gone(&mut follow).await, Absence::Away(_)));
                memory.release().await.unwrap();
            })
        })
        .await;
        taken.unwrap();
    }
    drop(follow);
    nothing_held(&other).await;
}

#[tokio::test]
async fn a_slow_caller_gets_the_newest_state_alone() {
    let other = fabric();
    let server = server().await;
    let client = client(&server, &other).await;
    let mut follow = client.follow("x");
    let first = publish(&server, "x", 0);
    drop(memory(&mut follow).await);
    drop(first);
    let fetches = server.stats().fetches;
    for word in 1..200 {
        drop(publish(&server, "x", word));
    }
    let published = publish(&server, "x", 200);
    // The number of updates that the client has received is not known; the memory that it returns last is the newest.
    let mut returned = 0;
    within(async {
        loop {
            if let Followed::Memory(memory) = follow.next().await.unwrap() {
                returned += 1;
                if memory.get::<u64>(0).unwrap() == 200 {
                    break;
                }
            }
        }
    })
    .await;
    assert!(returned < 20, "{returned} of 200 were returned");
    assert!(server.stats().fetches - fetches < 40);
    let_go(&published).await;
    // Published and withdrawn between two calls: the newest state is that there is nothing.
    drop(published);
    within(async {
        while !client.list("").await.unwrap().is_empty() {
            tokio::time::sleep(ms(2)).await;
        }
    })
    .await;
    assert_eq!(gone(&mut follow).await, Absence::NotThere);
    silent(&mut follow).await;
}

#[tokio::test]
async fn the_same_memory_under_the_name_again_is_returned_after_it_was_gone() {
    let other = fabric();
    let server = server().await;
    let client = client(&server, &other).await;
    let shared = Shared::from(buffer(&fabric(), 1 << 20));
    let published = server.publish("x", shared.clone()).now().unwrap();
    let mut follow = client.follow("x");
    drop(memory(&mut follow).await);
    silent(&mut follow).await;
    drop(published);
    assert_eq!(gone(&mut follow).await, Absence::NotThere);
    let _again = server.publish("x", shared).now().unwrap();
    drop(memory(&mut follow).await);
    silent(&mut follow).await;
}

#[tokio::test]
async fn calls_that_are_given_up_and_a_follow_that_is_dropped_leave_nothing() {
    let other = fabric();
    let server = server().await;
    let client = client(&server, &other).await;
    let mut follow = client.follow("x");
    assert_eq!(gone(&mut follow).await, Absence::NotThere);
    let published = publish(&server, "x", 1);
    for tenths in 0..50 {
        let patience = std::time::Duration::from_micros(100 * tenths);
        if let Ok(next) = tokio::time::timeout(patience, follow.next()).await {
            // It is not returned again while it is held, so a follow of its own has the next try.
            drop(next.unwrap());
            follow = client.follow("x");
        }
    }
    drop(follow);
    let_go(&published).await;
    nothing_held(&other).await;
    // Nor does one that was never polled.
    drop((client.follow("x"), client));
    within(async {
        while server.stats().connections > 0 {
            tokio::time::sleep(ms(2)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_peer_without_the_right_sees_a_name_as_one_that_does_not_exist() {
    let other = fabric();
    let ends = tls();
    let server = ends.server().await;
    let options = options(&server).security(ends.client.clone());
    let client = within(options.connect(&other)).await.unwrap();
    let who = || PeerList::list(["node-c"]).unwrap();
    let mut hidden = client.follow("hidden");
    let mut absent = client.follow("absent");
    for round in 0..3 {
        for follow in [&mut hidden, &mut absent] {
            if round == 0 {
                assert_eq!(gone(follow).await, Absence::NotThere);
            }
            silent(follow).await;
        }
        // It comes and goes, for others.
        let memory = buffer(&fabric(), 1 << 20);
        let published = server.publish("hidden", memory).who(who()).now().unwrap();
        silent(&mut hidden).await;
        published.set_who(PeerList::list(["node-d"]).unwrap());
        silent(&mut hidden).await;
    }
    // With the right it is there.
    let memory_there = buffer(&fabric(), 1 << 20);
    let published = server.publish("hidden", memory_there).who(who()).now();
    let published = published.unwrap();
    silent(&mut hidden).await;
    published.set_who(PeerList::list(["node-b"]).unwrap());
    drop(memory(&mut hidden).await);
}

#[tokio::test]
async fn a_peer_that_loses_the_right_is_told_no_more() {
    let other = fabric();
    let ends = tls();
    let server = ends.server().await;
    let options = options(&server).security(ends.client.clone());
    let client = within(options.connect(&other)).await.unwrap();
    let allow = |name: &str| PeerList::list([name]).unwrap();
    let publish = |who| {
        let memory = buffer(&fabric(), 1 << 20);
        server.publish("x", memory).who(who).now().unwrap()
    };
    let published = publish(allow("node-b"));
    let (mut good, mut slow) = (client.follow("x"), client.follow("x"));
    let (held, kept) = (memory(&mut good).await, memory(&mut slow).await);
    published.set_who_within(allow("node-c"), LONG);
    assert!(!matches!(gone(&mut good).await, Absence::Away(_)));
    // Released in time, which looks as if the name had been deleted.
    within(held.release()).await.unwrap();
    silent(&mut good).await;
    // Kept past the deadline, which the server reports; then the lease has ended.
    published.set_who_within(allow("node-c"), ms(1));
    let error = within(async {
        loop {
            match slow.next().await {
                Ok(Followed::Gone(_)) => {}
                Ok(other) => panic!("{other:?}"),
                Err(error) => break error,
            }
        }
    })
    .await;
    assert_refused(&error, Refusal::Forbidden);
    assert!(!error.remedy().is_empty());
    assert!(kept.state().is_lost());
    // News of the name reach neither.
    drop(published);
    let published = publish(allow("node-c"));
    silent(&mut good).await;
    drop(published);
    let published = publish(allow("node-b"));
    assert_refused(&within(slow.next()).await.unwrap_err(), Refusal::Forbidden);
    // It has the right again.
    drop(memory(&mut good).await);
    drop(published);
}

#[tokio::test]
async fn another_owner_than_was_expected_is_told_and_the_right_one_is_followed() {
    let other = fabric();
    let server = server().await;
    let client = client(&server, &other).await;
    let published = publish(&server, "x", 1);
    let owner: egmem::exchange::Owner = "node-z".parse().unwrap();
    let mut follow = client.fetch("x").expect_owner(owner).follow();
    let why = gone(&mut follow).await;
    assert!(
        matches!(why, Absence::Unavailable(Error::Mismatched { .. })),
        "{why}"
    );
    silent(&mut follow).await;
    assert!(published.importers().is_empty());
    // Other memory of that owner is rejected again, and not reported twice.
    drop(published);
    let _again = publish(&server, "x", 2);
    let waits = tokio::time::timeout(ms(50), follow.next()).await;
    assert!(
        !matches!(waits, Ok(Ok(Followed::Memory(_)) | Err(_))),
        "{waits:?}"
    );
    // Nor is another life of the server followed, where one was named.
    let mut follow = client.fetch("x").instance(client.instance()).follow();
    drop(memory(&mut follow).await);
}

#[tokio::test]
async fn it_outlasts_the_runtime_that_asks_first() {
    let other = fabric();
    let server = server().await;
    let client = client(&server, &other).await;
    let mut follow = client.follow("x");
    let mut follow = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_all().build().unwrap();
        assert_eq!(runtime.block_on(gone(&mut follow)), Absence::NotThere);
        follow
    })
    .await
    .unwrap();
    let _published = publish(&server, "x", 1);
    drop(memory(&mut follow).await);
}
