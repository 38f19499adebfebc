//! Peers that a reload takes off the lists, or whose certificates it does not accept any more.

use std::sync::{Mutex, mpsc};

use egmem::exchange::{LeaseState, PeerList};
use tracing::field::{Field, Visit};
use tracing::span;

use super::*;

const BUFFERS: &str = "\
[[buffer]]\nname = \"one\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"a.test\", \"b.test\"]\n\
[[buffer]]\nname = \"two\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"a.test\"]\n";

fn who(list: &[&str]) -> PeerList {
    PeerList::list(list).unwrap()
}

async fn lost(memory: &RemoteBuffer) -> Error {
    let lost = async {
        loop {
            if let LeaseState::Lost(why) = memory.changed().await {
                return why;
            }
        }
    };
    tokio::time::timeout(PATIENCE, lost).await.unwrap()
}

/// A service where `b.test` may create memory and is on a list, and a client of it.
async fn serving_b(peers: &Peers, driver: &Driver) -> (ServiceConfig, Service, Client) {
    let mut config = peers.config(BUFFERS);
    config.create.as_mut().unwrap().who = who(&["b.test"]);
    let service = Service::start(config.clone(), driver).await.unwrap();
    let b = peers.client(&service, "b.test", driver).await;
    (config, service, b)
}

fn reason(error: &Error) -> Option<&Refusal> {
    match error {
        Error::Refused { reason, .. } => Some(reason),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_ends_sessions_of_peers_on_no_list_and_leases_of_peers_off_a_name_s() {
    let peers = Peers::new();
    let driver = driver();
    // Silent holders are waited for as long as recalled ones.
    let mut config = peers.config_with(BUFFERS, &leases_end());
    config.create.as_mut().unwrap().who = PeerList::nobody();
    let service = Service::start(config.clone(), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let (one, two) = (
        a.fetch("one").probe(false).go().await.unwrap(),
        a.fetch("two").probe(false).go().await.unwrap(),
    );
    let of_b = b.fetch("one").probe(false).go().await.unwrap();
    // `a` stays on the list of "two" alone, `b` is on none.
    config.buffers[0].who = PeerList::nobody();
    assert!(service.reload(config).unwrap().is_empty());
    let why = lost(&of_b).await;
    assert_eq!(reason(&why), Some(&Refusal::Forbidden), "{why}");
    assert!(why.to_string().contains("no longer admitted"), "{why}");
    let why = lost(&one).await;
    assert_eq!(reason(&why), Some(&Refusal::Forbidden), "{why}");
    assert!(why.to_string().contains("access list"), "{why}");
    assert_eq!(two.state(), LeaseState::Held);
    two.release().await.unwrap();
    drop((one, of_b));
    a.close().await;
    b.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_another_list_names_keeps_its_session_at_a_reload() {
    let peers = Peers::new();
    let driver = driver();
    let (mut config, service, b) = serving_b(&peers, &driver).await;
    let session = metric(&service, "egmem_sessions");
    config.buffers[0].who = PeerList::nobody();
    service.reload(config).unwrap();
    b.create(CreateOptions::new("mine", MIB)).await.unwrap();
    assert_eq!(metric(&service, "egmem_sessions"), session);
    b.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_with_another_authority_ends_the_sessions_of_the_old_one() {
    let (peers, others) = (Peers::new(), Peers::new());
    let driver = driver();
    // A client that cannot connect any more tries to release for the time of a lease.
    let config = peers.config_with(BUFFERS, &leases_end());
    let service = Service::start(config.clone(), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let memory = a.fetch("one").probe(false).go().await.unwrap();
    for file in ["ca.pem", "node.pem", "node.key"] {
        let from = others.folder.path().join(file);
        std::fs::copy(from, peers.folder.path().join(file)).unwrap();
    }
    service.reload(config).unwrap();
    let why = lost(&memory).await;
    assert!(
        matches!(why, Error::Share(egmem::share::Error::NotTrusted { .. })),
        "{why}"
    );
    drop(memory);
    a.close().await;
    let ended = service.drain(Duration::ZERO).await;
    // The holder could not say that it let go.
    assert!(matches!(
        ended,
        Ok(())
            | Err(Error::Share(egmem::share::Error::Memory(
                egmem::Error::StillHeld { .. }
            )))
    ));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_takes_rights_away_though_the_audit_log_cannot_be_opened_again() {
    let peers = Peers::new();
    let driver = driver();
    let folder = peers.folder.path().join("audit");
    std::fs::create_dir(&folder).unwrap();
    let audit = format!("[audit]\nfile = \"{}/log\"\n{BUFFERS}", folder.display());
    let mut config = peers.config(&audit);
    config.create.as_mut().unwrap().who = PeerList::nobody();
    let service = Service::start(config.clone(), &driver).await.unwrap();
    let b = peers.client(&service, "b.test", &driver).await;
    std::fs::remove_dir_all(&folder).unwrap();
    config.buffers[0].who = PeerList::nobody();
    let error = service.reload(config).unwrap_err();
    assert!(error.to_string().contains("audit log"), "{error}");
    assert_eq!(metric(&service, "egmem_sessions"), 0);
    b.close().await;
    let b = peers.client(&service, "b.test", &driver).await;
    let fetched = b.fetch("one").probe(false).go().await;
    assert_eq!(refused(fetched), Refusal::NotFound);
    b.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

/// Calls a hook in the thread that ends a session, when it logs that.
struct AtSessionEnd<F>(F);

struct Message(bool);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0 |= field.name() == "message" && format!("{value:?}") == "session ended";
    }
}

impl<F: Fn() + Send + Sync + 'static> tracing::Subscriber for AtSessionEnd<F> {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut message = Message(false);
        event.record(&mut message);
        if message.0 {
            (self.0)();
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dismissed_peer_that_connects_during_the_reload_has_its_new_rights() {
    let peers = Peers::new();
    let driver = driver();
    let (mut config, service, b) = serving_b(&peers, &driver).await;
    let again = Client::options(service.addresses()[0].clone()).security(peers.tls("b.test"));
    let again = again.timeout(PATIENCE);
    let importer = driver.clone();
    let (go, wait) = tokio::sync::oneshot::channel();
    let (tell, told) = mpsc::channel();
    let connect = async move {
        wait.await.unwrap();
        let b = again.connect(&importer).await.unwrap();
        let created = b.create(CreateOptions::new("new", MIB)).await;
        let fetched = b.fetch("one").probe(false).lease().await;
        let refusals = (refused(created), refused(fetched));
        b.close().await;
        tell.send(refusals).unwrap();
    };
    let connect = tokio::spawn(connect);
    let once = Mutex::new(Some((go, told)));
    let hook = move || {
        let once = once.lock().unwrap().take();
        if let Some((go, told)) = once {
            go.send(()).unwrap();
            let refusals = told.recv_timeout(PATIENCE).unwrap();
            assert_eq!(refusals, (Refusal::Forbidden, Refusal::NotFound));
        }
    };
    config.create.as_mut().unwrap().who = PeerList::nobody();
    config.buffers[0].who = PeerList::nobody();
    let reload = || service.reload(config).unwrap();
    egmem_tests::with_subscriber(AtSessionEnd(hook), reload);
    connect.await.unwrap();
    b.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_reload_keeps_the_time_to_drain() {
    let peers = Peers::new();
    let driver = driver();
    let mut config = peers.config(BUFFERS);
    let service = Service::start(config.clone(), &driver).await.unwrap();
    let before = service.drain_deadline();
    config.drain.deadline += Duration::from_secs(1);
    service.reload(config.clone()).unwrap();
    let changed = before + Duration::from_secs(1);
    assert_eq!(service.drain_deadline(), changed);
    std::fs::write(peers.folder.path().join("node.key"), "").unwrap();
    config.drain.deadline = Duration::ZERO;
    service.reload(config).unwrap_err();
    assert_eq!(service.drain_deadline(), changed);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}
