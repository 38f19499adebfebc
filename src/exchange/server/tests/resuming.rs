//! Sessions that outlive their connections.

use super::*;

#[tokio::test]
async fn a_session_outlives_its_connection() {
    let driver = driver();
    let server = loopback().start().await.unwrap();
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    let (kept, _) = raw.fetch(fetch("a")).await.unwrap();
    let (lost, _) = raw.fetch(fetch("a")).await.unwrap();
    // The previous connection need not have ended: the cut may not have been noticed.
    let mut again = raw.resume(&server).await;
    assert!(again.welcome().resumed);
    raw.hung_up().await;
    assert_eq!(again.held(vec![kept.lease, u64::MAX]).await, [u64::MAX]);
    assert_eq!(
        published.importers().len(),
        1,
        "{} never arrived",
        lost.lease
    );
    drop(raw);
    drop(again.connection.reader);
    drop(again.connection.writer);
    until("it is noticed", || server.stats().connections == 0).await;
    let stats = server.stats();
    assert_eq!((stats.sessions, stats.leases), (1, 1));
    let hello = Hello {
        resume: Some(again.welcome.unwrap().session),
        ..hello()
    };
    let address = &server.addresses()[0];
    let mut again = Raw::open_at(address, &Security::Plain, &hello).await;
    assert!(again.welcome().resumed);
    again.release(kept.lease).await;
    assert_eq!(server.stats().resumed, 2);
    drop((published, again));
    close(server, &driver).await;
}

#[tokio::test]
async fn a_session_is_its_own_peers_alone() {
    let driver = driver();
    let (_directory, address, server) = start_at_unix(loopback()).await;
    let published = server.publish("a", memory(&driver)).now().unwrap();
    let mut raw = Raw::open(&server).await;
    assert_eq!(
        raw.welcome().local.as_ref().map(PathBuf::from),
        Some(address.to_string().trim_start_matches("unix:").into())
    );
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    let token = raw.welcome().session.clone();
    let mut guess = token.expose().to_vec();
    guess[20] ^= 1;
    for (at, token) in [
        (&address, token.clone()),
        (&server.addresses()[0], Secret::new(&guess).unwrap()),
    ] {
        let hello = Hello {
            resume: Some(token),
            ..hello()
        };
        let mut other = Raw::open_at(at, &Security::Plain, &hello).await;
        assert!(!other.welcome().resumed);
        let lease = granted.lease;
        let release = Ask::Release { lease };
        assert_eq!(other.refusal(release).await, Refusal::NotFound);
    }
    raw.release(granted.lease).await;
    drop((published, raw));
    close(server, &driver).await;
}
