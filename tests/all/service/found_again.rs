//! A client that was restarted finds the memory that its peer has created before.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Stdio};

use egmem::driver::HandleType;
use egmem::exchange::{Address, Mismatch};

use super::*;

/// More than half of a peer's quota.
const BYTES: u64 = 20 * MIB;

fn ask(name: &str) -> CreateOptions {
    CreateOptions::new(name, BYTES).node(NodeId(0))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn own_memory_is_granted_again_without_quota_or_rights_and_is_not_charged() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let made = a.create_or_get(ask("kv")).await.unwrap();
    let charged = metric(&service, "egmem_charged_bytes");
    assert_eq!(a.create_or_get(ask("kv")).await.unwrap(), made);
    // Without room for more names either.
    for name in ["1", "2", "3"] {
        a.create(CreateOptions::new(name, 1)).await.unwrap();
    }
    let full = metric(&service, "egmem_charged_bytes");
    assert_eq!(a.create_or_get(ask("kv")).await.unwrap(), made);
    assert_eq!(refused(a.create(ask("kv")).await), Refusal::Exists);
    assert_eq!(refused(a.create(ask("new")).await), Refusal::Quota);
    // Of another size or node it is not granted, and the error says why, although the quota is used up.
    let sizes = a.create_or_get(CreateOptions::new("kv", 2 * BYTES)).await;
    let nodes = a.create_or_get(ask("kv").node(NodeId(99))).await;
    for (wrong, is_size) in [(sizes, true), (nodes, false)] {
        let Err(Error::Mismatched { what, .. }) = wrong else {
            panic!("{wrong:?}")
        };
        assert_eq!(matches!(*what, Mismatch::Size { .. }), is_size, "{what:?}");
        assert_eq!(matches!(*what, Mismatch::Node { .. }), !is_size, "{what:?}");
    }
    // Nor does the peer lose it with the right to create such names.
    let own_prefix = peers.config_of_names("", LEASES_STAY, "");
    assert!(service.reload(own_prefix).unwrap().is_empty());
    assert_eq!(a.create_or_get(ask("kv")).await.unwrap(), made);
    assert_eq!(
        refused(a.create_or_get(ask("new")).await),
        Refusal::WrongPrefix
    );
    assert!(charged >= BYTES && full > charged);
    assert_eq!(metric(&service, "egmem_charged_bytes"), full);
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_over_its_quota_does_not_learn_that_anothers_name_exists() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "b.test", &driver).await;
    a.create_or_get(ask("hidden")).await.unwrap();
    b.create_or_get(ask("own")).await.unwrap();
    for name in ["hidden", "free"] {
        let error = b.create_or_get(ask(name)).await.unwrap_err().to_string();
        assert!(
            error.contains("22 MiB of 32 MiB are taken, 20 MiB"),
            "{error}"
        );
    }
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_clients_that_create_one_name_at_once_get_the_same_memory() {
    let peers = Peers::new();
    let driver = driver();
    let service = Service::start(peers.config(""), &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let b = peers.client(&service, "a.test", &driver).await;
    for round in 0..16 {
        let (one, other) = tokio::join!(a.create_or_get(ask("kv")), b.create_or_get(ask("kv")));
        assert_eq!(one.unwrap(), other.unwrap(), "round {round}");
        a.delete("kv", PATIENCE).await.unwrap();
    }
    let _ = (a.close().await, b.close().await);
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

/// Another process of this program, in the role of [`engine`].
struct Engine(Child, Lines<BufReader<ChildStdout>>);

impl Engine {
    fn start(address: &Address) -> Self {
        let mut command = egmem_tests::child(module_path!(), "engine");
        command
            .env("EGMEM_SERVICE_ADDRESS", address.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self(child, lines)
    }

    /// Waits until it has the memory; returns the byte that it found there.
    fn found(&mut self) -> u8 {
        let mut lines = self.1.by_ref().map_while(std::result::Result::ok);
        let found = lines.find_map(|line| line.strip_prefix("found ")?.parse().ok());
        found.expect("it has no memory")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn engine() {
    let Ok(address) = std::env::var("EGMEM_SERVICE_ADDRESS") else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let driver = driver();
        let options = Client::options(address.parse().unwrap()).timeout(PATIENCE);
        let client = options.connect(&driver).await.unwrap();
        client.create_or_get(ask("kv")).await.unwrap();
        let own = client.peer_name().unwrap();
        let fetch = client.fetch("kv").expect_owner(own).probe(false);
        let memory = fetch.via(HandleType::PosixFd).go().await.unwrap();
        println!("\nfound {}", only_byte(&memory));
        memory.fill(only_byte(&memory) + 1).unwrap();
        println!("\nfound {}", only_byte(&memory));
        // Until it is killed.
        let wait = || std::io::stdin().read_line(&mut String::new());
        let _ = tokio::task::spawn_blocking(wait).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_was_killed_and_starts_again_finds_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let driver = driver();
    let text = format!(
        r#"
listen = ["unix:{}/egmem.sock"]
[create]
who = ["*"]
peer_bytes = "32MiB"
{ANY_NAME}[node]
headroom = "0"
quiet = "0s"
{LEASES_STAY}{}"#,
        folder.path().display(),
        limits()
    );
    let config = ServiceConfig::from_toml(&text).unwrap();
    let service = Service::start(config, &driver).await.unwrap();
    let address = service.addresses()[0].clone();
    let restarted = tokio::task::spawn_blocking(move || {
        for before in 0..3 {
            let mut engine = Engine::start(&address);
            assert_eq!(engine.found(), before);
            assert_eq!(engine.found(), before + 1, "it has written its own");
        }
    });
    restarted.await.unwrap();
    // The memory that was added for probes counts too.
    assert_eq!(metric(&service, "egmem_charged_bytes"), BYTES + 2 * MIB);
    until(&service, "egmem_leases", 0).await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}
