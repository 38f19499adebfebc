//! Follows against a hand-written server.

use super::*;
use crate::Driver;
use crate::client::session::Notified;
use crate::client::tests::fake::*;
use crate::client::{LeaseState, RemoteBuffer};
use crate::protocol::*;

mod endings;
mod failures;

/// Expects a watch request for "x", and answers it.
async fn watched(peer: &mut Peer, entries: Vec<Entry>) {
    let (id, ask) = peer.request().await.unwrap();
    let prefix = "x".into();
    assert_eq!(ask, Ask::Watch(Watch { prefix }));
    peer.answer(id, names(entries, false)).await;
}

async fn memory(follow: &mut Follow) -> RemoteBuffer {
    match within(follow.next()).await.unwrap() {
        Followed::Memory(memory) => *memory,
        Followed::Gone(why) => panic!("{why}"),
    }
}

async fn absence(follow: &mut Follow) -> Absence {
    match within(follow.next()).await.unwrap() {
        Followed::Gone(why) => why,
        Followed::Memory(memory) => panic!("{memory:?}"),
    }
}

/// Returns the result of `next` while `serve` runs, both within a time limit.
async fn while_serving<T>(
    follow: &mut Follow,
    serve: impl Future<Output = T>,
) -> (Result<Followed>, T) {
    within(async { tokio::join!(follow.next(), serve) }).await
}

fn unproved(client: &Client) -> Follow {
    client.fetch("x").probe(false).follow()
}

/// Returns a follow that has returned `memory`, under lease 1.
async fn following(
    fake: &Fake,
    driver: &Driver,
    first: &Memory,
) -> (Client, Peer, Follow, RemoteBuffer) {
    let (client, mut peer) = fake.client(driver).await;
    let mut follow = unproved(&client);
    let (got, ()) = while_serving(&mut follow, async {
        watched(&mut peer, vec![first.entry("x"), first.entry("x2")]).await;
        peer.grant(1, first).await;
    })
    .await;
    match got.unwrap() {
        Followed::Memory(got) => (client, peer, follow, *got),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn each_memory_is_returned_once_and_what_is_between_is_told() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, second) = (Memory::new(), Memory::new());
    let (_client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    assert_eq!((follow.name(), got.name()), ("x", "x"));
    // The same memory again, other names, and a reduction of rights are not returned.
    peer.notice(Event::Published(first.entry("x"))).await;
    peer.notice(Event::Published(second.entry("x2"))).await;
    peer.notice(Event::Gone(Gone { name: "x2".into() })).await;
    let (other, ()) = while_serving(&mut follow, async {
        peer.notice(Event::Published(second.entry("x"))).await;
        peer.grant(2, &second).await;
    })
    .await;
    let Followed::Memory(other) = other.unwrap() else {
        panic!("no memory");
    };
    assert_ne!(other.description(), got.description());
    // Memory returned before belongs to the caller.
    assert_eq!(got.state(), LeaseState::Held);
    peer.notice(Event::Gone(Gone { name: "x".into() })).await;
    assert_eq!(absence(&mut follow).await, Absence::NotThere);
    drop(got);
    assert_eq!(peer.released().await, 1);
    drop(other);
    assert_eq!(peer.released().await, 2);
    // After it was gone, the same memory is returned again.
    let (again, ()) = while_serving(&mut follow, async {
        peer.notice(Event::Published(second.entry("x"))).await;
        peer.grant(3, &second).await;
    })
    .await;
    assert!(matches!(again.unwrap(), Followed::Memory(_)));
}

#[tokio::test]
async fn nothing_is_fetched_for_a_caller_that_does_not_ask() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, second) = (Memory::new(), Memory::new());
    let (client, mut peer, mut follow, _got) = following(&fake, &driver, &first).await;
    for _ in 0..50 {
        peer.notice(Event::Gone(Gone { name: "x".into() })).await;
        peer.notice(Event::Published(Memory::new().entry("x")))
            .await;
    }
    peer.notice(Event::Published(second.entry("x"))).await;
    // The next requests are not fetches. The first answer comes after the notices.
    for _ in 0..2 {
        let (list, ()) = within(async {
            tokio::join!(client.list(""), async {
                let (id, ask) = peer.request().await.unwrap();
                assert!(matches!(ask, Ask::List(_)), "{ask:?}");
                peer.answer(id, names(vec![], false)).await;
            })
        })
        .await;
        list.unwrap();
        tokio::time::sleep(soon(20)).await;
    }
    let (got, fetch) = while_serving(&mut follow, peer.grant(2, &second)).await;
    assert_eq!(fetch.name, "x");
    let Followed::Memory(got) = got.unwrap() else {
        panic!("the newest state is memory");
    };
    let newest = second.shared.describe(crate::driver::Access::ReadWrite);
    assert_eq!(got.description(), &newest.unwrap());
}

#[tokio::test]
async fn a_session_that_goes_on_is_no_news_and_one_that_is_lost_is() {
    let (driver, mut fake, first) = (importer(), Fake::new().await, Memory::new());
    let (_client, peer, mut follow, got) = following(&fake, &driver, &first).await;
    drop(peer);
    fake.welcome.resumed = true;
    let (mut peer, _) = fake.greet().await;
    watched(&mut peer, vec![first.entry("x")]).await;
    let waits = tokio::time::timeout(soon(20), follow.next()).await;
    assert!(waits.is_err(), "{waits:?}");
    assert_eq!(got.state(), LeaseState::Held);
    // The session is lost, and with it the lease on the same memory.
    drop(peer);
    fake.welcome.resumed = false;
    let (mut peer, _) = fake.greet().await;
    let serve = async {
        watched(&mut peer, vec![first.entry("x")]).await;
        peer.grant(7, &first).await;
    };
    let next = async {
        // The fetch may be complete before the caller sees the loss of the lease.
        match follow.next().await.unwrap() {
            Followed::Gone(Absence::Lease(LeaseState::Lost(_))) => memory(&mut follow).await,
            Followed::Memory(again) => *again,
            other => panic!("{other:?}"),
        }
    };
    let (again, ()) = within(async { tokio::join!(next, serve) }).await;
    assert!(got.state().is_lost());
    assert_eq!(again.state(), LeaseState::Held);
    drop(again);
    assert_eq!(peer.released().await, 7);
}

#[tokio::test]
async fn a_lease_that_is_withdrawn_is_told_to_a_waiting_caller() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (_client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    let withdrawing = Withdrawing {
        lease: 1,
        ms: 60_000,
    };
    let (next, ()) = while_serving(&mut follow, async {
        peer.notice(Event::Withdrawing(withdrawing)).await;
    })
    .await;
    assert!(matches!(
        next.unwrap(),
        Followed::Gone(Absence::Lease(LeaseState::Withdrawing { .. }))
    ));
    assert!(matches!(got.state(), LeaseState::Withdrawing { .. }));
}

#[tokio::test]
async fn a_fetch_that_was_given_up_goes_on_and_its_memory_is_let_go_when_wanted_back() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    assert!(
        tokio::time::timeout(soon(5), follow.next()).await.is_err(),
        "nobody has answered"
    );
    watched(&mut peer, vec![first.entry("x")]).await;
    peer.grant(1, &first).await;
    within(async {
        while !matches!(follow.slot.view().offered, slot::Offered::Memory(_)) {
            tokio::time::sleep(soon(2)).await;
        }
    })
    .await;
    // No caller waits for it, and the exporter wants it back.
    let withdrawing = Withdrawing { lease: 1, ms: 9000 };
    peer.notice(Event::Gone(Gone { name: "x".into() })).await;
    peer.notice(Event::Withdrawing(withdrawing)).await;
    assert_eq!(peer.released().await, 1);
    nothing_held(&driver).await;
    assert_eq!(absence(&mut follow).await, Absence::NotThere);
    // The next call returns the result of the fetch that continued.
    peer.notice(Event::Published(first.entry("x"))).await;
    assert!(
        tokio::time::timeout(soon(5), follow.next()).await.is_err(),
        "nobody has answered"
    );
    peer.grant(2, &first).await;
    let got = memory(&mut follow).await;
    assert_eq!(got.state(), LeaseState::Held);
}

#[tokio::test]
async fn memory_that_waits_to_be_returned_is_let_go_while_the_name_is_still_there() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    assert!(
        tokio::time::timeout(soon(5), follow.next()).await.is_err(),
        "nobody has answered"
    );
    watched(&mut peer, vec![first.entry("x")]).await;
    peer.grant(1, &first).await;
    within(async {
        while !matches!(follow.slot.view().offered, slot::Offered::Memory(_)) {
            tokio::time::sleep(soon(2)).await;
        }
    })
    .await;
    // As a server that shuts down does.
    let withdrawing = Withdrawing { lease: 1, ms: 9000 };
    peer.notice(Event::Withdrawing(withdrawing)).await;
    within(async {
        loop {
            let (id, ask) = peer.request().await.unwrap();
            match ask {
                Ask::Release(Release { lease: 1 }) => break peer.done(id).await,
                Ask::Fetch(_) => peer.refuse(id, "closing").await,
                Ask::Watch(_) => {
                    let entries = vec![first.entry("x")];
                    peer.answer(id, names(entries, false)).await;
                }
                other => panic!("{other:?}"),
            }
        }
    })
    .await;
    nothing_held(&driver).await;
}

#[tokio::test]
async fn dropped_it_leaves_nothing() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    assert!(
        tokio::time::timeout(soon(5), follow.next()).await.is_err(),
        "nobody has answered"
    );
    watched(&mut peer, vec![first.entry("x")]).await;
    // The follow is dropped during its fetch.
    let (id, ask) = peer.request().await.unwrap();
    assert!(matches!(ask, Ask::Fetch(_)), "{ask:?}");
    drop((follow, client));
    peer.answer(id, Answer::Granted(first.granted(1))).await;
    // The connection ends, so the task has ended; a lease granted meanwhile is released or ends with the
    // connection.
    while let Some((id, ask)) = peer.request().await {
        assert_eq!(ask, Ask::Release(Release { lease: 1 }));
        peer.done(id).await;
    }
    nothing_held(&driver).await;
}

#[tokio::test]
async fn news_that_cross_an_answer_are_looked_at_again() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let (next, ()) = while_serving(&mut follow, async {
        let (id, _) = peer.request().await.unwrap();
        // The client cannot tell which of the two is newer.
        peer.notice(Event::Published(Memory::new().entry("x")))
            .await;
        peer.answer(id, names(vec![], false)).await;
        watched(&mut peer, vec![first.entry("x")]).await;
        peer.grant(1, &first).await;
    })
    .await;
    // In between it may have returned that there is no memory.
    match next.unwrap() {
        Followed::Memory(_) => {}
        Followed::Gone(_) => drop(memory(&mut follow).await),
    }
}

#[tokio::test]
async fn other_memory_than_the_name_denotes_is_not_returned() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, other) = (Memory::new(), Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let (next, ()) = while_serving(&mut follow, async {
        watched(&mut peer, vec![first.entry("x")]).await;
        // Published anew in between; the notice about it is late.
        peer.grant(1, &other).await;
        assert_eq!(peer.released().await, 1);
        watched(&mut peer, vec![other.entry("x")]).await;
        peer.grant(2, &other).await;
    })
    .await;
    assert!(matches!(next.unwrap(), Followed::Memory(_)));
}

#[tokio::test]
async fn without_room_for_a_watch_it_asks_by_itself() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let listed = async |peer: &mut Peer, entries| {
        let (id, ask) = peer.request().await.unwrap();
        assert!(matches!(ask, Ask::Watch(_)), "{ask:?}");
        peer.refuse(id, "limit").await;
        let (id, ask) = peer.request().await.unwrap();
        assert!(
            matches!(&ask, Ask::List(list) if list.prefix == "x"),
            "{ask:?}"
        );
        peer.answer(id, names(entries, false)).await;
    };
    let (next, ()) = while_serving(&mut follow, async {
        listed(&mut peer, vec![first.entry("x2")]).await;
    })
    .await;
    assert!(matches!(next.unwrap(), Followed::Gone(Absence::NotThere)));
    let (next, ()) = while_serving(&mut follow, async {
        listed(&mut peer, vec![]).await;
        listed(&mut peer, vec![first.entry("x")]).await;
        peer.grant(1, &first).await;
    })
    .await;
    assert!(matches!(next.unwrap(), Followed::Memory(_)));
}

#[tokio::test]
async fn one_that_missed_news_looks_again() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, second) = (Memory::new(), Memory::new());
    let (client, mut peer, mut follow, _got) = following(&fake, &driver, &first).await;
    // The follow's task does not run while these notices are sent, and the first one is lost.
    let news = Notified::Published(Arc::new(second.entry("x")));
    client.session().tell(news);
    for _ in 0..1100 {
        client.session().tell(Notified::Gone("other".into()));
    }
    let (next, ()) = while_serving(&mut follow, async {
        watched(&mut peer, vec![second.entry("x")]).await;
        peer.grant(2, &second).await;
    })
    .await;
    assert!(matches!(next.unwrap(), Followed::Memory(_)));
}
