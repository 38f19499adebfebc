//! A service process: started, reloaded, ended in order or killed, and started again.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::journal::Journal;
use egmem_tests::pki::Files;

/// Nothing takes as long, on the slowest machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A service through all its lives.
pub struct Service {
    pub name: &'static str,
    /// `127.x.y.z:port`, the same in all lives.
    pub tcp: String,
    folder: PathBuf,
    files: Files,
    process: Option<Process>,
    /// How often it was started.
    pub lives: u32,
    journal: Arc<Journal>,
}

struct Process {
    child: Child,
    lines: Receiver<String>,
    /// The last lines of its standard error, for a failure's report.
    log: Arc<Mutex<Vec<String>>>,
    metrics: String,
}

/// By default glibc keeps megabytes of freed memory for each of its arenas, more after each large
/// block. With fixed thresholds it returns them, so that resident bytes are those in use.
const TUNABLES: &str = "glibc.malloc.trim_threshold=131072:glibc.malloc.mmap_threshold=131072";

/// `@` stands for the folder.
const CONFIG: &str = r#"
listen = ["unix:@/sock", "tcp://{tcp}"]
[tls]
ca = "{ca}"
cert = "{cert}"
key = "{key}"
[local]
[create]
who = ["*"]
peer_bytes = "64MiB"
peer_names = 24
forgive_after = "2s"
[[buffer]]
name = "weights"
bytes = "3MiB"
node = 0
who = ["*"]
access = "read"
[[buffer]]
name = "scratch"
bytes = "5000000"
node = 0
who = ["*"]
[[buffer]]
name = "private"
bytes = "1MiB"
node = 0
who = ["nobody.test"]
[[reserve]]
node = 0
bytes = "16MiB"
chunk = "4MiB"
min_chunk = "2MiB"
[node]
headroom = "0"
max_bytes = "512MiB"
quiet = "10ms"
retry = "100ms"
[reuse]
policy = "{policy}"
keep = "16MiB"
threads = 2
[lease]
heartbeat = "300ms"
expiry = "2s"
[limits]
handshakes = 64
connections = 256
connections_per_peer = 96
sessions = 256
sessions_per_peer = 96
names = 128
handshake = 2000
frame = 2000
write = 2000
request = 10000
wait = 5000
[metrics]
address = "127.0.0.1:0"
[drain]
deadline = "{drain}"
"#;

impl Service {
    /// Starts a service at a fixed address in a folder of its own.
    pub fn start(
        name: &'static str,
        tcp: &str,
        folder: &Path,
        files: Files,
        journal: Arc<Journal>,
    ) -> Self {
        let folder = folder.join(name);
        std::fs::create_dir(&folder).expect("a folder");
        let mut service = Self {
            name,
            tcp: tcp.to_owned(),
            folder,
            files,
            process: None,
            lives: 0,
            journal,
        };
        service.begin("same-peer");
        service
    }

    pub fn unix(&self) -> PathBuf {
        self.folder.join("sock")
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("it runs").child.id()
    }

    fn write_config(&self, policy: &str, drain: &str) {
        let text = CONFIG
            .replace('@', self.folder.to_str().expect("UTF-8"))
            .replace("{tcp}", &self.tcp)
            .replace("{ca}", self.files.ca.to_str().expect("UTF-8"))
            .replace("{cert}", self.files.cert.to_str().expect("UTF-8"))
            .replace("{key}", self.files.key.to_str().expect("UTF-8"))
            .replace("{policy}", policy)
            .replace("{drain}", drain);
        std::fs::write(self.folder.join("egmem.toml"), text).expect("written");
    }

    /// Starts the process, under a policy for the memory that comes back, and waits until it is ready.
    pub fn begin(&mut self, policy: &str) {
        self.spawn(policy);
        let process = self.process.as_mut().expect("just started");
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = process.lines.recv_timeout(left);
            let line =
                line.unwrap_or_else(|_| panic!("{} is not ready: {}", self.name, process.log()));
            if let Some(url) = line.strip_prefix("metrics at http://") {
                process.metrics = url.replace("/metrics", "");
            }
            if line.starts_with("ready") {
                return;
            }
        }
    }

    fn spawn(&mut self, policy: &str) {
        assert!(self.process.is_none(), "it runs already");
        self.write_config(policy, "2s");
        let mut child = egmem_tests::egmem(&["serve"])
            .arg("--config")
            .arg(self.folder.join("egmem.toml"))
            .args(["--sim", "gh200"])
            .env("GLIBC_TUNABLES", TUNABLES)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        self.lives += 1;
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let log = Arc::new(Mutex::new(Vec::new()));
        let errors = BufReader::new(child.stderr.take().expect("piped"));
        let (kept, journal, name) = (Arc::clone(&log), Arc::clone(&self.journal), self.name);
        std::thread::spawn(move || {
            for line in errors.lines().map_while(Result::ok) {
                if line.contains("panicked at") {
                    journal.violation(format!("{name}: {line}"));
                }
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                if kept.len() > 100 {
                    kept.remove(0);
                }
                kept.push(line);
            }
        });
        self.process = Some(Process {
            child,
            lines,
            log,
            metrics: String::new(),
        });
    }

    /// Whether it has not ended by itself; if it has, that is a violation.
    pub fn check_alive(&mut self) -> bool {
        let Some(process) = &mut self.process else {
            return false;
        };
        match process.child.try_wait() {
            Ok(None) => true,
            status => {
                let log = process.log();
                self.journal
                    .violation(format!("{} ended: {status:?}\n{log}", self.name));
                false
            }
        }
    }

    /// Has it read its configuration again, with another time for the drain.
    pub fn reload(&mut self, drain: &str) {
        self.write_config("same-peer", drain);
        self.signal(Signal::HUP);
        self.journal.count("service reloaded");
    }

    /// Ends it in order; holders may keep it until the deadline.
    pub fn drain(&mut self) {
        self.signal(Signal::TERM);
        let status = self.wait();
        match status.code() {
            Some(code @ (0 | 3)) => self.journal.count(format!("service drained: exit {code}")),
            _ => self.unasked(status),
        }
        self.process = None;
    }

    /// Ends it by two signals, the second in the middle of the drain.
    pub fn end_now(&mut self) {
        self.signal(Signal::TERM);
        std::thread::sleep(Duration::from_millis(30));
        self.signal(Signal::TERM);
        let status = self.wait();
        match status.code() {
            Some(code @ (0 | 3 | 137 | 143)) => {
                self.journal
                    .count(format!("service told to end twice: exit {code}"));
            }
            _ => self.unasked(status),
        }
        self.process = None;
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.wait();
        self.process = None;
        self.journal.count("service killed");
    }

    /// Starts it and kills it before it is ready.
    pub fn stillborn(&mut self, after: Duration) {
        self.spawn("same-peer");
        std::thread::sleep(after);
        self.signal(Signal::KILL);
        self.wait();
        self.process = None;
        self.journal.count("service killed while it started");
    }

    fn unasked(&self, status: ExitStatus) {
        let log = self.process.as_ref().map(Process::log).unwrap_or_default();
        self.journal
            .violation(format!("{} ended with {status:?}\n{log}", self.name));
    }

    fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("it runs");
        let _ = kill_process(Pid::from_child(&process.child), signal);
    }

    fn wait(&mut self) -> ExitStatus {
        let process = self.process.as_mut().expect("it runs");
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = process.child.try_wait().expect("a child") {
                return status;
            }
            if Instant::now() > end {
                let log = process.log();
                panic!("{} does not end\n{log}", self.name);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Its metrics, as text.
    pub fn metrics(&self) -> std::io::Result<String> {
        let process = self.process.as_ref().expect("it runs");
        let mut stream = TcpStream::connect(&process.metrics)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: soak\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// The address of its metrics.
    pub fn metrics_address(&self) -> String {
        let process = self.process.as_ref().expect("it runs");
        process.metrics.clone()
    }

    /// The last lines of its standard error.
    pub fn log(&self) -> String {
        self.process.as_ref().map(Process::log).unwrap_or_default()
    }
}

impl Process {
    fn log(&self) -> String {
        self.log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
