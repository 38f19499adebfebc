//! Follows against a hand-written server.

use super::*;
use crate::client::session::Link;
use crate::driver::Access;
use crate::{Owner, Reconnect, ShareError};

/// Expects a watch request for "x", and answers it.
async fn watched(peer: &mut Peer, entries: Vec<Entry>) {
    let (id, ask) = peer.request().await.unwrap();
    let prefix = "x".into();
    assert_eq!(ask, Ask::Watch(crate::protocol::Watch { prefix }));
    // More names follow, which begin with it.
    peer.answer(id, names(entries, true)).await;
}

async fn watch_refused(peer: &mut Peer, reason: &str) {
    let (id, ask) = peer.request().await.unwrap();
    assert!(matches!(ask, Ask::Watch(_)), "{ask:?}");
    peer.refuse(id, reason).await;
}

async fn fetch_refused(peer: &mut Peer, reason: &str) {
    let (id, ask) = peer.request().await.unwrap();
    assert!(matches!(ask, Ask::Fetch(_)), "{ask:?}");
    peer.refuse(id, reason).await;
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
    let got = served(&mut follow, async {
        watched(&mut peer, vec![first.entry("x"), first.entry("x2")]).await;
        peer.grant(1, first).await;
    })
    .await;
    (client, peer, follow, got)
}

#[tokio::test]
async fn each_memory_is_returned_once_and_what_is_between_is_told() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, second) = (Memory::new(), Memory::new());
    let (_client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    assert_eq!((follow.name(), got.name()), ("x", "x"));
    // The same memory again, other names, and a reduction of rights are not returned.
    let mut reduced = first.entry("x");
    reduced.memory.access = Access::Read;
    peer.notice(Event::Published(reduced)).await;
    peer.notice(Event::Published(second.entry("x2"))).await;
    peer.notice(Event::Gone(Gone { name: "x2".into() })).await;
    let other = served(&mut follow, async {
        peer.notice(Event::Published(second.entry("x"))).await;
        peer.grant(2, &second).await;
    })
    .await;
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
    served(&mut follow, async {
        peer.notice(Event::Published(second.entry("x"))).await;
        peer.grant(3, &second).await;
    })
    .await;
}

#[tokio::test]
async fn nothing_is_fetched_for_a_caller_that_does_not_ask_and_then_the_newest() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, second) = (Memory::new(), Memory::new());
    let (client, mut peer, mut follow, _got) = following(&fake, &driver, &first).await;
    for _ in 0..50 {
        peer.notice(Event::Gone(Gone { name: "x".into() })).await;
        peer.notice(Event::Published(Memory::new().entry("x")))
            .await;
    }
    peer.notice(Event::Published(second.entry("x"))).await;
    // The next request is no fetch. Its answer comes after the notices.
    let (list, ()) = within(async {
        tokio::join!(client.list(""), async {
            let (id, ask) = peer.request().await.unwrap();
            assert!(matches!(ask, Ask::List(_)), "{ask:?}");
            peer.answer(id, names(vec![], false)).await;
        })
    })
    .await;
    list.unwrap();
    let got = served(&mut follow, peer.grant(2, &second)).await;
    let newest = second.shared.describe(Access::ReadWrite);
    assert_eq!(got.description(), &newest.unwrap());
}

#[tokio::test]
async fn a_session_that_goes_on_is_no_news_and_one_that_is_lost_is() {
    let (driver, mut fake, first) = (importer(), Fake::new().await, Memory::new());
    let (_client, peer, mut follow, got) = following(&fake, &driver, &first).await;
    drop(peer);
    fake.welcome.resumed = true;
    let (mut peer, _) = fake.greet().await;
    let listed = async {
        tokio::select! {
            next = follow.next() => panic!("{next:?}"),
            () = watched(&mut peer, vec![first.entry("x")]) => {}
        }
    };
    within(listed).await;
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
    let again = served(&mut follow, async {
        // The call that told the loss may have asked already.
        loop {
            let (id, ask) = peer.request().await.unwrap();
            let answer = match ask {
                Ask::Watch(_) => names(vec![first.entry("x")], false),
                _ => break peer.answer(id, Answer::Granted(first.granted(7))).await,
            };
            peer.answer(id, answer).await;
        }
    })
    .await;
    assert!(got.state().is_lost());
    assert_eq!(again.state(), LeaseState::Held);
    drop(again);
    assert_eq!(peer.released().await, 7);
}

#[tokio::test]
async fn a_lease_that_is_withdrawn_is_told() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (_client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    let (lease, ms) = (1, 60_000);
    let (next, ()) = while_serving(&mut follow, async {
        peer.notice(Event::Withdrawing(Withdrawing { lease, ms }))
            .await;
    })
    .await;
    assert!(matches!(
        next.unwrap(),
        Followed::Gone(Absence::Lease(LeaseState::Withdrawing { .. }))
    ));
    assert!(matches!(got.state(), LeaseState::Withdrawing { .. }));
}

#[tokio::test]
async fn a_call_that_is_given_up_leaves_nothing_and_the_next_one_fetches_anew() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let asked = async {
        watched(&mut peer, vec![first.entry("x")]).await;
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
    // News of other memory end a fetch, too.
    let second = Memory::new();
    let other = served(&mut follow, async {
        peer.notice(Event::Published(Memory::new().entry("x")))
            .await;
        let (id, _) = peer.request().await.unwrap();
        peer.notice(Event::Published(second.entry("x"))).await;
        peer.answer(id, Answer::Granted(first.granted(3))).await;
        let mut seen = (false, false);
        while seen != (true, true) {
            let (id, ask) = peer.request().await.unwrap();
            if let Ask::Release(Release { lease: 3 }) = ask {
                seen.0 = true;
                peer.done(id).await;
            } else {
                seen.1 = true;
                peer.answer(id, Answer::Granted(second.granted(4))).await;
            }
        }
    })
    .await;
    assert_ne!(other.description(), got.description());
}

#[tokio::test]
async fn memory_granted_for_a_name_that_was_published_anew_is_returned_once() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, other) = (Memory::new(), Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let got = served(&mut follow, async {
        watched(&mut peer, vec![first.entry("x")]).await;
        // The notice about it is late.
        peer.grant(1, &other).await;
    })
    .await;
    silent(&mut follow).await;
    peer.notice(Event::Published(other.entry("x"))).await;
    silent(&mut follow).await;
    assert_eq!(got.state(), LeaseState::Held);
}

#[tokio::test]
async fn one_that_missed_notices_asks_again() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, second) = (Memory::new(), Memory::new());
    let (client, mut peer, mut follow, _got) = following(&fake, &driver, &first).await;
    // The first of these notices is lost.
    let published = Event::Published(second.entry("x"));
    client.session().notify(published);
    for _ in 0..1100 {
        let name = "other".into();
        client.session().notify(Event::Gone(Gone { name }));
    }
    served(&mut follow, async {
        watched(&mut peer, vec![second.entry("x")]).await;
        peer.grant(2, &second).await;
    })
    .await;
}

#[tokio::test]
async fn a_watch_that_fails_says_nothing_of_memory_that_is_held() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (first, second) = (Memory::new(), Memory::new());
    let (client, mut peer, mut follow, got) = following(&fake, &driver, &first).await;
    client.session().link.send_replace(Link::Up(2));
    let _other = served(&mut follow, async {
        for reason in ["closing", "internal", "limit"] {
            watch_refused(&mut peer, reason).await;
        }
        watched(&mut peer, vec![second.entry("x")]).await;
        peer.grant(2, &second).await;
    })
    .await;
    assert_eq!(got.state(), LeaseState::Held);
    // Without memory it is told.
    let mut follow = unproved(&client);
    let (next, ()) = while_serving(&mut follow, watch_refused(&mut peer, "closing")).await;
    let next = next.unwrap();
    assert!(
        matches!(&next, Followed::Gone(Absence::Unavailable(why)) if refused(why, Refusal::Closing)),
        "{next:?}"
    );
}

#[tokio::test]
async fn a_fetch_that_fails_is_told_once_and_tried_again() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let (next, ()) = while_serving(&mut follow, async {
        watched(&mut peer, vec![first.entry("x")]).await;
        fetch_refused(&mut peer, "closing").await;
    })
    .await;
    let next = next.unwrap();
    assert!(
        matches!(&next, Followed::Gone(Absence::Unavailable(why)) if refused(why, Refusal::Closing)),
        "{next:?}"
    );
    served(&mut follow, async {
        for reason in ["limit", "not_found", "internal"] {
            fetch_refused(&mut peer, reason).await;
        }
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

#[tokio::test]
async fn memory_that_this_client_cannot_have_is_fetched_again_once_its_entry_changes() {
    for reason in ["read_only", "wrong_owner", "no_common_handle"] {
        let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
        let (client, mut peer) = fake.client(&driver).await;
        let mut follow = client.fetch("x").probe(false).read_write().follow();
        let mut entry = first.entry("x");
        entry.memory.access = Access::Read;
        let (next, ()) = while_serving(&mut follow, async {
            watched(&mut peer, vec![entry.clone()]).await;
            fetch_refused(&mut peer, reason).await;
        })
        .await;
        let next = next.unwrap();
        let why = Refusal::from_word(reason);
        assert!(
            matches!(&next, Followed::Gone(Absence::Unavailable(error)) if refused(error, why)),
            "{next:?}"
        );
        // How many hold it makes no difference.
        entry.leases = 3;
        peer.notice(Event::Published(entry.clone())).await;
        silent(&mut follow).await;
        // Another right, or another owner.
        match reason {
            "wrong_owner" => entry.owner = Owner::Peer("node-b".parse().unwrap()),
            _ => entry.memory.access = Access::ReadWrite,
        }
        served(&mut follow, async {
            peer.notice(Event::Published(entry)).await;
            peer.grant(1, &first).await
        })
        .await;
    }
}

/// Handles that did not go over TCP may go over the Unix socket to which the session moves.
#[tokio::test]
async fn memory_that_this_client_could_not_have_is_fetched_again_after_a_reconnect() {
    let (driver, mut fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let (next, ()) = while_serving(&mut follow, async {
        watched(&mut peer, vec![first.entry("x")]).await;
        fetch_refused(&mut peer, "no_common_handle").await;
    })
    .await;
    assert!(matches!(
        next.unwrap(),
        Followed::Gone(Absence::Unavailable(_))
    ));
    drop(peer);
    fake.welcome.resumed = true;
    served(&mut follow, async {
        let (mut peer, _) = fake.greet().await;
        watched(&mut peer, vec![first.entry("x")]).await;
        peer.grant(1, &first).await;
        peer
    })
    .await;
}

#[tokio::test]
async fn a_refusal_that_stays_ends_it() {
    for reason in ["forbidden", "stale", "invalid", "unsupported"] {
        let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
        let (client, mut peer) = fake.client(&driver).await;
        let mut follow = unproved(&client);
        let (next, ()) = while_serving(&mut follow, async {
            watched(&mut peer, vec![first.entry("x")]).await;
            fetch_refused(&mut peer, reason).await;
        })
        .await;
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
    peer.notice(Event::Gone(Gone { name: "x".into() })).await;
    assert_eq!(absence(&mut follow).await, Absence::NotThere);
    let (reason, detail) = ("forbidden".into(), String::new());
    let why = Refused { reason, detail };
    peer.notice(Event::Ended(Ended { lease: 1, why })).await;
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
