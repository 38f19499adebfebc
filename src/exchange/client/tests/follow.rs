//! Follows against a hand-written server.

use super::*;
use crate::{Reconnect, ShareError};

async fn fetch_refused(peer: &mut Peer, reason: &str) {
    let (id, ask) = peer.request().await.unwrap();
    assert!(matches!(ask, Ask::Fetch(_)), "{ask:?}");
    peer.refuse(id, reason).await;
}

/// Answers a request that waits for "x".
async fn waited(peer: &mut Peer, first: &Memory) {
    let (id, ask) = peer.request().await.unwrap();
    assert!(
        matches!(&ask, Ask::Wait { name, .. } if name == "x"),
        "{ask:?}"
    );
    peer.answer(id, names(vec![first.entry("x")], false)).await;
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

async fn silent(follow: &mut Follow) {
    let next = timeout(soon(20), follow.next()).await;
    assert!(next.is_err(), "{next:?}");
}

/// Returns the result of `next` while `serve` runs, both within a time limit.
async fn while_serving<T>(
    follow: &mut Follow,
    serve: impl Future<Output = T>,
) -> (Result<Followed>, T) {
    within(async { tokio::join!(follow.next(), serve) }).await
}

/// The same, for memory.
async fn served<T>(follow: &mut Follow, serve: impl Future<Output = T>) -> RemoteBuffer {
    within(async { tokio::join!(memory(follow), serve) })
        .await
        .0
}

fn unproved(client: &Client) -> Follow {
    client.fetch("x").probe(false).follow()
}

fn refused(error: &Error, expected: Refusal) -> bool {
    matches!(error, Error::Refused { reason, .. } if *reason == expected)
}

/// Returns a follow that has returned `memory`, under lease 1.
async fn following(
    fake: &Fake,
    driver: &Driver,
    first: &Memory,
) -> (Client, Peer, Follow, RemoteBuffer) {
    let (client, mut peer) = fake.client(driver).await;
    let mut follow = unproved(&client);
    let got = served(&mut follow, peer.grant(1, first)).await;
    (client, peer, follow, got)
}

fn withdrawing(lease: u64) -> Event {
    let ms = 60_000;
    Event::Withdrawing { lease, ms }
}

#[tokio::test]
async fn each_memory_is_returned_once_and_what_is_between_is_told() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, second) = (Memory::new(), Memory::new());
    let (_client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    assert_eq!((follow.name(), got.name()), ("x", "x"));
    silent(&mut follow).await;
    peer.notice(withdrawing(1)).await;
    let told = absence(&mut follow).await;
    assert!(
        matches!(told, Absence::Lease(LeaseState::Withdrawing { .. })),
        "{told}"
    );
    // Memory returned before belongs to the caller.
    assert!(matches!(got.state(), LeaseState::Withdrawing { .. }));
    let other = served(&mut follow, async {
        fetch_refused(&mut peer, "closing").await;
        waited(&mut peer, &second).await;
        // It may be gone again.
        fetch_refused(&mut peer, "not_found").await;
        waited(&mut peer, &second).await;
        peer.grant(2, &second).await;
    })
    .await;
    assert_ne!(other.description(), got.description());
    drop(got);
    assert_eq!(peer.released().await, 1);
    // Once the caller has released it, the name is looked up: the same memory is not returned again.
    drop(other);
    assert_eq!(peer.released().await, 2);
    served(&mut follow, async {
        for memory in [&second, &second, &first] {
            let (id, ask) = peer.request().await.unwrap();
            assert!(matches!(ask, Ask::List(_)), "{ask:?}");
            peer.answer(id, names(vec![memory.entry("x")], false)).await;
        }
        peer.grant(3, &first).await;
    })
    .await;
}

#[tokio::test]
async fn a_name_that_is_not_there_is_told_once_and_waited_for() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let (next, ()) = while_serving(&mut follow, fetch_refused(&mut peer, "not_found")).await;
    assert!(matches!(next.unwrap(), Followed::Gone(Absence::NotThere)));
    served(&mut follow, async {
        // The server waits less long than it is asked.
        let (id, ask) = peer.request().await.unwrap();
        assert!(matches!(ask, Ask::Wait { .. }), "{ask:?}");
        peer.refuse(id, "timed_out").await;
        waited(&mut peer, &first).await;
        peer.grant(1, &first).await;
    })
    .await;
}

#[tokio::test]
async fn a_name_that_is_seen_but_cannot_be_fetched_is_tried_again_after_a_pause() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    for reason in ["closing", "not_found"] {
        let options = fake.options().reconnect(Reconnect::backoff(LONG, LONG));
        let (client, mut peer) = fake.client_of(options, &driver).await;
        let mut follow = unproved(&client);
        let (next, ()) = while_serving(&mut follow, fetch_refused(&mut peer, reason)).await;
        assert!(matches!(next.unwrap(), Followed::Gone(Absence::NotThere)));
        let serve = async {
            waited(&mut peer, &first).await;
            fetch_refused(&mut peer, reason).await;
            // Enough for a follow that asks again at once.
            for _ in 0..10 {
                let answer = async {
                    let (id, ask) = peer.request().await.unwrap();
                    assert!(matches!(ask, Ask::List(_)), "{reason}: {ask:?}");
                    peer.answer(id, names(Vec::new(), false)).await;
                };
                let (listed, ()) = tokio::join!(client.list(""), answer);
                assert!(listed.unwrap().is_empty());
            }
        };
        tokio::select! {
            next = follow.next() => panic!("{next:?}"),
            () = within(serve) => {}
        }
    }
}

#[tokio::test]
async fn a_session_that_goes_on_is_no_news_and_one_that_is_lost_is() {
    let (driver, mut fake, first) = (importer(), Fake::new().await, Memory::new());
    let (_client, peer, mut follow, got) = following(&fake, &driver, &first).await;
    drop(peer);
    fake.welcome.resumed = true;
    let (peer, _) = fake.greet().await;
    silent(&mut follow).await;
    assert_eq!(got.state(), LeaseState::Held);
    // The session is lost, and with it the lease on the same memory.
    drop(peer);
    fake.welcome.resumed = false;
    let (mut peer, _) = fake.greet().await;
    let lost = absence(&mut follow).await;
    assert!(
        matches!(lost, Absence::Lease(LeaseState::Lost(_))),
        "{lost}"
    );
    let again = served(&mut follow, peer.grant(7, &first)).await;
    assert!(got.state().is_lost());
    assert_eq!(again.state(), LeaseState::Held);
    drop(again);
    assert_eq!(peer.released().await, 7);
}

#[tokio::test]
async fn a_call_that_is_given_up_leaves_nothing_and_the_next_one_fetches_anew() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let asked = async {
        let (id, ask) = peer.request().await.unwrap();
        assert!(matches!(ask, Ask::Fetch(_)), "{ask:?}");
        id
    };
    let id = tokio::select! {
        next = follow.next() => panic!("{next:?}"),
        id = within(asked) => id,
    };
    peer.answer(id, Answer::Granted(first.granted(1))).await;
    assert_eq!(peer.released().await, 1);
    nothing_held(&driver).await;
    let got = served(&mut follow, peer.grant(2, &first)).await;
    assert_eq!(got.state(), LeaseState::Held);
}

#[tokio::test]
async fn a_fetch_that_fails_is_told_once_and_tried_again() {
    for reason in ["limit", "wrong_owner", "no_common_handle"] {
        let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
        let (client, mut peer) = fake.client(&driver).await;
        let mut follow = unproved(&client);
        let (next, ()) = while_serving(&mut follow, fetch_refused(&mut peer, reason)).await;
        let (next, why) = (next.unwrap(), Refusal::from_word(reason));
        assert!(
            matches!(&next, Followed::Gone(Absence::Unavailable(error)) if refused(error, why)),
            "{next:?}"
        );
        served(&mut follow, async {
            fetch_refused(&mut peer, "internal").await;
            // An import that fails.
            let mut granted = first.granted(1);
            granted.handles = Handles::Fabric(vec![Secret::new(&[0; 64]).unwrap()]);
            let (id, _) = peer.request().await.unwrap();
            peer.answer(id, Answer::Granted(granted)).await;
            assert_eq!(peer.released().await, 1);
            peer.grant(2, &first).await;
        })
        .await;
    }
}

#[tokio::test]
async fn a_refusal_that_stays_ends_it() {
    for reason in ["forbidden", "stale", "invalid", "unsupported"] {
        let (driver, fake) = (importer(), Fake::new().await);
        let (client, mut peer) = fake.client(&driver).await;
        let mut follow = unproved(&client);
        let (next, ()) = while_serving(&mut follow, fetch_refused(&mut peer, reason)).await;
        let error = expect_err(next);
        assert!(refused(&error, Refusal::from_word(reason)), "{error}");
        assert_eq!(expect_err(follow.next().await), error);
    }
}

#[tokio::test]
async fn a_server_that_dismisses_this_client_ends_it() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    let (next, ()) = while_serving(&mut follow, async {
        let (reason, detail) = ("forbidden".into(), String::new());
        peer.notice(Event::Dismissed(Refused { reason, detail }))
            .await;
        peer.end().await;
    })
    .await;
    let error = expect_err(next);
    assert!(refused(&error, Refusal::Forbidden), "{error}");
    assert!(got.state().is_lost());
    // The client reconnects, but this follow has ended.
    let (mut peer, _) = fake.greet().await;
    assert_eq!(expect_err(follow.next().await), error);
    drop((follow, got, client));
    assert_eq!(peer.released().await, 1);
    assert_eq!(peer.request().await, None);
}

#[tokio::test]
async fn a_server_that_lets_this_client_in_no_more_ends_it() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (_client, peer, mut follow, got) = following(&fake, &driver, &first).await;
    drop(peer);
    let (next, ()) = while_serving(&mut follow, async {
        let mut peer = fake.accept().await;
        peer.frame().await.unwrap();
        peer.send(&Greeting::Refused(Refused {
            reason: "forbidden".into(),
            detail: String::new(),
        }))
        .await;
    })
    .await;
    let error = expect_err(next);
    assert!(refused(&error, Refusal::Forbidden), "{error}");
    assert!(!error.remedy().is_empty());
    // The lease is still in time: the server may admit this client again before it ends.
    assert_eq!(got.state(), LeaseState::Held);
}

#[tokio::test]
async fn it_ends_with_the_client() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    let (next, ()) = while_serving(&mut follow, async {
        tokio::join!(client.close(), async {
            assert_eq!(peer.request().await, None);
        });
    })
    .await;
    let error = expect_err(next);
    assert!(error.to_string().contains("was closed"), "{error}");
    assert!(got.state().is_lost());
    // A client that does not reconnect: its follow ends with the connection.
    let options = fake.options().reconnect(Reconnect::never());
    let (client, peer) = fake.client_of(options, &driver).await;
    let mut follow = unproved(&client);
    let (next, ()) = while_serving(&mut follow, async { drop(peer) }).await;
    assert!(matches!(
        expect_err(next),
        Error::Share(ShareError::PeerLost { .. })
    ));
}

#[tokio::test]
async fn a_lease_that_ends_as_forbidden_ends_it() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (_client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    let (reason, detail) = ("forbidden".into(), String::new());
    let why = Refused { reason, detail };
    peer.notice(Event::Ended { lease: 1, why }).await;
    let error = expect_err(within(follow.next()).await);
    assert!(refused(&error, Refusal::Forbidden), "{error}");
    assert!(got.state().is_lost());
}

#[tokio::test]
async fn a_client_that_is_closing_says_so() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (client, _peer) = fake.client(&driver).await;
    client.session().close();
    let error = expect_err(within(client.list("")).await);
    assert!(error.to_string().contains("was closed"), "{error}");
}

#[test]
fn it_ends_with_the_runtime_of_its_client() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    };
    let (first, other) = (runtime(), runtime());
    let (mut begun, mut fresh, _client) = first.block_on(async {
        let (driver, fake) = (importer(), Fake::new().await);
        let (client, _peer) = fake.client(&driver).await;
        let mut begun = unproved(&client);
        silent(&mut begun).await;
        (begun, unproved(&client), client)
    });
    drop(first);
    for follow in [&mut begun, &mut fresh] {
        let error = expect_err(other.block_on(async { within(follow.next()).await }));
        assert!(error.to_string().contains("runtime has ended"), "{error}");
    }
}

#[test]
fn why_there_is_nothing_is_said_in_words() {
    let lost = Error::peer_lost("node-a", "it is gone");
    for (absence, word) in [
        (Absence::NotThere, "may fetch"),
        (Absence::Away("it is gone".into()), "it is gone"),
        (Absence::Lease(LeaseState::Lost(lost.clone())), "lost"),
        (Absence::Unavailable(lost), "not available"),
    ] {
        assert!(absence.to_string().contains(word), "{absence}");
    }
}
