//! Asks the processes of this user for their ledgers.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use egmem_share::socket::check_private;
use egmem_share::{Channel, Peers, Unreachable};
use serde::{Deserialize, Serialize};

use crate::driver::lock;
use crate::entries::MAX_TIERS;
use crate::offer::{MAX_TEXT, pid_of, places};
use crate::size::Bytes;
use crate::{Error, Ledger, MemoryError, procs};

type Result<T, E = Error> = std::result::Result<T, E>;

/// How long a process may take for its whole answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a process may take to accept a connection: until then the kernel keeps it, unless very many wait, as they do
/// for a stopped process.
const TO_ACCEPT: Duration = Duration::from_secs(1);

/// How many processes are asked at once, so that a stopped one does not delay the others. Each may have [`MAX_TEXT`] of the
/// bytes that are left.
const AT_ONCE: usize = 8;

/// The most sockets that are looked at.
const MOST: usize = 4096;

/// A process that offers its ledger and did not answer, or a folder whose sockets were not looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Silent {
    /// Its process id, as its socket's name tells.
    pub pid: Option<u32>,
    /// Its socket, or the folder.
    pub path: PathBuf,
    /// The reason.
    pub why: String,
}

/// The most bytes of all ledgers together: other processes' answers must not fill this one's memory.
const ALL: usize = 256 << 20;

/// Returns the ledgers of all processes of this user that offer theirs, by process ids, and those that did not answer.
/// Removes the sockets of processes that have ended. A folder that cannot be read, or that other users can access, is
/// among those that did not answer, and so are processes whose ledgers would exceed 256 MiB together.
pub fn processes() -> (Vec<Ledger>, Vec<Silent>) {
    let mut found = Found::new(ALL);
    for path in places() {
        if let Err(error) = found.look_in(&path) {
            let (pid, why) = (None, error.to_string());
            found.silent.push(Silent { pid, path, why });
        }
    }
    let (mut ledgers, mut silent) = (found.ledgers, found.silent);
    silent.sort_by_key(|silent| silent.pid);
    ledgers.sort_by_key(|ledger| ledger.process.pid);
    // A process may offer its ledger at more than one socket.
    ledgers.dedup_by_key(|ledger| (ledger.process.pid, ledger.process.instance));
    (ledgers, silent)
}

/// The results so far.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) ledgers: Vec<Ledger>,
    pub(crate) silent: Vec<Silent>,
    /// Sockets that were not asked yet, with the process ids in their names.
    sockets: Vec<(u32, PathBuf)>,
    /// The bytes that all ledgers may have together.
    most: usize,
    /// Those that are left.
    left: usize,
}

impl Found {
    pub(crate) const fn new(most: usize) -> Self {
        Self {
            ledgers: Vec::new(),
            silent: Vec::new(),
            sockets: Vec::new(),
            most,
            left: most,
        }
    }

    /// Asks the processes whose sockets are in a folder, several at once.
    pub(crate) fn look_in(&mut self, place: &Path) -> Result<()> {
        let failed = |error| MemoryError::system(format!("the folder {}", place.display()), &error);
        match check_private(place) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            checked => checked.map_err(failed)?,
        }
        for file in std::fs::read_dir(place).map_err(failed)? {
            let file = file.map_err(failed)?;
            if let Some(pid) = file.file_name().to_str().and_then(pid_of) {
                self.sockets.push((pid, file.path()));
            }
            if self.sockets.len() == MOST {
                break;
            }
        }
        let workers = AT_ONCE.min(self.sockets.len());
        let found = Mutex::new(self);
        std::thread::scope(|scope| {
            for _ in 1..workers {
                // Without another thread, those that run ask all.
                let worker = std::thread::Builder::new();
                let _ = worker.spawn_scoped(scope, || ask_each(&found));
            }
            ask_each(&found);
        });
        Ok(())
    }

    /// Adds a process's answer. `None`: other ledgers have, or may get, all the bytes of the common limit.
    fn add(&mut self, pid: u32, path: PathBuf, answer: Option<Result<Ledger>>) {
        let why = match answer {
            Some(Ok(ledger)) => return self.ledgers.push(ledger),
            Some(Err(Error::Unreachable {
                cause: Unreachable::NobodyListens | Unreachable::NoSocket,
                ..
            })) if !procs::is_alive(pid) => {
                // The name has a random part, so that no other process's socket is meant.
                let _ = std::fs::remove_file(&path);
                return;
            }
            Some(Err(error)) => error.to_string(),
            None => {
                let limit = Bytes(self.most as u64);
                format!("not asked: the limit of {limit} for all ledgers is reached")
            }
        };
        let pid = Some(pid);
        self.silent.push(Silent { pid, path, why });
    }
}

/// Asks processes until none is left.
fn ask_each(found: &Mutex<&mut Found>) {
    loop {
        let mut all = lock(found);
        let Some((pid, path)) = all.sockets.pop() else {
            return;
        };
        let most = MAX_TEXT.min(all.left);
        all.left -= most;
        drop(all);
        let (answer, bytes) = ask(&path, most);
        let mut all = lock(found);
        all.left += most - bytes;
        all.add(pid, path, answer);
    }
}

/// Asks a process for at most `most` bytes; returns how many it sent, too.
fn ask(path: &Path, most: usize) -> (Option<Result<Ledger>>, usize) {
    let channel = Channel::connect_within(path, Peers::same_user(), TO_ACCEPT);
    let text = channel.and_then(|mut channel| {
        channel.set_timeout(PATIENCE);
        Ok((channel.receive_text(most)?, channel.peer()))
    });
    let (text, peer) = match text {
        Ok(answer) => answer,
        Err(Error::Protocol { .. }) if most < MAX_TEXT => return (None, 0),
        Err(error) => return (Some(Err(error)), 0),
    };
    let ledger = serde_json::from_str(&text).map(|mut ledger: Ledger| {
        // As this process's PID namespace has it.
        ledger.process.pid = peer.pid.unwrap_or(ledger.process.pid);
        ledger.tiers.truncate(MAX_TIERS);
        ledger
    });
    let ledger = ledger.map_err(|error| Error::Protocol {
        peer: peer.to_string(),
        detail: error.to_string(),
    });
    (Some(ledger), text.len())
}
