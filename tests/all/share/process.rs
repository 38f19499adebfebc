//! Other processes of this program, and their messages.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use egmem::Driver;
use egmem::share::{Channel, ImportOptions, ImportedBuffer, Listener, Peers};

use super::PATIENCE;
use egmem_tests::{child, leave_files};

/// A folder of this test's own, with a socket in it.
pub struct Place {
    _folder: tempfile::TempDir,
    pub socket: PathBuf,
}

impl Place {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        Self {
            _folder: folder,
            socket,
        }
    }

    pub fn listen(&self) -> Listener {
        let mut listener = Listener::bind(&self.socket, Peers::same_user()).unwrap();
        listener.set_timeout(PATIENCE).unwrap();
        listener
    }
}

/// Another process of this program, in one of the roles below.
pub struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    pub fn start(role: &str, socket: &Path) -> Self {
        let mut child = child(super::MODULE, "child_process")
            .env("EGMEM_SHARE_ROLE", role)
            .env("EGMEM_SHARE_SOCKET", socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, lines }
    }

    /// Lets it go on.
    pub fn go(&mut self) {
        writeln!(self.child.stdin.as_mut().unwrap(), "go").unwrap();
    }

    /// Waits until it says so.
    #[track_caller]
    pub fn says(&mut self, word: &str) {
        let deadline = Instant::now() + PATIENCE;
        let mut said = Vec::new();
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(line) if line == word => return,
                // For docs/driver-behaviour.md.
                Ok(line) if line.starts_with("seen: ") => println!("{line}"),
                Ok(line) => said.push(line),
                Err(RecvTimeoutError::Timeout) => panic!("no '{word}' in time, but: {said:#?}"),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("no '{word}', but: {said:#?}, {:?}", self.child.wait())
                }
            }
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: plain integers. The child was not waited for, so its id is no other process's.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    #[track_caller]
    pub fn ends_well(mut self) {
        self.says("well");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prints a child process's message, on a line of its own even if the test harness has begun one.
pub fn say(word: &str) {
    println!("\n{word}");
}

/// Waits for the parent's `go`.
pub fn wait_for_go() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    assert_eq!(line, "go\n");
}

pub fn receive(channel: &mut Channel, driver: &Driver) -> ImportedBuffer {
    let offer = channel.receive().unwrap();
    offer.import(driver, ImportOptions::new()).unwrap()
}

pub fn connect(path: &Path) -> Channel {
    patient(Channel::connect(path, Peers::same_user()).unwrap())
}

pub fn accept(listener: &Listener) -> Channel {
    patient(listener.accept().unwrap())
}

fn patient(mut channel: Channel) -> Channel {
    channel.set_timeout(PATIENCE);
    channel
}

/// Lets this process open 56 files beside those of its driver and its harness.
pub fn few_files() {
    leave_files(56);
}
