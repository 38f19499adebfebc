//! Memory that a silent holder may still have mapped counts against its owner's quota.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::channel;

use egmem::driver::HandleType;
use egmem::exchange::Address;
use rustix::process::{Pid, Signal, kill_process};

use super::*;

/// A service at a Unix socket in a folder, whose peers are this user's processes.
async fn start(folder: &TempDir, driver: &Driver) -> Service {
    start_with("", folder, driver).await
}

/// The same, with more about the peers that create memory.
async fn start_with(create: &str, folder: &TempDir, driver: &Driver) -> Service {
    start_leasing(&leases_end(), create, folder, driver).await
}

/// The same, with leases of that length.
async fn start_leasing(leases: &str, create: &str, folder: &TempDir, driver: &Driver) -> Service {
    let text = format!(
        r#"
listen = ["unix:{}/egmem.sock"]
[create]
who = ["*"]
peer_bytes = "32MiB"
peer_names = 4
{create}
{ANY_NAME}[node]
headroom = "0"
quiet = "0s"
{}{}"#,
        folder.path().display(),
        leases,
        limits()
    );
    std::fs::write(folder.path().join("egmem.toml"), &text).unwrap();
    let config = ServiceConfig::from_toml(&text).unwrap();
    Service::start(config, driver).await.unwrap()
}

async fn connect(address: Address, driver: &Driver) -> Client {
    let options = Client::options(address).timeout(PATIENCE);
    options.connect(driver).await.unwrap()
}

/// Waits until a lease has been lost.
async fn until_expired(service: &Service) {
    let end = Instant::now() + PATIENCE;
    // A holder on a busy machine may have lost one more before it was stopped.
    while metric(service, "egmem_expired_total") == 0 {
        assert!(Instant::now() < end, "{}", service.metrics());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_counts_until_the_holder_says_that_it_let_go() {
    let folder = tempfile::tempdir().unwrap();
    let driver = driver();
    let service = start(&folder, &driver).await;
    let address = service.addresses()[0].clone();
    let (held, is_held) = tokio::sync::oneshot::channel();
    let (wake, asleep) = channel::<()>();
    let silent = {
        let (address, driver) = (address.clone(), driver.clone());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let client = connect(address, &driver).await;
                let one = create(&client, "one", 12 * MIB).await.unwrap();
                let two = create(&client, "two", 12 * MIB).await.unwrap();
                one.fill(0xaa).unwrap();
                held.send(()).unwrap();
                // The whole runtime of this client blocks here, so the client sends nothing.
                asleep.recv().unwrap();
                // The leases are lost, but the client still reports that the memory is unmapped.
                let _ = (one.release().await, two.release().await);
                client.close().await;
            });
        })
    };
    is_held.await.unwrap();
    until(&service, "egmem_expired_total", 2).await;

    // The peer's next process finds its bytes, and may give them up.
    let a = connect(address, &driver).await;
    let memory = a.fetch("one").probe(false).go().await.unwrap();
    assert_eq!(only_byte(&memory), 0xaa);
    memory.release().await.unwrap();
    assert_eq!(metric(&service, "egmem_unconfirmed_bytes"), 0);
    a.delete("one", PATIENCE).await.unwrap();
    a.delete("two", PATIENCE).await.unwrap();
    // With the memory that was added for probes.
    assert_eq!(metric(&service, "egmem_unconfirmed_bytes"), 28 * MIB);

    // But the peer gets neither more bytes nor more names.
    let ask = |name, bytes| a.create(CreateOptions::new(name, bytes).node(NodeId(0)));
    let error = ask("three", 12 * MIB).await.unwrap_err();
    assert!(
        error.to_string().contains("28 MiB of what counts"),
        "{error}"
    );
    assert_eq!(refused::<()>(Err(error)), Refusal::Quota);
    ask("one", 1).await.unwrap();
    ask("two", 1).await.unwrap();
    assert_eq!(refused(ask("three", 1).await), Refusal::Quota);
    assert_eq!(metric(&service, "egmem_owners"), 1);

    wake.send(()).unwrap();
    until(&service, "egmem_unconfirmed_bytes", 0).await;
    ask("three", 24 * MIB).await.unwrap();
    silent.join().unwrap();
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

/// Another process of this program, in the role below.
struct Holder(Child);

impl Holder {
    /// Starts the process and waits until it holds the memory that it creates; over TLS if `tls` has certificates.
    async fn start(address: &Address, tls: Option<&Path>) -> Self {
        let mut command = egmem_tests::child(module_path!(), "holder");
        command
            .env("EGMEM_SERVICE_ADDRESS", address.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(folder) = tls {
            command.env("EGMEM_SERVICE_TLS", folder);
        }
        let start = move || {
            let mut this = Self(command.spawn().unwrap());
            let output = BufReader::new(this.0.stdout.take().unwrap());
            let mut lines = output.lines().map_while(std::result::Result::ok);
            assert!(lines.any(|line| line == "held"), "it holds nothing");
            this
        };
        tokio::task::spawn_blocking(start).await.unwrap()
    }

    /// A process that is stopped cannot unmap anything.
    fn stop(&self) {
        kill_process(Pid::from_child(&self.0), Signal::STOP).unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn holder() {
    let Ok(address) = std::env::var("EGMEM_SERVICE_ADDRESS") else {
        return;
    };
    let security = match std::env::var_os("EGMEM_SERVICE_TLS") {
        Some(folder) => {
            let [ca, cert, key] = ["ca.pem", "holder.pem", "holder.key"]
                .map(|name| std::fs::read(Path::new(&folder).join(name)).unwrap());
            let pem = TlsPem {
                ca: &ca,
                cert: &cert,
                key: &key,
                crl: None,
            };
            Security::Tls(Tls::from_pem(pem).unwrap())
        }
        None => Security::Plain,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let driver = driver();
        let options = Client::options(address.parse().unwrap()).security(security);
        let client = options.timeout(PATIENCE).connect(&driver).await.unwrap();
        let new = CreateOptions::new("one", 8 * MIB).node(NodeId(0));
        client.create(new).await.unwrap();
        // The kernel identifies the process that takes an fd.
        let fetch = client.fetch("one").via(HandleType::PosixFd).probe(false);
        let memory = fetch.go().await.unwrap();
        memory.fill(0xaa).unwrap();
        println!("\nheld");
        // Until the process that started it is gone.
        let wait = || std::io::stdin().read_line(&mut String::new());
        let _ = tokio::task::spawn_blocking(wait).await;
    });
}

/// Memory of a process that is stopped and then killed counts until then; `a` is the same peer.
async fn it_counts_until_it_has_ended(service: &Service, holder: Holder, a: &Client) {
    holder.stop();
    until_expired(service).await;
    let memory = a.fetch("one").probe(false).go().await.unwrap();
    assert_eq!(only_byte(&memory), 0xaa);
    memory.release().await.unwrap();
    a.delete("one", PATIENCE).await.unwrap();
    assert_eq!(metric(service, "egmem_unconfirmed_bytes"), 10 * MIB);
    // One that was killed has nothing mapped any more.
    drop(holder);
    until(service, "egmem_unconfirmed_bytes", 0).await;
    assert_eq!(metric(service, "egmem_owners"), 0);
    assert_eq!(metric(service, "egmem_forgiven_bytes_total"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_counts_until_the_holders_process_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let driver = driver();
    let service = start(&folder, &driver).await;
    let address = service.addresses()[0].clone();
    let holder = Holder::start(&address, None).await;
    let a = connect(address, &driver).await;
    it_counts_until_it_has_ended(&service, holder, &a).await;
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

/// Its lease would go on for two hours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_named_and_its_lease_ends_with_its_process() {
    let folder = tempfile::tempdir().unwrap();
    let driver = driver();
    let hours = "[lease]\nheartbeat = \"1h\"\nexpiry = \"2h\"\n";
    let service = start_leasing(hours, "", &folder, &driver).await;
    let address = service.addresses()[0].clone();
    let holder = Holder::start(&address, None).await;
    let a = connect(address, &driver).await;
    let error = a.delete("one", Duration::ZERO).await.unwrap_err();
    let shown = format!("process {} (", holder.0.id());
    assert!(error.to_string().contains(&shown), "{error}");
    assert_eq!(metric(&service, "egmem_leases"), 1);
    drop(holder);
    until(&service, "egmem_leases", 0).await;
    until(&service, "egmem_unconfirmed_bytes", 0).await;
    // The holder did not confirm its release: the memory is not used again.
    let end = Instant::now() + PATIENCE;
    while metric(&service, "egmem_discarded_tainted_bytes_total") < 8 * MIB {
        assert!(Instant::now() < end, "{}", service.metrics());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

/// A session over TLS moves to the Unix socket, where the kernel names the process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_does_a_process_count_whose_session_moved_to_the_unix_socket() {
    let peers = Peers::new();
    let (cert, key) = peers.certificate("a.test");
    std::fs::write(peers.folder.path().join("holder.pem"), cert).unwrap();
    std::fs::write(peers.folder.path().join("holder.key"), key).unwrap();
    let driver = driver();
    let config = peers.config_with("", &leases_end());
    let service = Service::start(config, &driver).await.unwrap();
    let address = service.addresses()[0].clone();
    let holder = Holder::start(&address, Some(peers.folder.path())).await;
    assert_eq!(service.stats().moved, 1);
    let a = peers.client(&service, "a.test", &driver).await;
    it_counts_until_it_has_ended(&service, holder, &a).await;
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_counts_no_longer_than_the_configuration_says() {
    let folder = tempfile::tempdir().unwrap();
    let driver = driver();
    let service = start_with("forgive_after = \"1h\"", &folder, &driver).await;
    let address = service.addresses()[0].clone();
    let holder = Holder::start(&address, None).await;
    holder.stop();
    until_expired(&service).await;
    let a = connect(address, &driver).await;
    a.delete("one", PATIENCE).await.unwrap();
    assert_eq!(metric(&service, "egmem_unconfirmed_bytes"), 10 * MIB);
    assert_eq!(metric(&service, "egmem_forgiven_bytes_total"), 0);
    // A new configuration applies to existing unconfirmed releases too.
    let text = std::fs::read_to_string(folder.path().join("egmem.toml")).unwrap();
    let config = ServiceConfig::from_toml(&text.replace("1h", "1ms")).unwrap();
    assert!(service.reload(config).unwrap().is_empty());
    until(&service, "egmem_forgiven_bytes_total", 10 * MIB).await;
    assert_eq!(metric(&service, "egmem_unconfirmed_bytes"), 0);
    assert_eq!(metric(&service, "egmem_owners"), 0);
    drop(holder);
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

/// A peer without a right to create falls silent with memory that it was given, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_importers_silence_is_charged_to_the_importer() {
    let peers = Peers::new();
    let driver = driver();
    let config = peers.config_with("", &leases_end());
    let service = Service::start(config, &driver).await.unwrap();
    let a = peers.client(&service, "a.test", &driver).await;
    let (address, security) = (service.addresses()[0].clone(), peers.tls("b.guest"));
    let options = Client::options(address)
        .security(security)
        .timeout(PATIENCE);
    let make = async || {
        let new = CreateOptions::new("one", 24 * MIB).node(NodeId(0));
        a.create(new.share_with("*")).await.unwrap();
    };
    let mut silent = Vec::new();
    for round in 1..=2 {
        make().await;
        let (options, driver) = (options.clone(), driver.clone());
        let (held, is_held) = tokio::sync::oneshot::channel();
        let (wake, asleep) = channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let client = options.connect(&driver).await.unwrap();
                let one = client.fetch("one").probe(false).go().await.unwrap();
                held.send(()).unwrap();
                // The whole runtime of this client blocks here, so the client sends nothing.
                asleep.recv().unwrap();
                let _ = one.release().await;
                client.close().await;
            });
        });
        is_held.await.unwrap();
        until(&service, "egmem_expired_total", round).await;
        a.delete("one", PATIENCE).await.unwrap();
        assert_eq!(
            metric(&service, "egmem_unconfirmed_bytes"),
            round * 26 * MIB
        );
        silent.push((wake, thread));
    }
    // Its creator has its quota, and the silent peer gets no more of anything.
    make().await;
    let b = options.clone().connect(&driver).await.unwrap();
    let error = b.fetch("one").probe(false).go().await.unwrap_err();
    assert!(error.to_string().contains("quota"), "{error}");
    for (wake, thread) in silent {
        wake.send(()).unwrap();
        thread.join().unwrap();
    }
    until(&service, "egmem_unconfirmed_bytes", 0).await;
    b.fetch("one").probe(false).go().await.unwrap();
    a.delete("one", PATIENCE).await.unwrap();
    a.close().await;
    b.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}
