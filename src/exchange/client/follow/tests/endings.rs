//! Failures, and errors that end a follow.

use super::*;
use crate::{Reconnect, Refusal, ShareError};

#[tokio::test]
async fn what_may_pass_is_tried_again_and_told() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let mut serve = Box::pin(async {
        watched(&mut peer, vec![first.entry("x")]).await;
        for round in 0..6 {
            let (id, ask) = peer.request().await.unwrap();
            assert!(matches!(ask, Ask::Fetch(_)), "{ask:?}");
            let reason = ["closing", "limit", "not_found"][round % 3];
            peer.refuse(id, reason).await;
            watched(&mut peer, vec![first.entry("x")]).await;
        }
        peer.grant(1, &first).await;
        peer
    });
    let told = tokio::select! {
        next = within(follow.next()) => next.unwrap(),
        _ = &mut serve => panic!("nothing was told"),
    };
    let reason = |error: &Error| {
        matches!(
            error,
            Error::Refused {
                reason: Refusal::Closing,
                ..
            }
        )
    };
    assert!(
        matches!(&told, Followed::Gone(Absence::Unavailable(why)) if reason(why)),
        "{told:?}"
    );
    let (next, _peer) = while_serving(&mut follow, serve).await;
    assert!(matches!(next.unwrap(), Followed::Memory(_)));
}

#[tokio::test]
async fn an_import_that_fails_is_tried_three_times() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (client, mut peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    let serve = async {
        let mut granted = first.granted(0);
        granted.handles = Handles::Fabric(vec![Secret::new(&[0; 64]).unwrap()]);
        for lease in 1..4 {
            watched(&mut peer, vec![first.entry("x")]).await;
            let (id, ask) = peer.request().await.unwrap();
            assert!(matches!(ask, Ask::Fetch(_)), "{ask:?}");
            granted.lease = lease;
            peer.answer(id, Answer::Granted(granted.clone())).await;
            assert_eq!(peer.released().await, lease);
        }
    };
    let work = async {
        loop {
            match follow.next().await {
                Ok(Followed::Gone(Absence::Unavailable(_))) => {}
                Ok(other) => panic!("{other:?}"),
                Err(error) => break error,
            }
        }
    };
    let (error, ()) = within(async { tokio::join!(work, serve) }).await;
    assert!(matches!(error, Error::Import { .. }), "{error}");
    assert_eq!(expect_err(follow.next().await), error, "it has ended");
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
    let forbidden = |error: &Error| {
        matches!(
            error,
            Error::Refused {
                reason: Refusal::Forbidden,
                ..
            }
        )
    };
    assert!(forbidden(&error), "{error}");
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
    assert!(
        matches!(
            error,
            Error::Refused {
                reason: Refusal::Forbidden,
                ..
            }
        ),
        "{error}"
    );
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
    assert!(matches!(
        expect_err(next),
        Error::Share(ShareError::PeerLost { .. })
    ));
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
    assert!(
        matches!(
            error,
            Error::Refused {
                reason: Refusal::Forbidden,
                ..
            }
        ),
        "{error}"
    );
    assert!(got.state().is_lost());
}

/// Returns the runtime of a client that a test ends.
fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().unwrap()
}

#[tokio::test]
async fn it_ends_with_the_clients_runtime_and_its_offer_too() {
    let (driver, fake, first) = (importer(), Fake::new().await, Memory::new());
    let (own, options, on) = (runtime(), fake.options(), driver.clone());
    let connect = own.spawn(async move { options.connect(&on).await });
    let (client, (mut peer, _)) = within(async { tokio::join!(connect, fake.greet()) }).await;
    let client = client.unwrap().unwrap();
    let mut follow = unproved(&client);
    let waits = tokio::time::timeout(soon(5), follow.next()).await;
    waits.expect_err("nobody has answered");
    watched(&mut peer, vec![first.entry("x")]).await;
    peer.grant(1, &first).await;
    within(async {
        while !matches!(follow.slot.view().offered, slot::Offered::Memory(_)) {
            tokio::time::sleep(soon(2)).await;
        }
    })
    .await;
    assert!(!driver.sim().unwrap().held().is_empty());
    own.shutdown_background();
    // Before the caller's next call, which might not come.
    nothing_held(&driver).await;
    let error = expect_err(within(follow.next()).await);
    assert!(error.to_string().contains("runtime has ended"), "{error}");
    assert_eq!(expect_err(follow.next().await), error);
}

#[tokio::test]
async fn a_panic_of_its_task_is_an_error() {
    let (driver, fake) = (importer(), Fake::new().await);
    let (client, _peer) = fake.client(&driver).await;
    let mut follow = unproved(&client);
    follow.task = Some(tokio::spawn(async { panic!("in the task") }));
    let error = expect_err(within(follow.next()).await);
    assert!(error.to_string().contains("has panicked"), "{error}");
    assert_eq!(expect_err(follow.next().await), error);
}

#[test]
fn why_there_is_nothing_is_said_in_words() {
    let lost = Error::peer_lost("node-a", "it is gone");
    for (absence, word) in [
        (Absence::NotThere, "may fetch"),
        (Absence::Away(lost.clone()), "it is gone"),
        (Absence::Lease(LeaseState::Lost(lost.clone())), "lost"),
        (Absence::Unavailable(lost), "not available"),
    ] {
        assert!(absence.to_string().contains(word), "{absence}");
    }
}
