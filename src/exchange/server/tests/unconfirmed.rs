//! Silent holders of memory that may no longer be published.

use super::*;
use crate::server::UnconfirmedRelease;
use crate::server::leases::MAX_EXPIRED;
use crate::server::publication::HolderProcess;
use crate::{Error, MemoryError, ShareError};

/// Its peers have names: over plain TCP any local process could be another one.
async fn server_at_unix() -> (tempfile::TempDir, Server) {
    let options = options().heartbeat(soon_over() / 4);
    let (directory, _, server) = start_at_unix(options.lease(soon_over())).await;
    (directory, server)
}

#[tokio::test]
async fn a_silent_holder_expires_and_its_release_stays_unconfirmed() {
    let driver = driver();
    let (_directory, server) = server_at_unix().await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    // It neither speaks nor hangs up.
    until("it expires", || server.stats().expired == 1).await;
    raw.hung_up().await;
    assert_eq!(server.stats().dropped_peers, 1);
    let error = published.withdraw(LONG).await.unwrap_err();
    assert!(error.to_string().contains("may still have it"), "{error}");
    // Its session has ended, but it can say that it has unmapped the memory.
    let mut raw = raw.resume(&server).await;
    assert!(!raw.welcome().resumed);
    raw.release(granted.lease).await;
    published.withdraw(Duration::ZERO).await.unwrap();
    drop((published, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_name_goes_and_its_silent_holder_is_still_listened_to() {
    let driver = driver();
    let (_directory, server) = server_at_unix().await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    until("it is silent", || server.stats().expired == 1).await;
    raw.hung_up().await;
    let publication = std::sync::Arc::clone(&published.publication);
    assert!(publication.fabric().is_some());
    let unconfirmed = published.leave();
    drop(published);
    // The server no longer has the memory and its handles, and the name is free.
    gone(&driver);
    assert!(publication.fabric().is_none());
    // Nothing counts a name that is gone: its description, which may be long, goes with it.
    {
        let state = server.handle.inner.state();
        let kept = &state.publications[&publication.id].description;
        assert!(kept.parts.is_empty() && kept.parts.capacity() == 0);
    }
    let again = server.publish("a", memory(&driver)).now().unwrap();
    {
        let resolved = std::pin::pin!(unconfirmed.resolved());
        let waited = tokio::time::timeout(Duration::ZERO, resolved).await;
        waited.expect_err("it has said nothing, and its process runs");
    }
    let hear = async {
        tokio::time::timeout(LONG, unconfirmed.resolved())
            .await
            .unwrap()
    };
    let say = async {
        let mut raw = raw.resume(&server).await;
        raw.release(granted.lease).await;
    };
    let (heard, ()) = tokio::join!(hear, say);
    assert!(heard);
    drop((again, unconfirmed));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_release_after_the_name_has_gone_counts() {
    let driver = driver();
    let (_directory, _, server) = start_at_unix(options()).await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let unconfirmed = published.leave();
    drop(published);
    raw.release(granted.lease).await;
    until("it is released", || server.stats().released == 1).await;
    assert!(unconfirmed.resolved().await);
    drop((unconfirmed, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn leases_end_with_their_processes_however_many_there_were() {
    let driver = driver();
    let (_directory, server) = server_at_unix().await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let count = MAX_EXPIRED as u32 + 1;
    for n in 0..count {
        let ask = Fetch {
            probe: false,
            ..fetch("a")
        };
        let (granted, _) = raw.fetch(ask).await.unwrap();
        let process = HolderProcess::without(n);
        let inner = &server.handle.inner;
        inner.state().set_process(granted.lease, process);
    }
    drop(raw);
    until("it is silent", || {
        server.stats().expired == u64::from(count)
    })
    .await;
    until("their processes are looked for", || {
        published.importers().is_empty()
    })
    .await;
    published.withdraw(LONG).await.unwrap();
    assert!(published.left_by_dead());
    drop(published);
    close(server, &driver).await;
}

/// A place for a probe is used again when the server has forgotten its silent holder.
#[tokio::test]
async fn places_of_forgotten_holders_are_given_back() {
    let driver = driver();
    let (_directory, _, server) = start_at_unix(options().lease(LONG)).await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let (inner, id) = (&published.inner, published.publication.id);
    {
        let mut state = inner.state();
        let places = &mut state.publications.get_mut(&id).unwrap().probes;
        // As many are left as expired holders are remembered, and one more.
        let taken: Vec<u64> = std::iter::from_fn(|| places.take()).collect();
        (taken.iter().take(MAX_EXPIRED + 1)).for_each(|&place| places.give_back(place));
    }
    let raw = Raw::open(&server).await;
    let session = only_session(inner);
    for _ in 0..2 * MAX_EXPIRED {
        let now = std::time::Instant::now();
        let mut state = inner.state();
        let granted = state.grant(&session, id, true, None, now);
        let (lease, place) = granted.unwrap();
        assert!(place.is_some(), "no place is left");
        state.lapse(lease, "expired");
    }
    assert_eq!(published.importers().len(), MAX_EXPIRED);
    drop((published, raw));
    close(server, &driver).await;
}

/// Memory whose name is gone, and the peer that holds it.
async fn held_after_its_name(server: &Server, driver: &Driver) -> (UnconfirmedRelease, Raw) {
    let published = server.publish("a", memory(driver)).now().unwrap();
    let mut raw = Raw::open(server).await;
    raw.fetch(fetch("a")).await.unwrap();
    (published.leave(), raw)
}

#[tokio::test]
async fn a_holder_goes_silent_after_the_name() {
    let driver = driver();
    let (_directory, server) = server_at_unix().await;
    let (unconfirmed, raw) = held_after_its_name(&server, &driver).await;
    until("it expires", || server.stats().expired == 1).await;
    drop((unconfirmed, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn nobody_listens_any_more_when_the_server_has_ended() {
    let driver = driver();
    let (_directory, address) = at_unix();
    let server = options().listen(address).start().await.unwrap();
    let (unconfirmed, raw) = held_after_its_name(&server, &driver).await;
    // It holds it, and the server waits for that to change.
    assert_eq!(server.stats().leases, 1);
    let (heard, ended) = tokio::join!(unconfirmed.resolved(), server.close(Duration::ZERO));
    assert!(!heard);
    let Err(Error::Share(ShareError::Memory(MemoryError::StillHeld { holders, .. }))) = ended
    else {
        panic!("{ended:?}")
    };
    assert_eq!(holders.len(), 1, "{holders:?}");
    assert!(
        !unconfirmed.resolved().await,
        "that it is forgotten says nothing"
    );
    drop((unconfirmed, raw));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_server_that_waits_for_releases_learns_that_a_holder_is_not_listened_to_any_more() {
    let driver = driver();
    let (_directory, address) = at_unix();
    let server = options().listen(address).start().await.unwrap();
    let (unconfirmed, raw) = held_after_its_name(&server, &driver).await;
    // Polled first: it waits.
    let dropped = async { drop(unconfirmed) };
    let (closed, ()) = tokio::time::timeout(LONG, async {
        tokio::join!(biased; server.close(2 * LONG), dropped)
    })
    .await
    .unwrap();
    closed.unwrap();
    drop(raw);
    close(server, &driver).await;
}
