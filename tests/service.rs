//! The allocator service through the public API: what peers see of each other's memory, what stays
//! when they go, and what is given back.
#![cfg(feature = "service")]

use std::time::Duration;

use egmem::driver::{Access, NodeId};
use egmem::exchange::{Client, CreateOptions, RemoteBuffer, Security, Tls, TlsPem};
use egmem::service::{Service, ServiceConfig};
use egmem::{Driver, Error, Machine, Refusal, Result};
use rcgen::{CertificateParams, DnType, Issuer, KeyPair, SanType};
use tempfile::TempDir;
use tokio::time::Instant;

const PATIENCE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// This machine's driver, where one is required, else a simulated one.
fn driver() -> Driver {
    match std::env::var_os("EGMEM_REQUIRE_CUDA") {
        Some(_) => Driver::open().unwrap(),
        None => Driver::simulated(Machine::gh200()).unwrap(),
    }
}

fn nothing_held(driver: &Driver) {
    if let Some(sim) = driver.sim() {
        assert!(sim.held().is_empty(), "still held: {}", sim.held());
    }
}

/// An authority and certificates of peers, in a folder.
struct Peers {
    folder: TempDir,
    ca: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Peers {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "test");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca = params.self_signed(&key).unwrap().pem();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), &ca).unwrap();
        let this = Self {
            folder,
            ca,
            issuer: Issuer::new(params, key),
        };
        let (cert, key) = this.certificate("node.test");
        std::fs::write(this.folder.path().join("node.pem"), cert).unwrap();
        std::fs::write(this.folder.path().join("node.key"), key).unwrap();
        this
    }

    fn certificate(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![
            SanType::DnsName(name.try_into().unwrap()),
            SanType::IpAddress([127, 0, 0, 1].into()),
        ];
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        (cert.pem(), key.serialize_pem())
    }

    fn tls(&self, name: &str) -> Security {
        let (cert, key) = self.certificate(name);
        let pem = TlsPem {
            ca: self.ca.as_bytes(),
            cert: cert.as_bytes(),
            key: key.as_bytes(),
            crl: None,
        };
        Security::Tls(Tls::from_pem(pem).unwrap())
    }

    /// A client of its own.
    async fn client(&self, service: &Service, name: &str, driver: &Driver) -> Client {
        Client::options(service.addresses()[0].clone())
            .security(self.tls(name))
            .timeout(PATIENCE)
            .connect(driver)
            .await
            .unwrap()
    }

    fn config(&self, more: &str) -> ServiceConfig {
        let at = self.folder.path().display();
        let text = format!(
            r#"
listen = ["tcp://127.0.0.1:0"]
{more}
[tls]
ca = "{at}/ca.pem"
cert = "{at}/node.pem"
key = "{at}/node.key"
[local]
door = "{at}/door.sock"
[create]
who = ["*.test"]
peer_bytes = "32MiB"
peer_names = 4
[node]
headroom = "0"
quiet = "0s"
[lease]
heartbeat = "50ms"
expiry = "400ms"
"#
        );
        ServiceConfig::from_toml(&text).unwrap()
    }
}

async fn create(client: &Client, name: &str, bytes: u64) -> Result<RemoteBuffer> {
    client
        .create(CreateOptions::new(name, bytes).node(NodeId(0)))
        .await?;
    client.fetch(name).probe(false).go().await
}

/// All bytes are alike: which.
fn only_byte(memory: &RemoteBuffer) -> u8 {
    let mut bytes = vec![0_u8; memory.len() as usize];
    memory.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "mixed bytes");
    bytes[0]
}

fn allocations(memory: &RemoteBuffer) -> Vec<(u64, u64)> {
    let parts = memory.description().parts.iter();
    let mut all: Vec<_> = parts
        .map(|part| (part.identity.allocation, part.identity.generation))
        .collect();
    all.sort_unstable();
    all
}

/// A metric's value, summed over its labels.
fn metric(service: &Service, name: &str) -> u64 {
    let text = service.metrics();
    let lines = text.lines().filter(|line| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with([' ', '{']))
    });
    lines
        .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
        .sum()
}

async fn until(service: &Service, name: &str, value: u64) {
    let end = Instant::now() + PATIENCE;
    while metric(service, name) != value {
        assert!(Instant::now() < end, "{name}: {}", service.metrics());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn refused<T: std::fmt::Debug>(result: Result<T>) -> Refusal {
    match result {
        Err(Error::Refused { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_peer_sees_anothers_bytes_and_each_gets_its_own_memory_back_zeroed() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;

    let memory = create(&a, "one", 8 * MIB).await.unwrap();
    memory.fill(0xaa).unwrap();
    let first = allocations(&memory);
    memory.release().await.unwrap();
    a.delete("one", PATIENCE).await.unwrap();
    until(&service, "egmem_kept_bytes", 8 * MIB).await;
    assert_eq!(metric(&service, "egmem_scrubbed_bytes_total"), 8 * MIB);

    // Another peer gets other memory.
    let memory = create(&b, "two", 8 * MIB).await.unwrap();
    assert_eq!(only_byte(&memory), 0);
    let others = allocations(&memory);
    assert!(
        first
            .iter()
            .all(|(id, _)| others.iter().all(|(other, _)| other != id))
    );
    memory.fill(0xbb).unwrap();
    memory.release().await.unwrap();

    // The first gets its own again: zeroed, and under another identity.
    let memory = create(&a, "three", 8 * MIB).await.unwrap();
    assert_eq!(only_byte(&memory), 0);
    let again = allocations(&memory);
    // But for the last part, which is there for probes and is never given out again.
    let renewed: Vec<_> = first[..first.len() - 1]
        .iter()
        .map(|(id, generation)| (*id, generation + 1))
        .collect();
    assert_eq!(again[..again.len() - 1], renewed);
    assert!(first.iter().all(|(id, _)| again[again.len() - 1].0 != *id));
    memory.release().await.unwrap();

    // Names are their owners' alone.
    assert_eq!(refused(b.fetch("three").go().await), Refusal::NotFound);
    assert_eq!(
        refused(b.delete("three", PATIENCE).await),
        Refusal::NotFound
    );
    assert_eq!(refused(create(&b, "three", MIB).await), Refusal::Exists);

    a.close().await;
    b.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_others_could_fetch_is_not_kept() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let ask = CreateOptions::new("shared", 4 * MIB).share_with("b.test");
    a.create(ask).await.unwrap();
    let memory = b.fetch("shared").go().await.unwrap();
    memory.fill(0xbb).unwrap();
    memory.release().await.unwrap();
    a.delete("shared", PATIENCE).await.unwrap();
    // With what was added for probes.
    until(&service, "egmem_discarded_policy_bytes_total", 6 * MIB).await;
    until(&service, "egmem_pinned_bytes", 0).await;
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_a_holder_that_fell_silent_is_never_given_out_again() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    // A second process of the same peer, which stops saying anything while it has memory mapped.
    let silent = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let options = Client::options(service.addresses()[0].clone())
        .security(peers.tls("a.test"))
        .timeout(PATIENCE);
    let held = {
        let driver = driver.clone();
        let work = silent.spawn(async move {
            let client = options.connect(&driver).await?;
            create(&client, "one", 8 * MIB).await
        });
        work.await.unwrap().unwrap()
    };
    held.fill(0xaa).unwrap();
    let first = allocations(&held);
    silent.shutdown_background();
    until(&service, "egmem_expired_total", 1).await;

    // The bytes are there for the peer's next process.
    let memory = a.fetch("one").go().await.unwrap();
    assert_eq!(only_byte(&memory), 0xaa);
    memory.release().await.unwrap();
    a.delete("one", PATIENCE).await.unwrap();
    until(&service, "egmem_discarded_tainted_bytes_total", 10 * MIB).await;
    assert_eq!(metric(&service, "egmem_kept_bytes"), 0);
    let memory = create(&a, "two", 8 * MIB).await.unwrap();
    assert_eq!(only_byte(&memory), 0);
    let second = allocations(&memory);
    assert!(
        first
            .iter()
            .all(|(id, _)| second.iter().all(|(other, _)| other != id))
    );
    // Who still has the old memory mapped sees nothing of the new.
    memory.fill(0xcc).unwrap();
    assert_eq!(only_byte(&held), 0xaa);
    memory.release().await.unwrap();
    drop(held);
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletion_waits_for_holders_and_goes_on_by_itself() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let memory = create(&a, "one", 4 * MIB).await.unwrap();
    let error = a
        .delete("one", Duration::from_millis(150))
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Refused {
                reason: Refusal::TimedOut,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("a.test"), "{error}");
    // Closed for new fetches, still there for its holder, and still charged.
    assert!(a.fetch("one").go().await.is_err());
    memory.put(0, 7_u64).unwrap();
    assert_eq!(metric(&service, "egmem_owners"), 1);
    memory.release().await.unwrap();
    until(&service, "egmem_owners", 0).await;
    until(&service, "egmem_kept_bytes", 4 * MIB).await;
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_are_each_peers_own_and_what_cannot_be_is_refused() {
    let peers = Peers::new();
    let driver = driver();
    let config = peers.config("[[buffer]]\nname = \"kept\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"*.test\"]\naccess = \"read\"");
    let service = Service::start(config, &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    let ask = |name: &str, bytes| CreateOptions::new(name, bytes);
    a.create(ask("a/1", 30 * MIB)).await.unwrap();
    assert_eq!(refused(create(&a, "a/2", 4 * MIB).await), Refusal::Quota);
    b.create(ask("b/1", 30 * MIB)).await.unwrap();
    // What was refused is charged to nobody.
    a.create(ask("a/2", 2 * MIB)).await.unwrap();
    a.delete("a/1", PATIENCE).await.unwrap();
    for name in ["a/3", "a/4", "a/5"] {
        a.create(ask(name, 1)).await.unwrap();
    }
    assert_eq!(refused(create(&a, "a/6", 1).await), Refusal::Quota);

    assert_eq!(refused(create(&b, "", 1).await), Refusal::Invalid);
    assert_eq!(refused(create(&b, "x", 0).await), Refusal::Invalid);
    assert_eq!(refused(create(&b, "x", u64::MAX).await), Refusal::Invalid);
    assert_eq!(refused(create(&b, "kept", 1).await), Refusal::Exists);
    let nowhere = b.create(ask("x", 1).node(NodeId(99))).await.unwrap_err();
    assert!(
        matches!(
            nowhere,
            Error::Refused {
                reason: Refusal::Invalid,
                ..
            }
        ),
        "{nowhere}"
    );
    // The configuration's own names are nobody's to delete.
    assert_eq!(refused(b.delete("kept", PATIENCE).await), Refusal::NotFound);
    let kept = b.fetch("kept").go().await.unwrap();
    assert_eq!(kept.description().access, Access::Read);
    kept.release().await.unwrap();
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_of_peers_change_while_it_runs() {
    let peers = Peers::new();
    let driver = driver();
    let buffer = |who: &str| {
        peers.config(&format!(
            "[[buffer]]\nname = \"kept\"\nbytes = \"1MiB\"\nnode = 0\nwho = [\"{who}\"]"
        ))
    };
    let service = Service::start(buffer("a.test"), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    assert_eq!(a.list("").await.unwrap().len(), 1);
    assert_eq!(b.list("").await.unwrap().len(), 0);
    let mut config = buffer("b.test");
    config.create = None;
    assert!(service.reload(config).unwrap().is_empty());
    assert_eq!(a.list("").await.unwrap().len(), 0);
    assert_eq!(b.list("").await.unwrap().len(), 1);
    assert_eq!(refused(create(&a, "x", 1).await), Refusal::Forbidden);
    // Certificates that cannot be read leave the old ones.
    std::fs::write(peers.folder.path().join("node.pem"), "nothing").unwrap();
    assert!(matches!(
        service.reload(buffer("a.test")),
        Err(Error::Tls { .. })
    ));
    assert_eq!(b.list("").await.unwrap().len(), 1);
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_fails_and_a_service_that_is_dropped_leave_nothing() {
    let peers = Peers::new();
    let driver = driver();
    let twice = peers.config("[[buffer]]\nname = \"a\"\nbytes = \"4MiB\"\nnode = 0\nwho = []");
    let mut none = twice.clone();
    none.buffers[0].node = Some(NodeId(9));
    let error = Service::start(none, &driver).await.unwrap_err();
    assert!(matches!(error, Error::NoSuchNode { .. }), "{error}");
    let mut large = twice.clone();
    large.buffers[0].bytes = 1 << 50;
    assert!(Service::start(large, &driver).await.is_err());
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

/// A directory's password that is not there: noticed when the server is up.
#[cfg(feature = "etcd")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_fails_when_the_server_is_up_leaves_nothing() {
    let peers = Peers::new();
    let driver = driver();
    let config = peers.config(
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
    let error = Service::start(config, &driver).await.unwrap_err();
    assert!(error.to_string().contains("/nowhere/password"), "{error}");
    let end = Instant::now() + PATIENCE;
    let door = peers.folder.path().join("door.sock");
    while door.exists() {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_without_padding_has_a_small_part_for_probes_that_no_quota_counts() {
    let peers = Peers::new();
    let driver = driver();
    let buffer = |name, more| {
        format!(
            "[[buffer]]\nname = \"{name}\"\nbytes = \"4MiB\"\nnode = 0\nwho = [\"*.test\"]\n{more}\n"
        )
    };
    let reserve = "[[reserve]]\nnode = 0\nbytes = \"64MiB\"\nchunk = \"32MiB\"";
    let config = buffer("probed", "") + &buffer("plain", "probe = false") + reserve;
    let service = Service::start(peers.config(&config), &driver)
        .await
        .unwrap();
    service.ready().await;
    let a = peers.client(&service, "a.test", &driver).await;
    // All of the quota, and from the reserve.
    a.create(CreateOptions::new("asked", 32 * MIB).node(NodeId(0)))
        .await
        .unwrap();
    let error = a.create(CreateOptions::new("more", 1)).await.unwrap_err();
    let quota = Refusal::Quota;
    assert!(
        matches!(&error, Error::Refused { reason, .. } if *reason == quota),
        "{error}"
    );
    for (name, len, parts) in [
        ("probed", 4 * MIB, &[4 * MIB, 2 * MIB][..]),
        ("asked", 32 * MIB, &[32 * MIB, 2 * MIB]),
        ("plain", 4 * MIB, &[4 * MIB]),
    ] {
        let memory = a.fetch(name).go().await.unwrap();
        let description = memory.description();
        let sizes: Vec<_> = description.parts.iter().map(|part| part.bytes).collect();
        assert_eq!(
            (memory.len(), description.len, &sizes[..]),
            (len, len, parts)
        );
        assert_eq!(memory.proved().cpu, parts.len() > 1, "{name}");
        assert_eq!(only_byte(&memory), 0);
        memory.release().await.unwrap();
    }
    a.delete("asked", PATIENCE).await.unwrap();
    until(&service, "egmem_kept_bytes", 32 * MIB).await;
    // Nothing is charged any more.
    a.create(CreateOptions::new("more", 32 * MIB))
        .await
        .unwrap();
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}
