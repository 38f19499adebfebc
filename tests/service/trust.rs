//! Peers that a reload takes off the lists, or whose certificates it does not accept any more.

use egmem::exchange::{LeaseState, Who};

use super::*;

const BUFFERS: &str = "\
[[buffer]]\nname = \"one\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"a.test\", \"b.test\"]\n\
[[buffer]]\nname = \"two\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"a.test\"]\n";

fn who(list: &[&str]) -> Who {
    Who::list(list).unwrap()
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
    config.create.as_mut().unwrap().who = Who::nobody();
    let service = Service::start(config.clone(), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let (one, two) = (
        a.fetch("one").probe(false).go().await.unwrap(),
        a.fetch("two").probe(false).go().await.unwrap(),
    );
    let of_b = b.fetch("one").probe(false).go().await.unwrap();
    // `a` stays on the list of "two" alone, `b` is on none.
    config.buffers[0].who = Who::nobody();
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
    let mut config = peers.config(BUFFERS);
    config.create.as_mut().unwrap().who = who(&["b.test"]);
    let service = Service::start(config.clone(), &driver).await.unwrap();
    let b = peers.client(&service, "b.test", &driver).await;
    let session = metric(&service, "egmem_sessions");
    config.buffers[0].who = Who::nobody();
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
    assert!(matches!(why, Error::NotTrusted { .. }), "{why}");
    drop(memory);
    a.close().await;
    let ended = service.drain(Duration::ZERO).await;
    // The holder could not say that it let go.
    assert!(matches!(ended, Ok(()) | Err(Error::StillHeld { .. })));
}
