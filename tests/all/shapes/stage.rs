//! Processes that are killed and stopped while they have a part of something that processes share.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Stdio};
use std::time::Duration;

use egmem::driver::Access;
use egmem::share::{Channel, ImportOptions, ImportedBuffer, Listener, Peers, Shared};
use egmem::{Buffer, Driver, Machine};
use egmem_tests::drivers::{cuda_or, node};

/// The variable that says how many processes are killed or stopped.
const DEATHS: &str = "EGMEM_TEST_KILLS";
/// The child's variables: where the parent listens, and what the child does.
const AT: &str = "EGMEM_TEST_STAGE_AT";
const ROLE: &str = "EGMEM_TEST_STAGE_ROLE";
const LATER: Duration = Duration::from_secs(600);

pub fn driver() -> Driver {
    cuda_or(Machine::gh200())
}

/// Returns how many processes a test kills or stops.
pub fn deaths(fewer: usize) -> usize {
    std::env::var(DEATHS).map_or(fewer, |deaths| deaths.parse().unwrap())
}

/// Starts children, one after the other.
pub struct Stage {
    listener: Listener,
    folder: tempfile::TempDir,
    /// The module that has the test `child`.
    module: &'static str,
    /// What the child of the moment said last.
    said: Shared,
}

impl Stage {
    pub fn new(driver: &Driver, module: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let mut listener = Listener::bind(socket, Peers::same_user()).unwrap();
        listener.set_timeout(LATER).unwrap();
        let said = Buffer::on(node(driver)).bytes(8).shareable();
        Self {
            listener,
            folder,
            module,
            said: said.allocate(driver).unwrap().into(),
        }
    }

    /// Starts a child, as if it had said `word`.
    pub fn start(&self, role: &str, word: u64) -> (Role, Channel) {
        self.said.put_word(0, word).unwrap();
        let child = egmem_tests::child(self.module, "child")
            .env(AT, self.folder.path().join("socket"))
            .env(ROLE, role)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut channel = self.listener.accept().unwrap();
        channel.set_timeout(LATER);
        channel.send(&self.said, Access::ReadWrite).unwrap();
        (Role(child), channel)
    }

    /// Returns the word that the child said last.
    pub fn word(&self) -> u64 {
        self.said.word(0).unwrap()
    }
}

/// What a child has.
pub struct Part {
    pub driver: Driver,
    pub channel: Channel,
    pub role: String,
    said: ImportedBuffer,
}

impl Part {
    /// Returns the part of the process that a [`Stage`] has started; `None` in any other process.
    pub fn of_this_process() -> Option<Self> {
        let at = std::env::var(AT).ok()?;
        let driver = driver();
        let mut channel = Channel::connect(&at, Peers::same_user()).unwrap();
        channel.set_timeout(LATER);
        let said = channel.receive().unwrap();
        Some(Self {
            said: said.import(&driver, ImportOptions::new()).unwrap(),
            role: std::env::var(ROLE).unwrap(),
            channel,
            driver,
        })
    }

    pub fn say(&self, word: u64) {
        self.said.put(0, word).unwrap();
    }
}

/// A child with a role; killed when dropped.
pub struct Role(Child);

impl Role {
    pub fn signal(&self, signal: i32) {
        // SAFETY: the child was not waited for, so the number is its own.
        let result = unsafe { libc::kill(self.0.id() as i32, signal) };
        assert_eq!(result, 0);
    }

    /// Stops it, and waits until it has stopped.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let mut status = 0;
        // SAFETY: the status may be written.
        let stopped =
            unsafe { libc::waitpid(self.0.id() as i32, &raw mut status, libc::WUNTRACED) };
        assert!(stopped > 0 && libc::WIFSTOPPED(status), "{status:x}");
    }

    /// Kills it, which ends it unless it has failed before.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        assert_eq!(self.0.wait().unwrap().signal(), Some(libc::SIGKILL));
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
