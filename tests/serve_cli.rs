//! `egmem serve`, `ls`, `fetch`, `watch` and `certs`: real processes over real sockets.
#![cfg(feature = "cli")]

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Nothing here takes as long; emulated and instrumented it may take a while.
const PATIENCE: Duration = Duration::from_secs(120);

/// The program, where it was built or where `EGMEM_TEST_PROGRAM` says it was carried to, run as
/// `EGMEM_TEST_RUNNER` says.
fn egmem(args: &[&str]) -> Command {
    let runner = std::env::var("EGMEM_TEST_RUNNER").unwrap_or_default();
    let mut words: Vec<OsString> = runner.split_whitespace().map(OsString::from).collect();
    let program =
        std::env::var("EGMEM_TEST_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_egmem").into());
    words.push(program.into());
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(args);
    for name in [
        "RUST_LOG",
        "EGMEM_CA",
        "EGMEM_CERT",
        "EGMEM_KEY",
        "XDG_RUNTIME_DIR",
        "NOTIFY_SOCKET",
    ] {
        command.env_remove(name);
    }
    command
}

/// The simulator, unless a GPU is required.
fn driver() -> &'static [&'static str] {
    match std::env::var_os("EGMEM_REQUIRE_CUDA") {
        Some(_) => &[],
        None => &["--sim", "gh200"],
    }
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A process and its lines.
struct Running {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let out = child.stdout.take().unwrap();
        let (tell, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines() {
                let _ = tell.send(line.unwrap());
            }
        });
        Self {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// The next line that begins so, after the mark.
    fn line(&mut self, mark: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if let Some(rest) = line.trim_start().strip_prefix(mark) {
                        return rest.to_owned();
                    }
                }
                Err(_) => panic!("no line '{mark}' after {:?}", self.seen),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its exit status, when it ends.
    fn end(&mut self) -> std::process::ExitStatus {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "it does not end: {:?}", self.seen);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A service with a folder of its own.
struct Service {
    running: Running,
    folder: TempDir,
    tcp: Option<String>,
    metrics: Option<String>,
}

const USUAL: &str = r#"
listen = ["unix:@/egmem.sock"]
[create]
who = ["*"]
peer_bytes = "64MiB"
peer_names = 3
[[buffer]]
name = "weights"
bytes = "3MiB"
gpu = 0
who = ["*"]
access = "read"
[[buffer]]
name = "scratch"
bytes = "5000000"
gpu = 0
who = ["*"]
[[reserve]]
node = 0
bytes = "16MiB"
chunk = "8MiB"
min_chunk = "2MiB"
[node]
headroom = "0"
quiet = "1ms"
[lease]
heartbeat = "200ms"
expiry = "1s"
[metrics]
address = "127.0.0.1:0"
[drain]
deadline = "20s"
"#;

impl Service {
    fn start(config: &str) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), config, |_| {})
    }

    fn start_in(folder: TempDir, config: &str, more: impl FnOnce(&mut Command)) -> Self {
        let file = folder.path().join("egmem.toml");
        let at = folder.path().to_str().unwrap();
        std::fs::write(&file, config.replace('@', at)).unwrap();
        let mut command = egmem(&["serve", "--config", file.to_str().unwrap()]);
        command.args(driver());
        more(&mut command);
        let mut running = Running::start(command);
        running.line("ready");
        let find = |mark: &str| {
            let mut seen = running.seen.iter();
            seen.find_map(|line| line.strip_prefix(mark).map(str::to_owned))
        };
        let (tcp, metrics) = (find("listening at tcp"), find("metrics at http://"));
        Self {
            tcp: tcp.map(|rest| format!("tcp{rest}")),
            metrics: metrics.map(|url| url.replace("/metrics", "")),
            running,
            folder,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn address(&self) -> String {
        format!("unix:{}", self.path("egmem.sock").display())
    }

    fn run(&self, command: &str, args: &[&str]) -> Output {
        egmem(&[command, &self.address()])
            .args(args)
            .output()
            .unwrap()
    }

    fn fetch(&self, args: &[&str]) -> Output {
        egmem(&["fetch", &self.address()])
            .args(args)
            .args(driver())
            .output()
            .unwrap()
    }

    fn ls(&self) -> Value {
        let output = self.run("ls", &["--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// A metric's value, summed over its labels.
    fn metric(&self, name: &str) -> u64 {
        let text = self.get("/metrics");
        let of_name = |line: &&str| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with([' ', '{']))
        };
        let values: Vec<u64> = text
            .lines()
            .filter(of_name)
            .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
            .collect();
        assert!(!values.is_empty(), "no {name} in {text}");
        values.iter().sum()
    }

    fn until(&self, name: &str, value: u64) {
        let until = Instant::now() + PATIENCE;
        while self.metric(name) != value {
            assert!(Instant::now() < until, "{name} is {}", self.metric(name));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.metrics.as_ref().unwrap()).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn drained(mut self) {
        self.running.signal(Signal::TERM);
        assert_eq!(self.running.end().code(), Some(0));
        self.running.line("drained");
    }
}

fn names(list: &Value) -> Vec<&str> {
    let entries = list.as_array().unwrap().iter();
    entries
        .map(|entry| entry["name"].as_str().unwrap())
        .collect()
}

#[test]
fn names_are_listed_fetched_written_and_read() {
    let service = Service::start(USUAL);
    assert_eq!(names(&service.ls()), ["scratch", "weights"]);
    let text = stdout(&service.run("ls", &["--prefix", "w"]));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].starts_with("NAME"), "{text}");
    let row: Vec<_> = lines[1].split_whitespace().collect();
    assert_eq!(row, ["weights", "3", "MiB", "node", "0", "1", "r", "0"]);

    let (from, to) = (service.path("from"), service.path("to"));
    let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n / 7) as u8).collect();
    std::fs::write(&from, &bytes).unwrap();
    let output = service.fetch(&["scratch", "--write", from.to_str().unwrap(), "--verify"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    for words in [
        "4.77 MiB",
        "by POSIX fd",
        "see the same memory",
        "verified",
        "released",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(
        text.contains("simulated: no times"),
        !driver().is_empty(),
        "{text}"
    );
    // Another process finds them.
    let output = service.fetch(&["scratch", "--read", to.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let found = std::fs::read(&to).unwrap();
    assert_eq!(found.len(), 5_000_000);
    assert_eq!(&found[..bytes.len()], bytes);
    assert!(found[bytes.len()..].iter().all(|&byte| byte == 0));
    let output = service.fetch(&["scratch", "--read", "-"]);
    assert!(output.stdout == found, "bytes alone on standard output");

    // Some may only be read.
    let output = service.fetch(&["weights"]);
    assert!(stdout(&output).contains("read-only"), "{}", stderr(&output));
    let output = service.fetch(&["weights", "--write", from.to_str().unwrap()]);
    let text = stderr(&output);
    assert!(
        !output.status.success() && text.contains("what to do"),
        "{text}"
    );
    let output = service.fetch(&["weights", "--read-only", "--via", "fd", "--verify"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let output = service.fetch(&["nothing"]);
    let text = stderr(&output);
    assert!(
        text.starts_with("error: ") && text.contains("; what to do: "),
        "{text}"
    );
    service.drained();
}

#[test]
fn a_client_that_crashed_and_restarts_finds_its_bytes() {
    let service = Service::start(USUAL);
    let file = service.path("mine");
    std::fs::write(&file, b"what a crash must not take along").unwrap();
    let address = service.address();
    let mut command = egmem(&["fetch", &address, "job/1", "--create", "--bytes", "10MiB"]);
    command
        .args(["--write", file.to_str().unwrap(), "--hold"])
        .args(driver());
    let mut client = Running::start(command);
    client.line("holding");
    assert_eq!(service.ls()[0]["leases"], 1);
    client.signal(Signal::KILL);
    assert_eq!(client.end().signal(), Some(9));

    let output = service.fetch(&["job/1", "--create", "--bytes", "10MiB", "--read", "-"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        output
            .stdout
            .starts_with(b"what a crash must not take along")
    );
    // The dead one's lease ends by itself.
    service.until("egmem_leases", 0);
    assert_eq!(service.metric("egmem_expired_total"), 1);
    assert_eq!(service.metric("egmem_created_total"), 1);
    service.drained();
}

#[test]
fn quotas_hold() {
    let service = Service::start(USUAL);
    let create = |name: &str, bytes: &str| {
        let output = service.fetch(&[name, "--create", "--bytes", bytes]);
        (output.status.success(), stderr(&output))
    };
    assert!(create("a", "60MiB").0);
    let (done, text) = create("b", "6MiB");
    assert!(!done && text.contains("over the quota"), "{text}");
    assert!(create("b", "2MiB").0);
    assert!(create("c", "1").0);
    let (done, text) = create("d", "1");
    assert!(!done && text.contains("3 names"), "{text}");
    assert_eq!(service.metric("egmem_creations_refused_total"), 2);
    assert_eq!(names(&service.ls()), ["a", "b", "c", "scratch", "weights"]);
    let (done, text) = create("e", "0");
    assert!(!done, "{text}");
    service.drained();
}

#[test]
fn metrics_and_readiness_are_told() {
    let service = Service::start(USUAL);
    assert!(service.get("/healthz").ends_with("alive\n"));
    assert!(service.get("/readyz").starts_with("HTTP/1.1 200"));
    let text = service.get("/metrics");
    assert!(text.contains("application/openmetrics-text"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    service.until("egmem_reserve_bytes", 16 << 20);
    assert_eq!(service.metric("egmem_reserve_target_bytes"), 16 << 20);
    // 4 MiB and 6 MiB of the buffers beside it.
    service.until("egmem_pinned_bytes", 26 << 20);
    assert_eq!(service.metric("egmem_names"), 2);
    assert_eq!(service.metric("egmem_ready"), 1);
    // Warm bytes are given out, and the reserve fills up again.
    assert!(
        service
            .fetch(&["x", "--create", "--bytes", "16MiB"])
            .status
            .success()
    );
    assert!(service.metric("egmem_taken_warm_bytes_total") >= 16 << 20);
    service.until("egmem_reserve_bytes", 16 << 20);
    service.drained();
}

#[test]
fn every_metric_is_in_the_manual() {
    let service = Service::start(USUAL);
    let manual = include_str!("../docs/service.md");
    let text = service.get("/metrics");
    for line in text.lines().filter(|line| line.starts_with("# TYPE ")) {
        let name = line.split(' ').nth(2).unwrap();
        assert!(
            manual.contains(&format!("`{name}")),
            "{name} is not in docs/service.md"
        );
    }
    service.drained();
}

#[test]
fn watchers_hear_of_names_as_they_come_and_of_the_end() {
    let mut service = Service::start(USUAL);
    let mut watch = Running::start(egmem(&["watch", &service.address(), "--prefix", "w"]));
    let mut json = Running::start(egmem(&["watch", &service.address(), "--json"]));
    assert_eq!(watch.line("+ "), "weights  3 MiB  node 0  r");
    json.line("{");
    json.line("{");
    assert!(
        service
            .fetch(&["work", "--create", "--bytes", "2MiB"])
            .status
            .success()
    );
    assert_eq!(watch.line("+ "), "work  2 MiB  node 0  rw");
    let event: Value = serde_json::from_str(&format!("{{{}", json.line("{"))).unwrap();
    assert_eq!(event["event"], "published");
    assert_eq!(event["entry"]["name"], "work");
    service.running.signal(Signal::TERM);
    let mut gone = [watch.line("- "), watch.line("- ")];
    gone.sort();
    assert_eq!(gone, ["weights", "work"]);
    assert_eq!(service.running.end().code(), Some(0));
}

#[test]
fn a_drain_asks_the_holders_waits_and_tells_who_still_holds() {
    // A holder lets go when it is asked to.
    let mut service = Service::start(USUAL);
    let hold = |service: &Service| {
        let mut command = egmem(&["fetch", &service.address(), "scratch", "--hold"]);
        command.args(driver());
        let mut client = Running::start(command);
        client.line("holding");
        client
    };
    let mut client = hold(&service);
    service.running.signal(Signal::TERM);
    client.line("being withdrawn");
    assert_eq!(client.end().code(), Some(0));
    assert_eq!(service.running.end().code(), Some(0));
    service.running.line("drained");
    assert!(!service.path("egmem.sock").exists(), "the socket is gone");

    // One that is stopped cannot: its lease ends, and it is named.
    let mut service = Service::start(USUAL);
    let client = hold(&service);
    client.signal(Signal::STOP);
    service.running.signal(Signal::TERM);
    let status = service.running.end();
    client.signal(Signal::CONT);
    assert_eq!(status.code(), Some(3), "{status}");

    // A second signal ends it at once.
    let patient = USUAL.replace("expiry = \"1s\"", "expiry = \"1h\"");
    let mut service = Service::start(&patient);
    let client = hold(&service);
    client.signal(Signal::STOP);
    service.running.signal(Signal::INT);
    service.running.line("draining");
    service.running.signal(Signal::INT);
    assert_eq!(service.running.end().code(), Some(4));
    client.signal(Signal::CONT);
}

#[test]
fn the_service_manager_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut service = Service::start_in(folder, USUAL, |command| {
        command.env("NOTIFY_SOCKET", &path);
    });
    let hear = || {
        let mut bytes = [0; 512];
        let count = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    assert!(hear().contains("READY=1"));
    service.running.signal(Signal::HUP);
    service.running.line("reloaded");
    let text = hear();
    assert!(
        text.contains("RELOADING=1") && text.contains("MONOTONIC_USEC="),
        "{text}"
    );
    assert!(hear().contains("READY=1"));
    service.running.signal(Signal::TERM);
    assert!(hear().contains("STOPPING=1"));
    assert_eq!(service.running.end().code(), Some(0));
}

#[test]
fn lists_of_peers_are_reloaded_and_mistakes_leave_them() {
    let mut service = Service::start(USUAL);
    let file = service.path("egmem.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let mut rewrite = |text: &str, answer: &str| {
        std::fs::write(&file, text).unwrap();
        service.running.signal(Signal::HUP);
        service.running.line(answer)
    };
    let hidden = text.replace("who = [\"*\"]\naccess", "who = [\"uid:4000000\"]\naccess");
    assert_eq!(rewrite(&hidden, "reloaded"), "");
    let fixed = hidden.replace("quiet = \"1ms\"", "quiet = \"2ms\"");
    assert_eq!(rewrite(&fixed, "reloaded"), "; only a restart changes node");
    assert_eq!(names(&service.ls()), ["scratch"]);
    std::fs::write(&file, "listen = []").unwrap();
    service.running.signal(Signal::HUP);
    assert_eq!(names(&service.ls()), ["scratch"]);
    service.drained();
}

#[test]
fn a_wrong_configuration_is_named_and_nothing_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("egmem.toml");
    for (text, words, code) in [
        ("listen = []\nlisten_to = 1", "listen_to", 2),
        ("listen = [\"tcp://0.0.0.0:0\"]", "without TLS", 1),
        ("listen = [\"unix:/nowhere/at/all\"]", "/nowhere/at/all", 1),
        (
            "listen = [\"tcp://127.0.0.1:0\"]\n[[reserve]]\nnode = 77\nbytes = \"2MiB\"",
            "77",
            1,
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let mut command = egmem(&["serve", "--config", file.to_str().unwrap()]);
        let output = command.args(driver()).output().unwrap();
        let error = stderr(&output);
        assert!(
            error.contains(words) && error.contains("what to do"),
            "{text}: {error}"
        );
        assert_eq!(output.status.code(), Some(code), "{text}: {error}");
    }
    std::fs::write(&file, USUAL.replace('@', "/tmp")).unwrap();
    let output = egmem(&["serve", "--check", "--config", file.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

/// Certificates made by the program; returns the folder.
fn certs(folder: &Path) -> PathBuf {
    let at = folder.join("certs");
    let out = at.to_str().unwrap();
    let run = |args: &[&str]| {
        let output = egmem(&["certs"]).args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        stdout(&output)
    };
    let text = run(&["init", "--out", out, "--name", "test"]);
    assert!(text.contains("ca.pem") && text.contains("ca.key"), "{text}");
    let text = run(&[
        "issue",
        "node1.test",
        "--ca",
        out,
        "--san",
        "localhost",
        "--san",
        "127.0.0.1",
    ]);
    assert!(text.contains("node1.test.pem"), "{text}");
    run(&["issue", "client.test", "--ca", out, "--days", "1"]);
    run(&["issue", "other.test", "--ca", out]);
    at
}

#[test]
fn keys_are_private_and_nothing_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let at = certs(folder.path());
    for entry in std::fs::read_dir(&at).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        let key = entry.file_name().to_string_lossy().ends_with(".key");
        assert_eq!(
            mode & 0o077,
            if key { 0 } else { mode & 0o044 },
            "{:?}",
            entry.file_name()
        );
    }
    let before = std::fs::read(at.join("ca.key")).unwrap();
    let out = at.to_str().unwrap();
    for args in [
        &["init", "--out", out][..],
        &["issue", "client.test", "--ca", out],
    ] {
        let output = egmem(&["certs"]).args(args).output().unwrap();
        let text = stderr(&output);
        assert!(
            !output.status.success() && text.contains("not overwritten"),
            "{text}"
        );
    }
    assert_eq!(std::fs::read(at.join("ca.key")).unwrap(), before);
    for name in ["../evil", ".hidden", "ca", "a b", "*.x", "-x."] {
        let output = egmem(&["certs", "issue", "--ca", out, "--", name])
            .output()
            .unwrap();
        assert!(!output.status.success(), "{name}");
    }
    assert!(!folder.path().join("evil.pem").exists());
}

#[test]
fn certificates_open_the_way_over_tcp_and_lists_of_peers_hold() {
    let folder = tempfile::tempdir().unwrap();
    certs(folder.path());
    let config = USUAL
        .replace("listen = [", "listen = [\"tcp://127.0.0.1:0\", ")
        .replace("who = [\"*\"]\naccess", "who = [\"client.test\"]\naccess")
        + "[tls]\nca = \"@/certs/ca.pem\"\ncert = \"@/certs/node1.test.pem\"\nkey = \"@/certs/node1.test.key\"\n";
    let service = Service::start_in(folder, &config, |_| {});
    let tcp = service.tcp.clone().unwrap();
    let file = |name: &str| service.path(&format!("certs/{name}")).display().to_string();
    let with = |command: &str, name: &str, args: &[&str]| {
        let mut command = egmem(&[command, &tcp]);
        command.args(args).args(["--ca", &file("ca.pem")]);
        command.args(["--cert", &file(&format!("{name}.pem"))]);
        command.args(["--key", &file(&format!("{name}.key"))]);
        command.output().unwrap()
    };
    let list = |name: &str| -> Value {
        let output = with("ls", name, &["--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(names(&list("client.test")), ["scratch", "weights"]);
    assert_eq!(names(&list("other.test")), ["scratch"]);

    // What one peer creates, the other does not see, unless it is told.
    let args: Vec<_> = [
        "mine",
        "--create",
        "--bytes",
        "4MiB",
        "--share",
        "node1.test",
    ]
    .iter()
    .chain(driver())
    .copied()
    .collect();
    let output = with("fetch", "client.test", &args);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        stdout(&output).contains("POSIX fd"),
        "same machine: {}",
        stdout(&output)
    );
    assert_eq!(names(&list("client.test")), ["mine", "scratch", "weights"]);
    assert_eq!(names(&list("other.test")), ["scratch"]);
    assert_eq!(names(&list("node1.test")), ["mine", "scratch"]);

    // Without a certificate there is no way in.
    let output = egmem(&["ls", &tcp]).output().unwrap();
    assert!(!output.status.success());
    // By environment as well.
    let output = egmem(&["ls", &tcp])
        .env("EGMEM_CA", file("ca.pem"))
        .env("EGMEM_CERT", file("client.test.pem"))
        .env("EGMEM_KEY", file("client.test.key"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    service.drained();
}

#[test]
fn the_default_address_is_the_users_own_service() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("egmem")).unwrap();
    let config = USUAL.replace("unix:@/egmem.sock", "unix:@/egmem/egmem.sock");
    let service = Service::start_in(folder, &config, |_| {});
    let output = egmem(&["ls"])
        .env("XDG_RUNTIME_DIR", service.folder.path())
        .output()
        .unwrap();
    assert!(stdout(&output).contains("weights"), "{}", stderr(&output));
    service.drained();
}
