use std::sync::Mutex;

use tracing::{Metadata, Subscriber, span};

use super::super::create::Allocator;
use super::super::state::Wanted;
use super::super::{Service, ServiceConfig};
use super::*;
use crate::driver::{Access, Call, NodeId};
use crate::exchange::protocol::Create;
use crate::exchange::server::{Allocate, HolderState};
use crate::exchange::{Client, PeerList};
use crate::{Driver, Error, Machine};

const PATIENCE: Duration = Duration::from_secs(300);

/// A service whose peers may create names.
async fn creating(driver: &Driver) -> Service {
    let text = "listen = ['tcp://127.0.0.1:0']\n[create]\nwho = ['*']";
    let config = ServiceConfig::from_toml(text).unwrap();
    Service::start(config, driver).await.unwrap()
}

/// A request for a byte, which these peers may fetch.
fn ask(peers: &str) -> Create {
    Create {
        name: "local/a".into(),
        bytes: 1,
        node: None,
        peers: peers.into(),
    }
}

/// The driver calls of a thread, by name.
#[derive(Clone, Default)]
struct Calls(Arc<Mutex<Vec<&'static str>>>);

impl Subscriber for Calls {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "egmem::driver"
    }

    fn new_span(&self, span: &span::Attributes<'_>) -> span::Id {
        lock(&self.0).push(span.metadata().name());
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[tokio::test]
async fn a_drain_ends_once_the_memory_of_a_name_that_ended_before_is_back() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let text = "listen = ['tcp://127.0.0.1:0']\n[[buffer]]\nname = 'kv'\nbytes = '1MiB'\ngpu = 0\nwho = ['*']";
    let config = ServiceConfig::from_toml(text).unwrap();
    let service = Service::start(config, &driver).await.unwrap();
    let state = Arc::clone(&service.state);
    // The state while a task gives the memory back.
    let named = Arc::clone(&lock(&state.names)["kv"]);
    named.phase.send_replace(Phase::Ending);
    let held = lock(&named.held).take().unwrap();
    let mut drain = Box::pin(service.drain(PATIENCE));
    let ended = tokio::time::timeout(Duration::from_millis(200), &mut drain).await;
    ended.expect_err("its memory is not back");
    drop(held);
    state.free_name(&named);
    drain.await.unwrap();
    assert!(driver.sim().unwrap().held().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_comes_to_be_while_it_drains_is_asked_back_too() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let text = r#"
        listen = ["tcp://127.0.0.1:0"]
        [[buffer]]
        name = "late"
        bytes = "1MiB"
        gpu = 0
        who = ["*"]
    "#;
    let config = ServiceConfig::from_toml(text).unwrap();
    let service = Service::start(config, &driver).await.unwrap();
    let address = service.addresses()[0].clone();
    let client = Client::options(address).connect(&driver).await.unwrap();
    let memory = client.fetch("late").go().await.unwrap();
    let state = Arc::clone(&service.state);

    // The state while the memory is being created.
    let named = Arc::clone(&lock(&state.names)["late"]);
    let held = lock(&named.held).take().unwrap();
    let published = Arc::clone(&held.published);
    named.phase.send_replace(Phase::Making);
    state.draining.store(true, Relaxed);
    let draining = Arc::clone(&state);
    let until = Instant::now() + PATIENCE;
    let mut waiting = Box::pin(async move { draining.unpublish_and_wait(until).await });
    let waited = tokio::time::timeout(Duration::ZERO, &mut waiting).await;
    waited.expect_err("there is a name to come");
    *lock(&named.held) = Some(held);
    named.phase.send_replace(Phase::There);
    let holder = async {
        let end = Instant::now() + PATIENCE;
        while published.importers()[0].state != HolderState::Withdrawing {
            assert!(Instant::now() < end, "it is not asked back");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        memory.release().await.unwrap();
    };
    let (still, ()) = tokio::join!(waiting, holder);
    assert!(still.is_empty(), "{still:?}");

    // No peer can create a name of the configuration, published or not.
    let ask = |name: &str, bytes| Create {
        name: name.into(),
        bytes,
        node: Some(NodeId(0)),
        peers: String::new(),
    };
    let any_name = super::super::PrefixConfig {
        peers: PeerList::anyone(),
        names: vec![String::new()],
    };
    let create = super::super::CreateConfig {
        who: PeerList::anyone(),
        node: None,
        peer_bytes: 1 << 30,
        peer_names: 9,
        forgive_after: PATIENCE,
        prefixes: vec![any_name],
    };
    state.set_create(Some(create));
    state.draining.store(false, Relaxed);
    let late = lock(&state.names).remove("late");
    let allocator = Allocator(Arc::clone(&state));
    let refused = allocator.create(&PeerName::Local, &ask("late", 1)).await;
    assert_eq!(refused.unwrap_err().0, Refusal::Exists);
    lock(&state.names).extend(late.map(|late| ("late".to_owned(), late)));

    // A reserve that has ended says so.
    state.nodes.values().for_each(|reserve| reserve.stop());
    let refused = allocator.create(&PeerName::Local, &ask("more", 1)).await;
    assert_eq!(refused.unwrap_err().0, Refusal::Closing);
    state.draining.store(true, Relaxed);

    // Nothing more is created.
    let wanted = Wanted {
        name: "later".into(),
        bytes: 1,
        node: NodeId(0),
        owner: None,
        peers: PeerList::anyone(),
        open: true,
        access: Access::ReadWrite,
        probe: false,
    };
    let error = state.claim(wanted).map(drop).unwrap_err();
    let closing = matches!(&error, Error::Refused { reason, .. } if *reason == Refusal::Closing);
    assert!(closing, "{error}");
    drop((published, named, allocator));
    client.close().await;
    service.drain(PATIENCE).await.unwrap();
    // Although tasks may still hold the state.
    assert!(driver.sim().unwrap().held().is_empty());
    drop(state);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_that_outlasts_the_drain_leaves_nothing() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let text = r#"
        listen = ["tcp://127.0.0.1:0"]
        [[buffer]]
        name = "a"
        bytes = "1MiB"
        gpu = 0
        who = ["*"]
    "#;
    let config = ServiceConfig::from_toml(text).unwrap();
    let service = Service::start(config, &driver).await.unwrap();
    let state = Arc::clone(&service.state);
    let wanted = Wanted {
        name: "late".into(),
        bytes: 1,
        node: NodeId(0),
        owner: None,
        peers: PeerList::anyone(),
        open: true,
        access: Access::ReadWrite,
        probe: false,
    };
    let (named, claim) = state.claim(wanted).unwrap();
    // The drain's last step, while the creation is in progress.
    state.forget_names();
    let client = Arc::new(());
    let error = state
        .publish(&named, claim.unwrap(), &Arc::downgrade(&client))
        .unwrap_err();
    let closing = matches!(&error, Error::Refused { reason, .. } if *reason == Refusal::Closing);
    assert!(closing, "{error}");
    assert!(lock(&state.names).is_empty());
    assert_eq!(named.phase(), Phase::Ended);
    // Longer than any clock runs.
    service.drain(Duration::MAX).await.unwrap();
    assert!(driver.sim().unwrap().held().is_empty());
    drop(state);
}

#[tokio::test]
async fn a_drain_ends_a_deletion_that_waits_for_a_holder() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let service = creating(&driver).await;
    let address = service.addresses()[0].clone();
    let client = Client::options(address).connect(&driver).await.unwrap();
    let allocator = Allocator(Arc::clone(&service.state));
    let ask = ask("");
    allocator.create(&PeerName::Local, &ask).await.unwrap();
    let memory = client.fetch("local/a").go().await.unwrap();
    let named = Arc::clone(&lock(&service.state.names)["local/a"]);
    let refused = allocator.delete(&PeerName::Local, "local/a", Duration::ZERO);
    assert_eq!(refused.await.unwrap_err().0, Refusal::TimedOut);
    let error = service.drain(Duration::ZERO).await.unwrap_err();
    assert!(error.to_string().contains("local/a"), "{error}");
    // Its task must not keep the runtime busy.
    tokio::time::pause();
    named.reach(Phase::Ended).await;
    drop(memory);
    client.close().await;
}

/// A runtime with one thread must answer heartbeats while gigabytes go back to the driver.
#[tokio::test]
async fn memory_goes_back_to_the_driver_in_another_thread_than_the_runtimes() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let service = creating(&driver).await;
    let allocator = Allocator(Arc::clone(&service.state));
    let ask = ask("*");
    allocator.create(&PeerName::Local, &ask).await.unwrap();
    let sim = driver.sim().unwrap();
    let before = sim.count(Call::MemRelease);
    let calls = Calls::default();
    let traced = tracing::subscriber::set_default(calls.clone());
    let deleted = allocator.delete(&PeerName::Local, "local/a", PATIENCE);
    deleted.await.unwrap();
    drop(traced);
    assert!(sim.count(Call::MemRelease) > before, "it was kept");
    assert_eq!(*lock(&calls.0), [""; 0]);
    service.drain(PATIENCE).await.unwrap();
}
