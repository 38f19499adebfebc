//! Processes with roles, spoken to by lines; times; looks for leaks.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use egmem_tests::drivers::is_cuda_required;
use egmem_tests::pki::Files;
use egmem_tests::{child_arguments, this_program};

/// The variable that makes a child process of this test binary play a role.
pub const ROLE: &str = "EGMEM_EXCHANGE_ROLE";
/// The beginning of a role's answers; other lines of its output are for the log.
pub const MARK: &str = "@";

/// How often clients ping in tests of silent processes. A healthy process may be silent for longer on a
/// busy machine: it loses its connection then, and requests that wait for an answer fail.
const HEARTBEAT: Duration = Duration::from_millis(100);

/// How long a session lives without a word in tests of its end.
pub const LEASE: Duration = Duration::from_secs(1);

/// How long a session lives without a word in all other tests.
const LONG_LEASE: Duration = Duration::from_secs(3600);

/// How long anything may take that must not hang.
pub fn patience() -> Duration {
    Duration::from_secs(300)
}

/// The settings of a role.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// `owner` or `peer`.
    pub role: String,
    /// A preset of the simulator, or `cuda`.
    pub driver: String,
    /// Where the owner listens and the peer connects: an [`egmem::exchange::Address`].
    pub address: String,
    /// Certificates; none: plain.
    pub files: Option<Files>,
    pub heartbeat: Duration,
    pub lease: Duration,
    /// How long the handshake of a connection may take; none: as each other step.
    pub handshake: Option<Duration>,
    /// How long each step of a connection may take; none: the default.
    pub step: Option<Duration>,
    /// How many file descriptors it may have; none: as many as a crowd needs.
    pub fds: Option<u64>,
}

impl Setup {
    /// An owner on the simulator at `address`.
    pub fn owner(address: &str, files: Option<&Files>) -> Self {
        Self {
            role: "owner".into(),
            driver: "gh200".into(),
            address: address.into(),
            files: files.cloned(),
            heartbeat: patience(),
            lease: LONG_LEASE,
            handshake: None,
            step: Some(patience()),
            fds: None,
        }
    }

    /// A peer of the owner at `address`.
    pub fn peer(address: &str, files: Option<&Files>) -> Self {
        Self {
            role: "peer".into(),
            ..Self::owner(address, files)
        }
    }

    pub fn on(mut self, driver: &str) -> Self {
        self.driver = driver.into();
        self
    }

    /// With short heartbeats, so that each end notices soon that the other is gone or silent. Leases stay
    /// long: no delay of a healthy process ends one. Such a process repeats its requests: see [`Role::insist`].
    pub fn with_heartbeats(mut self) -> Self {
        self.heartbeat = HEARTBEAT;
        self
    }

    /// With short heartbeats, and leases that end after so much silence.
    pub fn with_leases_of(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self.with_heartbeats()
    }
}

/// The drivers that the basic cases run on: the simulator with fabric, and a GPU's where one is
/// insisted on.
pub fn drivers() -> Vec<&'static str> {
    let mut drivers = vec!["gh200"];
    if is_cuda_required() {
        drivers.push("cuda");
    }
    drivers
}

/// A process with a role. Killed when dropped.
pub struct Role {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    /// The last lines of its output, for a failure's report.
    log: Arc<Mutex<VecDeque<String>>>,
    name: String,
    /// For its temporary files, which it cannot remove if it is killed.
    _folder: tempfile::TempDir,
}

impl Role {
    /// Starts a role; returns it with its text when it was ready.
    #[track_caller]
    pub fn start(setup: &Setup) -> (Self, String) {
        Self::start_in(None, setup)
    }

    /// The same in a network namespace.
    #[track_caller]
    pub fn start_in(namespace: Option<&str>, setup: &Setup) -> (Self, String) {
        let mut role = Self::spawn(namespace, setup);
        let ready = role.line("its start");
        match ready.split_once(' ') {
            Some(("ready", rest)) => (role, rest.to_owned()),
            _ => panic!("{}: '{ready}' at its start\n{}", role.name, role.log()),
        }
    }

    /// Starts a role that need not become ready.
    pub fn spawn(namespace: Option<&str>, setup: &Setup) -> Self {
        let mut words: Vec<OsString> = Vec::new();
        if let Some(namespace) = namespace {
            words.extend(["ip", "netns", "exec", namespace].map(OsString::from));
        }
        words.extend(egmem_tests::words(this_program()));
        let folder = tempfile::tempdir().expect("a folder");
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .args(child_arguments(super::MODULE, "child_process"))
            .env("TMPDIR", folder.path())
            .env_remove("XDG_RUNTIME_DIR")
            .env(ROLE, serde_json::to_string(setup).expect("JSON"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the test starts itself");
        let (sender, lines) = channel();
        let log = Arc::new(Mutex::new(VecDeque::new()));
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let kept = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                {
                    let mut kept = kept.lock().expect("no panic under it");
                    kept.push_back(line.clone());
                    if kept.len() > 40 {
                        kept.pop_front();
                    }
                }
                // libtest may have begun the line.
                if let Some((_, answer)) = line.split_once(MARK)
                    && sender.send(answer.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        Self {
            stdin: child.stdin.take(),
            name: format!("{} {}", setup.role, child.id()),
            child,
            lines,
            log,
            _folder: folder,
        }
    }

    /// Returns whether a role that was spawned becomes ready.
    #[track_caller]
    pub fn begins(&mut self) -> bool {
        self.line("its start").starts_with("ready ")
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends a command without waiting for its answer.
    #[track_caller]
    pub fn tell(&mut self, command: &str) {
        let stdin = self.stdin.as_mut().expect("it was not told to end");
        writeln!(stdin, "{command}")
            .and_then(|()| stdin.flush())
            .unwrap_or_else(|error| panic!("{} is gone: {error}", self.name));
    }

    /// The answer to a command: `Err` is the error's kind and words.
    #[track_caller]
    pub fn ask(&mut self, command: &str) -> Result<String, String> {
        self.tell(command);
        self.answer(command)
    }

    /// The answer to a command that was sent before.
    #[track_caller]
    pub fn answer(&mut self, command: &str) -> Result<String, String> {
        let line = self.line(command);
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("ok", rest) => Ok(rest.to_owned()),
            ("err", rest) => Err(rest.to_owned()),
            _ => panic!("{}: '{line}' to '{command}'\n{}", self.name, self.log()),
        }
    }

    /// The answer to a command that must succeed.
    #[track_caller]
    pub fn must(&mut self, command: &str) -> String {
        self.ask(command)
            .unwrap_or_else(|error| panic!("{}: {command}: {error}\n{}", self.name, self.log()))
    }

    /// The answer to a command that succeeds once the connection lasts for as long as it takes.
    #[track_caller]
    pub fn insist(&mut self, command: &str) -> String {
        let mut answer = Err(String::new());
        eventually(command, || {
            answer = self.ask(command);
            answer.is_ok()
        });
        answer.expect("it has succeeded")
    }

    #[track_caller]
    fn line(&mut self, what: &str) -> String {
        match self.lines.recv_timeout(patience()) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                panic!("{}: no answer to '{what}'\n{}", self.name, self.log())
            }
            Err(RecvTimeoutError::Disconnected) => {
                panic!("{} ended at '{what}'\n{}", self.name, self.log())
            }
        }
    }

    fn log(&self) -> String {
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.iter().map(|line| format!("    {line}\n")).collect()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: no memory is involved; the child is ours and not waited for yet, so no
        // other process has its pid.
        let sent = unsafe { libc::kill(self.pid(), signal) };
        assert_eq!(sent, 0, "{}: signal {signal}", self.name);
    }

    /// Kills it at once and waits for its end.
    pub fn kill(mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it can be waited for");
    }

    /// Lets it give everything back and end; it checks itself for leaks.
    #[track_caller]
    pub fn finish(mut self) {
        self.must("quit");
        drop(self.stdin.take());
        let status = self.wait(patience());
        assert!(
            status.is_some_and(|status| status.success()),
            "{}: {status:?}\n{}",
            self.name,
            self.log()
        );
    }

    fn wait(&mut self, at_most: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + at_most;
        loop {
            match self.child.try_wait().expect("it can be waited for") {
                Some(status) => return Some(status),
                None if Instant::now() > end => return None,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        // Also one that is stopped; errors mean that it has ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Waits until `done` says so.
#[track_caller]
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + patience();
    while !done() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A loopback address for one test alone. An owner that is to listen again on a port that was the last
/// owner's listens here: no other test can take the port meanwhile.
pub fn lone_host() -> String {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let number = std::process::id() << 8 | LAST.fetch_add(1, Relaxed) & 0xff;
    let [_, a, b, c] = number.to_be_bytes();
    Ipv4Addr::new(127, a | 0x80, b, c).to_string()
}

/// The fds of this process but those that come and go with reading `/proc`.
pub fn fds() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, |folder| folder.count().saturating_sub(1))
}

/// The simulator's memory in this process's address space.
pub fn mapped() -> Vec<String> {
    fs::read_to_string("/proc/self/maps")
        .unwrap_or_default()
        .lines()
        .filter(|line| line.contains("memfd:egmem-sim"))
        .map(str::to_owned)
        .collect()
}
