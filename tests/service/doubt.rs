//! Memory that a silent holder may still have mapped counts against its owner's quota.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;

use egmem::exchange::Address;
use rustix::process::{Pid, Signal, kill_process};

use super::*;

/// A service at a Unix socket in a folder, whose peers are this user's processes.
async fn start(folder: &TempDir, driver: &Driver) -> Service {
    let text = format!(
        r#"
listen = ["unix:{}/egmem.sock"]
[create]
who = ["*"]
peer_bytes = "32MiB"
peer_names = 4
[node]
headroom = "0"
quiet = "0s"
[lease]
heartbeat = "200ms"
expiry = "2s"
"#,
        folder.path().display()
    );
    let config = ServiceConfig::from_toml(&text).unwrap();
    Service::start(config, driver).await.unwrap()
}

async fn connect(address: Address, driver: &Driver) -> Client {
    let options = Client::options(address).timeout(PATIENCE);
    options.connect(driver).await.unwrap()
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
                // All of this client waits here: it says nothing any more.
                asleep.recv().unwrap();
                // The leases are lost; that the memory is unmapped is told nevertheless.
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
    assert_eq!(metric(&service, "egmem_doubtful_bytes"), 0);
    a.delete("one", PATIENCE).await.unwrap();
    a.delete("two", PATIENCE).await.unwrap();
    assert_eq!(metric(&service, "egmem_doubtful_bytes"), 24 * MIB);

    // But gets no more for it: not bytes, not names.
    let ask = |name, bytes| a.create(CreateOptions::new(name, bytes).node(NodeId(0)));
    let error = ask("three", 12 * MIB).await.unwrap_err();
    assert!(
        error.to_string().contains("24 MiB of what counts"),
        "{error}"
    );
    assert_eq!(refused::<()>(Err(error)), Refusal::Quota);
    ask("one", 1).await.unwrap();
    ask("two", 1).await.unwrap();
    assert_eq!(refused(ask("three", 1).await), Refusal::Quota);
    assert_eq!(metric(&service, "egmem_owners"), 1);

    wake.send(()).unwrap();
    until(&service, "egmem_doubtful_bytes", 0).await;
    ask("three", 24 * MIB).await.unwrap();
    silent.join().unwrap();
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}

/// Another process of this program, in the role below.
struct Holder(Child);

impl Holder {
    /// When it holds what it has created.
    fn start(socket: &Path) -> Self {
        let exe = std::env::current_exe().unwrap();
        let runner = std::env::var("EGMEM_TEST_RUNNER").unwrap_or_default();
        let mut words = runner.split_whitespace();
        let mut command = match words.next() {
            Some(program) => {
                let mut command = Command::new(program);
                command.args(words).arg(exe);
                command
            }
            None => Command::new(exe),
        };
        let child = command
            .args(["--exact", "doubt::holder", "--nocapture"])
            .env("EGMEM_SERVICE_SOCKET", socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut this = Self(child);
        let output = BufReader::new(this.0.stdout.take().unwrap());
        let mut lines = output.lines().map_while(std::result::Result::ok);
        assert!(lines.any(|line| line == "held"), "it holds nothing");
        this
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
    let Ok(socket) = std::env::var("EGMEM_SERVICE_SOCKET") else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let driver = driver();
        let address = format!("unix:{socket}").parse().unwrap();
        let client = connect(address, &driver).await;
        let memory = create(&client, "one", 8 * MIB).await.unwrap();
        memory.fill(0xaa).unwrap();
        println!("\nheld");
        // Until whoever started it is gone.
        let wait = || std::io::stdin().read_line(&mut String::new());
        let _ = tokio::task::spawn_blocking(wait).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_counts_until_the_holders_process_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let driver = driver();
    let service = start(&folder, &driver).await;
    let socket = folder.path().join("egmem.sock");
    let holder = tokio::task::spawn_blocking(move || Holder::start(&socket));
    let holder = holder.await.unwrap();
    // A process that is stopped cannot unmap anything.
    kill_process(Pid::from_child(&holder.0), Signal::STOP).unwrap();
    until(&service, "egmem_expired_total", 1).await;
    let a = connect(service.addresses()[0].clone(), &driver).await;
    let memory = a.fetch("one").probe(false).go().await.unwrap();
    assert_eq!(only_byte(&memory), 0xaa);
    memory.release().await.unwrap();
    a.delete("one", PATIENCE).await.unwrap();
    assert_eq!(metric(&service, "egmem_doubtful_bytes"), 8 * MIB);
    // One that was killed has nothing mapped any more.
    drop(holder);
    until(&service, "egmem_doubtful_bytes", 0).await;
    assert_eq!(metric(&service, "egmem_owners"), 0);
    a.close().await;
    service.drain(PATIENCE).await.unwrap();
    nothing_held(&driver);
}
