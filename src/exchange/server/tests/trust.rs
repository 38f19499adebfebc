//! Sessions whose peers are no longer trusted or admitted.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use super::*;
use crate::certs::{Authority, CertRequest, Issued};
use crate::server::HolderState;
use crate::{Client, LeaseState, RemoteBuffer, Tls, TlsPem};
use crate::{Error, MemoryError, Result, ShareError};

const DAY: u64 = 86_400;

fn issue(authority: &Authority, name: &str) -> Issued {
    authority.issue(&CertRequest::new(name).days(1)).unwrap()
}

fn pem<'a>(authority: &'a Authority, issued: &'a Issued, crl: Option<&'a str>) -> TlsPem<'a> {
    TlsPem {
        ca: authority.cert_pem().as_bytes(),
        cert: issued.cert_pem.as_bytes(),
        key: issued.key_pem.as_bytes(),
        crl: crl.map(str::as_bytes),
    }
}

fn load(authority: &Authority, issued: &Issued) -> Tls {
    let tls = Tls::from_pem(pem(authority, issued, None)).unwrap();
    tls.expect_peer("server.test").unwrap()
}

/// A server with TLS and a name for every peer.
struct Served {
    driver: Driver,
    authority: Authority,
    own: Issued,
    tls: Tls,
    server: Server,
    published: Published,
}

impl Served {
    async fn start(change: impl FnOnce(ServerOptions) -> ServerOptions) -> Self {
        let authority = Authority::create("ours", 10).unwrap();
        let own = authority.issue(&CertRequest::new("server.test")).unwrap();
        let tls = load(&authority, &own);
        let driver = driver();
        let options = loopback().security(Security::Tls(tls.clone()));
        let server = change(options).start().await.unwrap();
        let published = server.publish("a", memory(&driver)).now().unwrap();
        Self {
            driver,
            authority,
            own,
            tls,
            server,
            published,
        }
    }

    async fn raw(&self, tls: &Tls) -> Raw {
        let security = Security::Tls(tls.clone());
        Raw::open_at(&self.server.addresses()[0], &security, &hello()).await
    }

    /// Returns a client whose request to wait for the name `b` has been read.
    async fn waiting(&self) -> Raw {
        let tls = load(&self.authority, &issue(&self.authority, "peer.test"));
        let mut raw = self.raw(&tls).await;
        let wait = Ask::Wait {
            name: "b".into(),
            ms: 300_000,
        };
        raw.send(wait).await;
        until("it has been read", || self.server.stats().requests == 1).await;
        raw
    }

    async fn client(&self, tls: &Tls) -> Client {
        let options = Client::options(self.server.addresses().remove(0));
        let options = options.security(Security::Tls(tls.clone())).timeout(LONG);
        options.connect(&self.driver).await.unwrap()
    }

    fn holders(&self) -> Vec<(String, HolderState)> {
        let holders = self.published.importers().into_iter();
        holders
            .map(|holder| (holder.peer.to_string(), holder.state))
            .collect()
    }

    async fn end(self) {
        let Self {
            driver,
            server,
            published,
            ..
        } = self;
        drop(published);
        close(server, &driver).await;
    }
}

/// Returns the reason with which the server ends the session; nothing may follow it.
async fn dismissed(raw: &mut Raw) -> Refused {
    let why = match raw.notice().await {
        Event::Dismissed(why) => why,
        other => panic!("{other:?}"),
    };
    raw.hung_up().await;
    why
}

async fn lost(memory: &RemoteBuffer) -> Error {
    loop {
        if let LeaseState::Lost(why) = memory.changed().await {
            return why;
        }
    }
}

/// How far the wall clock of a test's server has jumped, in seconds.
static AHEAD: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

fn clock<const TEST: usize>() -> SystemTime {
    SystemTime::now() + Duration::from_secs(AHEAD[TEST].load(Relaxed))
}

/// Returns a revocation list with this certificate.
fn revoking(authority: &Authority, issued: &Issued) -> String {
    let authority = (authority.cert_pem(), &**authority.key_pem());
    egmem_tests::pki::crl(authority, &[&issued.cert_pem])
}

#[tokio::test]
async fn a_session_ends_when_its_certificate_expires_though_no_timer_ran() {
    let served = Served::start(|options| options.wall_clock(clock::<0>)).await;
    let tls = load(&served.authority, &issue(&served.authority, "peer.test"));
    let mut raw = served.raw(&tls).await;
    let (granted, _) = raw.fetch(fetch("a")).await.unwrap();
    // As after a night in which the machine was suspended.
    AHEAD[0].store(2 * DAY, Relaxed);
    raw.send(Ask::Ping).await;
    let why = dismissed(&mut raw).await;
    assert_eq!(Refusal::from_word(&why.reason), Refusal::NotTrusted);
    assert!(why.detail.contains("certificate expired"), "{why:?}");
    // It may still have the memory mapped.
    let expired = vec![("peer.test".to_owned(), HolderState::Expired)];
    assert_eq!(served.holders(), expired);
    assert_eq!(served.server.stats().sessions, 0);
    // The token is void: the session is another one, and does not have the lease.
    AHEAD[0].store(0, Relaxed);
    let hello = Hello {
        resume: Some(raw.welcome().session.clone()),
        ..hello()
    };
    let security = Security::Tls(tls);
    let mut again = Raw::open_at(&served.server.addresses()[0], &security, &hello).await;
    assert!(!again.welcome().resumed);
    // The client can still say that the memory is unmapped.
    again.release(granted.lease).await;
    assert_eq!(served.holders(), []);
    drop(again);
    served.end().await;
}

#[tokio::test]
async fn a_client_learns_that_its_certificate_has_expired() {
    // It learns it with its next heartbeat.
    let heartbeat = Duration::from_secs(5);
    let served = Served::start(|options| options.heartbeat(heartbeat).wall_clock(clock::<1>)).await;
    let tls = load(&served.authority, &issue(&served.authority, "peer.test"));
    let client = served.client(&tls).await;
    let memory = client.fetch("a").go().await.unwrap();
    AHEAD[1].store(2 * DAY, Relaxed);
    let why = lost(&memory).await;
    let Error::Share(ShareError::NotTrusted { why, .. }) = &why else {
        panic!("{why}")
    };
    assert!(why.contains("certificate expired"), "{why}");
    AHEAD[1].store(0, Relaxed);
    drop(memory);
    drop(client);
    served.end().await;
}

#[tokio::test]
async fn a_client_with_a_new_certificate_keeps_its_leases_when_the_old_one_expires() {
    let served = Served::start(|options| options.wall_clock(clock::<2>)).await;
    let tls = load(&served.authority, &issue(&served.authority, "peer.test"));
    let client = served.client(&tls).await;
    let memory = client.fetch("a").go().await.unwrap();
    // A request that is asked again does not keep the client from its new certificate.
    let before = served.server.stats().requests;
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.wait("b", LONG).await }
    });
    until("it waits", || served.server.stats().requests > before).await;
    let renewed = CertRequest::new("peer.test").days(9);
    let renewed = served.authority.issue(&renewed).unwrap();
    tls.reload_pem(pem(&served.authority, &renewed, None))
        .unwrap();
    until("it has connected anew", || {
        served.server.stats().resumed == 1
    })
    .await;
    AHEAD[2].store(2 * DAY, Relaxed);
    // A session with an expired certificate ends meanwhile.
    let old = load(&served.authority, &issue(&served.authority, "old.test"));
    let mut old = served.raw(&old).await;
    dismissed(&mut old).await;
    assert_eq!(memory.state(), LeaseState::Held);
    memory.release().await.unwrap();
    let other = super::memory(&served.driver);
    let b = served.server.publish("b", other).now().unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().name, "b");
    drop((b, client));
    served.end().await;
}

#[tokio::test]
async fn a_revoked_certificate_ends_its_sessions_at_a_reload() {
    let served = Served::start(|options| options).await;
    let (bad, good) = (
        issue(&served.authority, "bad.test"),
        issue(&served.authority, "good.test"),
    );
    let (mut one, mut other) = (
        served.raw(&load(&served.authority, &bad)).await,
        served.raw(&load(&served.authority, &good)).await,
    );
    one.fetch(fetch("a")).await.unwrap();
    other.fetch(fetch("a")).await.unwrap();
    let crl = revoking(&served.authority, &bad);
    let with_crl = pem(&served.authority, &served.own, Some(&crl));
    served.tls.reload_pem(with_crl).unwrap();
    let why = dismissed(&mut one).await;
    assert_eq!(Refusal::from_word(&why.reason), Refusal::NotTrusted);
    assert!(why.detail.contains("is revoked"), "{why:?}");
    let (answer, _) = other.ask(Ask::Ping).await;
    assert_eq!(answer, Answer::Done);
    let states: Vec<_> = served
        .holders()
        .into_iter()
        .map(|(_, state)| state)
        .collect();
    assert_eq!(states, [HolderState::Held, HolderState::Expired]);
    drop(other);
    served.end().await;
}

#[tokio::test]
async fn an_authority_that_is_not_trusted_any_more_ends_its_sessions_at_a_reload() {
    let served = Served::start(|options| options).await;
    let tls = load(&served.authority, &issue(&served.authority, "peer.test"));
    let mut raw = served.raw(&tls).await;
    let other = Authority::create("other", 10).unwrap();
    let own = issue(&other, "server.test");
    served.tls.reload_pem(pem(&other, &own, None)).unwrap();
    let why = dismissed(&mut raw).await;
    assert!(
        why.detail.contains("an authority that is not trusted"),
        "{why:?}"
    );
    served.end().await;
}

#[tokio::test]
async fn a_client_ends_its_connection_when_the_server_is_revoked() {
    let served = Served::start(|options| options).await;
    let own = issue(&served.authority, "peer.test");
    let tls = load(&served.authority, &own);
    let client = served.client(&tls).await;
    client.list("").await.unwrap();
    let crl = revoking(&served.authority, &served.own);
    tls.reload_pem(pem(&served.authority, &own, Some(&crl)))
        .unwrap();
    let refused = |result: Result<Vec<Entry>>| match result {
        Err(Error::Share(ShareError::NotTrusted { why, .. })) => why.contains("is revoked"),
        Err(Error::Share(ShareError::PeerLost { .. })) | Ok(_) => false,
        Err(error) => panic!("{error}"),
    };
    let ended = async {
        while !refused(client.list("").await) {
            tokio::time::sleep(ms(5)).await;
        }
    };
    tokio::time::timeout(LONG, ended).await.unwrap();
    drop(client);
    served.end().await;
}

#[tokio::test]
async fn sessions_of_a_peer_are_ended() {
    let served = Served::start(|options| options).await;
    let tls = load(&served.authority, &issue(&served.authority, "peer.test"));
    let (mut one, mut two) = (served.raw(&tls).await, served.raw(&tls).await);
    let mut other = served
        .raw(&load(
            &served.authority,
            &issue(&served.authority, "other.test"),
        ))
        .await;
    let peer = PeerName::certificate("peer.test").unwrap();
    assert_eq!(served.server.end_sessions(&peer), 2);
    for raw in [&mut one, &mut two] {
        let why = dismissed(raw).await;
        assert_eq!(Refusal::from_word(&why.reason), Refusal::Forbidden);
    }
    assert_eq!(other.names("").await, ["a"]);
    assert_eq!(served.server.end_sessions(&peer), 0);
    drop(other);
    served.end().await;
}

#[tokio::test]
async fn an_answer_that_is_ready_when_its_session_ends_is_not_sent() {
    let served = Served::start(|options| options).await;
    let mut raw = served.waiting().await;
    // In this one thread the answer is ready before the connection's task runs, and the session has ended.
    let later = served.server.publish("b", memory(&served.driver)).now();
    let peer = PeerName::certificate("peer.test").unwrap();
    assert_eq!(served.server.end_sessions(&peer), 1);
    dismissed(&mut raw).await;
    drop(later);
    served.end().await;
}

#[tokio::test]
async fn an_answer_that_is_ready_after_its_certificate_has_expired_is_not_sent() {
    let served = Served::start(|options| options.wall_clock(clock::<3>)).await;
    let mut raw = served.waiting().await;
    // The machine was suspended, so that no timer has ended.
    AHEAD[3].store(2 * DAY, Relaxed);
    let later = served.server.publish("b", memory(&served.driver)).now();
    dismissed(&mut raw).await;
    drop(later);
    AHEAD[3].store(0, Relaxed);
    served.end().await;
}

#[tokio::test]
async fn a_user_that_may_not_connect_any_more_is_ended_and_kept_out() {
    let (_directory, address) = at_unix();
    let own = rustix::process::geteuid().as_raw();
    let everybody = Peers::same_user().and_user(own + 1);
    let allowed = options().listen(address.clone()).peers(everybody);
    let server = allowed.start().await.unwrap();
    let mut raw = Raw::open_at(&address, &Security::Plain, &hello()).await;
    server.set_peers(Peers::user(own + 1)).unwrap();
    let why = dismissed(&mut raw).await;
    assert_eq!(Refusal::from_word(&why.reason), Refusal::Forbidden);
    let mut late = Raw::connect(&address, &Security::Plain).await;
    late.connection
        .writer
        .write(&encode(&hello()), &[])
        .await
        .ok();
    late.hung_up().await;
    server.close(LONG).await.unwrap();

    let (_directory, address) = at_unix();
    let server = options().listen(address).start().await.unwrap();
    let error = server.set_peers(Peers::same_user().any_user()).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Share(ShareError::Memory(MemoryError::InvalidArgument { .. }))
        ),
        "{error}"
    );
    server.close(LONG).await.unwrap();
}
