//! The remains of a service that does not start, or is dropped.

use egmem::Topology;
use egmem::driver::Call;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_fails_and_a_service_that_is_dropped_leave_nothing() {
    let peers = Peers::new();
    let driver = driver();
    let twice = peers.config("[[buffer]]\nname = \"a\"\nbytes = \"4MiB\"\nnode = 0\nwho = []");
    let mut none = twice.clone();
    none.buffers[0].node = Some(NodeId(9));
    let error = Service::start(none, &driver).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Share(egmem::share::Error::Memory(egmem::Error::NoSuchNode { .. }))
        ),
        "{error}"
    );
    let mut large = twice.clone();
    large.buffers[0].bytes = 1 << 50;
    assert_eq!(too_full(large, &driver).await, 1 << 50);
    let service = Service::start(twice, &driver).await.unwrap();
    service.ready().await;
    assert!(service.is_ready());
    let mut addresses = service.addresses();
    drop(service);
    // Its port is free again, and its memory, as soon as its tasks have seen it.
    let address = addresses.pop().unwrap();
    let end = Instant::now() + PATIENCE;
    while Client::options(address.clone())
        .security(peers.tls("a.test"))
        .timeout(Duration::from_secs(1))
        .connect(&driver)
        .await
        .is_ok()
    {
        assert!(Instant::now() < end, "it still listens");
    }
    if let Some(sim) = driver.sim() {
        while !sim.held().is_empty() {
            assert!(Instant::now() < end, "still held: {}", sim.held());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Returns the bytes that a start was refused for because a node has less.
async fn too_full(config: ServiceConfig, driver: &Driver) -> u64 {
    match Service::start(config, driver).await.unwrap_err() {
        Error::Share(egmem::share::Error::Memory(egmem::Error::NodeTooFull {
            requested, ..
        })) => requested,
        error => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buffers_that_fit_a_node_only_alone_are_refused_before_anything_is_pinned() {
    let peers = Peers::new();
    let driver = driver();
    let buffer =
        |name| format!("[[buffer]]\nname = \"{name}\"\nbytes = \"4MiB\"\nnode = 0\nwho = []\n");
    let mut config = peers.config(&(buffer("a") + &buffer("b")));
    let topology = Topology::discover(&driver).unwrap();
    let free = topology.free_memory(NodeId(0)).unwrap().unwrap();
    for buffer in &mut config.buffers {
        buffer.bytes = free / 10 * 7;
    }
    assert_eq!(too_full(config.clone(), &driver).await, free / 10 * 14);
    if let Some(sim) = driver.sim() {
        assert_eq!(sim.count(Call::MemCreate), 0);
    }
    config.node.max_bytes = free;
    let error = Service::start(config, &driver).await.unwrap_err();
    assert!(error.to_string().contains("`node.max_bytes`"), "{error}");
}

/// A missing password file of a directory, which the service detects when its server is up.
#[cfg(feature = "etcd")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_fails_when_the_server_is_up_leaves_nothing() {
    let peers = Peers::new();
    let driver = driver();
    let mut config = peers.config(
        r#"
metrics = { address = "127.0.0.1:0" }
[[reserve]]
node = 0
bytes = "16MiB"
[directory]
endpoints = ["http://127.0.0.1:1"]
advertise = "tcp://127.0.0.1:1"
user = "u"
password_file = "/nowhere/password"
"#,
    );
    let socket = peers.folder.path().join("service.sock");
    config
        .listen
        .push(egmem::exchange::Address::Unix(socket.clone()));
    let error = Service::start(config, &driver).await.unwrap_err();
    assert!(error.to_string().contains("/nowhere/password"), "{error}");
    let end = Instant::now() + PATIENCE;
    while socket.exists() {
        assert!(Instant::now() < end, "it still listens");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    if let Some(sim) = driver.sim() {
        while !sim.held().is_empty() {
            assert!(Instant::now() < end, "still held: {}", sim.held());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
