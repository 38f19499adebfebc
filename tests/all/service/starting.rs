//! The remains of a service that does not start, or is dropped.

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
    if driver.is_simulated() {
        // Of a real machine it would pin all that is free first, chunk by chunk: 21 s for 128 GB.
        let mut large = twice.clone();
        large.buffers[0].bytes = 1 << 50;
        assert!(Service::start(large, &driver).await.is_err());
    }
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
