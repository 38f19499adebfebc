//! The program, its processes, and a service with a folder of its own.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use egmem_tests::drivers::is_cuda_required;
use egmem_tests::egmem;

/// Nothing here takes as long; emulated and instrumented it may take a while.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// The simulator, unless a GPU is required.
pub fn driver() -> &'static [&'static str] {
    match is_cuda_required() {
        true => &[],
        false => &["--sim", "gh200"],
    }
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A process and its lines, of standard output and of errors.
pub struct Running {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Running {
    pub fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = child.stderr.take().unwrap();
        let stdout = child.stdout.take().unwrap();
        Self::reading(child, vec![Box::new(stdout), Box::new(stderr)])
    }

    /// Reads standard output alone; standard error goes to `tell`.
    fn start_with_stderr(mut command: Command, tell: Sender<ChildStderr>) -> Self {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        tell.send(child.stderr.take().unwrap()).unwrap();
        let stdout = child.stdout.take().unwrap();
        Self::reading(child, vec![Box::new(stdout)])
    }

    fn reading(child: Child, streams: Vec<Box<dyn Read + Send>>) -> Self {
        let (tell, lines) = mpsc::channel();
        for stream in streams {
            let tell = tell.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).lines() {
                    let _ = tell.send(line.unwrap());
                }
            });
        }
        Self {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// The next line that begins so, after the mark.
    pub fn line(&mut self, mark: &str) -> String {
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

    /// The next line that has this in it.
    pub fn line_with(&mut self, words: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(words) => return line,
                Ok(line) => self.seen.push(line),
                Err(_) => panic!("no line with '{words}' after {:?}", self.seen),
            }
        }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops it; when this returns, it does nothing any more.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", self.child.id());
        let until = Instant::now() + PATIENCE;
        loop {
            let text = std::fs::read_to_string(&stat).unwrap();
            // The state comes after the name, which is in parentheses.
            if text
                .rsplit(')')
                .next()
                .unwrap()
                .trim_start()
                .starts_with('T')
            {
                return;
            }
            assert!(Instant::now() < until, "it does not stop: {text}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its exit status, when it ends.
    pub fn end(&mut self) -> std::process::ExitStatus {
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
pub struct Service {
    pub running: Running,
    pub folder: TempDir,
    pub tcp: Option<String>,
    metrics: Option<String>,
}

/// Leases of the live are not lost to a slow machine: tests of expiry have times of their own.
pub const USUAL: &str = r#"
listen = ["unix:@/egmem.sock"]
[create]
who = ["*"]
peer_bytes = "64MiB"
peer_names = 3
[[create.prefix]]
peers = ["*"]
names = [""]
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
heartbeat = "1s"
expiry = "1h"
[metrics]
address = "127.0.0.1:0"
[drain]
deadline = "2min"
"#;

impl Service {
    pub fn start(config: &str) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), config, |_| {})
    }

    pub fn start_in(folder: TempDir, config: &str, more: impl FnOnce(&mut Command)) -> Self {
        let mut command = Self::command(&folder, config, &[]);
        more(&mut command);
        Self::ready(folder, Running::start(command))
    }

    /// Starts a service whose standard error goes to `tell` alone.
    pub fn start_with_stderr(config: &str, options: &[&str], tell: Sender<ChildStderr>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let command = Self::command(&folder, config, options);
        Self::ready(folder, Running::start_with_stderr(command, tell))
    }

    /// Starts a service that can write nothing to standard output.
    pub fn start_without_stdout(config: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Self::command(&folder, config, &[]);
        let full = File::options().write(true).open("/dev/full").unwrap();
        command.stdin(Stdio::null()).stdout(full);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = child.stderr.take().unwrap();
        let mut running = Running::reading(child, vec![Box::new(stderr)]);
        running.line_with("ready");
        Self {
            running,
            folder,
            tcp: None,
            metrics: None,
        }
    }

    fn command(folder: &TempDir, config: &str, options: &[&str]) -> Command {
        let file = folder.path().join("egmem.toml");
        let at = folder.path().to_str().unwrap();
        std::fs::write(&file, config.replace('@', at)).unwrap();
        let mut command = egmem(options);
        command.args(["serve", "--config", file.to_str().unwrap()]);
        command.args(driver());
        command
    }

    fn ready(folder: TempDir, mut running: Running) -> Self {
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

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn address(&self) -> String {
        format!("unix:{}", self.path("egmem.sock").display())
    }

    pub fn run(&self, command: &str, args: &[&str]) -> Output {
        egmem(&[command, &self.address()])
            .args(args)
            .output()
            .unwrap()
    }

    pub fn fetch(&self, args: &[&str]) -> Output {
        egmem(&["fetch", &self.address()])
            .args(args)
            .args(driver())
            .output()
            .unwrap()
    }

    /// A client that holds a name.
    pub fn hold(&self, args: &[&str]) -> Running {
        let mut command = egmem(&["fetch", &self.address()]);
        command.args(args).arg("--hold").args(driver());
        let mut client = Running::start(command);
        client.line("holding");
        client
    }

    pub fn ls(&self) -> Value {
        let output = self.run("ls", &["--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// A metric's value, summed over its labels.
    pub fn metric(&self, name: &str) -> u64 {
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

    pub fn until(&self, name: &str, value: u64) {
        self.until_so(name, |found| found == value);
    }

    pub fn until_at_least(&self, name: &str, value: u64) {
        self.until_so(name, |found| found >= value);
    }

    fn until_so(&self, name: &str, is_so: impl Fn(u64) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so(self.metric(name)) {
            assert!(Instant::now() < until, "{name} is {}", self.metric(name));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.metrics.as_ref().unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    pub fn drained(mut self) {
        self.running.signal(Signal::TERM);
        assert_eq!(self.running.end().code(), Some(0));
        self.running.line("drained");
    }
}

pub fn names(list: &Value) -> Vec<&str> {
    let entries = list.as_array().unwrap().iter();
    entries
        .map(|entry| entry["name"].as_str().unwrap())
        .collect()
}
