use super::super::{Service, ServiceConfig};
use super::*;
use crate::driver::Call;
use crate::quota::Quota;
use crate::{Driver, Machine};

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// A service whose peers may create every name, with a quota of 32 MiB.
async fn start(driver: &Driver) -> Service {
    let text = r#"
        listen = ["tcp://127.0.0.1:0"]
        [create]
        who = ["*"]
        peer_bytes = "32MiB"
        [[create.prefix]]
        peers = ["*"]
        names = [""]
        [node]
        headroom = "0"
        quiet = "0s"
    "#;
    let config = ServiceConfig::from_toml(text).unwrap();
    Service::start(config, driver).await.unwrap()
}

fn ask(name: &str, bytes: u64) -> Create {
    Create {
        name: name.into(),
        bytes,
        node: Some(NodeId(0)),
        peers: String::new(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_waits_for_the_same_peers_of_that_name_and_follows_it_if_it_fails() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let service = start(&driver).await;
    let state = Arc::clone(&service.state);
    let allocator = Allocator(Arc::clone(&state));
    let [one, other] = [PeerName::User(1), PeerName::User(2)];
    // Another process of the first peer, killed since, had begun to create the name.
    let charge = state.ledger.charge(&one, 20 * MIB, 0).unwrap();
    let asked = ask("kv", 20 * MIB);
    let wanted = || state.wanted(&one, &asked).unwrap();
    let making = Arc::new(Named::new(wanted()));
    lock(&state.names).insert("kv".into(), Arc::clone(&making));
    let mut again = allocator.create(&one, &asked);
    assert!(state.claim(wanted()).unwrap().1.is_none());
    let waited = tokio::time::timeout(Duration::ZERO, &mut again).await;
    waited.expect_err("the name is being made");
    // For another peer the name is taken, and beyond its quota there is nothing to learn.
    let refused = allocator.create(&other, &ask("kv", 1)).await;
    assert_eq!(refused.unwrap_err(), (Refusal::Exists, String::new()));
    let (taken, free) = (ask("kv", 64 * MIB), ask("free", 64 * MIB));
    let refused = allocator.create(&other, &taken).await.unwrap_err();
    assert_eq!(refused.0, Refusal::Quota);
    assert_eq!(refused, allocator.create(&other, &free).await.unwrap_err());

    drop(charge);
    state.free_name(&making);
    let made = tokio::time::timeout(PATIENCE, again).await;
    made.unwrap().unwrap();
    let (charged, _) = state.ledger.all();
    let refused = allocator.create(&one, &asked).await;
    assert_eq!(refused.unwrap_err().0, Refusal::Exists, "not `quota`");
    assert_eq!(state.ledger.all(), (charged, 1));
    assert_eq!(
        [&state.created, &state.refused].map(|count| count.load(Relaxed)),
        [1, 4],
        "a wait is not counted"
    );
    service.drain(PATIENCE).await.unwrap();
    assert!(driver.sim().unwrap().held().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_that_is_too_small_by_now_is_named_with_its_numbers() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let service = start(&driver).await;
    let state = Arc::clone(&service.state);
    let wanted = state.wanted(&PeerName::User(1), &ask("kv", 20 * MIB));
    let wanted = wanted.unwrap();
    let (named, claim) = state.claim(wanted).unwrap();
    let (bytes, names) = (8 * MIB, 9);
    state.ledger.set_quota(Quota { bytes, names });
    let client = Arc::new(());
    let made = state.publish(&named, claim.unwrap(), &Arc::downgrade(&client));
    let (reason, detail) = refusal(made.unwrap_err());
    assert_eq!(reason, Refusal::Quota);
    assert!(detail.contains("of 8 MiB are taken with these"), "{detail}");
    assert_eq!(state.ledger.all().1, 0);
    service.drain(PATIENCE).await.unwrap();
}

#[tokio::test]
async fn memory_that_nobody_waits_for_any_more_is_not_created_to_the_end() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let service = start(&driver).await;
    let state = Arc::clone(&service.state);
    let wanted = || state.wanted(&PeerName::User(1), &ask("kv", 20 * MIB));
    let made = || driver.sim().unwrap().count(Call::MemCreate);
    let before = made();
    let (named, claim) = state.claim(wanted().unwrap()).unwrap();
    // The client has gone.
    let gone = state.publish(&named, claim.unwrap(), &Weak::new());
    assert_eq!(refusal(gone.unwrap_err()).0, Refusal::Closing);
    assert_eq!(made(), before);
    // The service ends: its start was dropped.
    let (named, claim) = state.claim(wanted().unwrap()).unwrap();
    drop(service);
    let client = Arc::new(());
    let ended = state.publish(&named, claim.unwrap(), &Arc::downgrade(&client));
    assert_eq!(refusal(ended.unwrap_err()).0, Refusal::Closing);
    assert_eq!(made(), before);
}

#[test]
fn pages_that_the_kernel_lacks_are_a_shortage_for_the_client_too() {
    let none = std::io::ErrorKind::OutOfMemory.into();
    let error = MemoryError::system("creating pages", &none);
    assert_eq!(refusal(error.into()).0, Refusal::NoMemory);
}
