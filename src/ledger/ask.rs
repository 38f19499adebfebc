//! Asks the processes of this user for their ledgers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use egmem_share::{Channel, Peers, Unreachable};
use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;
use crate::offer::MAX_TEXT;
use crate::{Error, MemoryError, Result, folder, procs};

/// How long a process may take for each piece of its answer.
const PATIENCE: Duration = Duration::from_secs(10);

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

/// The most bytes of all ledgers together: what processes send must not fill this one's memory.
const ALL: usize = 256 << 20;

/// Returns the ledgers of all processes of this user that offer theirs, by process ids, and those that did not answer.
/// Removes the sockets of processes that have ended. A folder that cannot be read, or that other users can access, is
/// among those that did not answer, and so are processes whose ledgers would exceed 256 MiB together.
pub fn processes() -> (Vec<Ledger>, Vec<Silent>) {
    let mut found = Found::new(ALL);
    for place in folder::places() {
        if let Err(error) = found.look_in(&place) {
            found.silent.push(Silent {
                pid: None,
                path: place,
                why: error.to_string(),
            });
        }
    }
    let Found {
        mut ledgers,
        silent,
        ..
    } = found;
    ledgers.sort_by_key(|ledger| ledger.process.pid);
    // A process may offer its ledger at more than one socket.
    ledgers.dedup_by_key(|ledger| (ledger.process.pid, ledger.process.instance));
    (ledgers, silent)
}

/// What was found so far.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) ledgers: Vec<Ledger>,
    pub(crate) silent: Vec<Silent>,
    /// The bytes that ledgers may still have.
    left: usize,
}

impl Found {
    pub(crate) const fn new(most: usize) -> Self {
        Self {
            ledgers: Vec::new(),
            silent: Vec::new(),
            left: most,
        }
    }

    /// Asks the processes whose sockets are in a folder.
    pub(crate) fn look_in(&mut self, place: &Path) -> Result<()> {
        let failed = |error| MemoryError::system(format!("the folder {}", place.display()), &error);
        match folder::check(place) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            checked => checked.map_err(failed)?,
        }
        for file in std::fs::read_dir(place).map_err(failed)?.take(MOST) {
            let file = file.map_err(failed)?;
            let Some(pid) = file.file_name().to_str().and_then(folder::pid_of) else {
                continue;
            };
            let path = file.path();
            match self.ask(&path) {
                Ok(ledger) => self.ledgers.push(ledger),
                Err(Error::Unreachable {
                    cause: Unreachable::NobodyListens | Unreachable::NoSocket,
                    ..
                }) if !procs::is_alive(pid) => {
                    // The name has a random part, so that no other process's socket is meant.
                    let _ = std::fs::remove_file(&path);
                }
                Err(error) => self.silent.push(Silent {
                    pid: Some(pid),
                    path,
                    why: error.to_string(),
                }),
            }
        }
        Ok(())
    }

    fn ask(&mut self, path: &Path) -> Result<Ledger> {
        let mut channel = Channel::connect(path, Peers::same_user())?;
        channel.set_timeout(PATIENCE);
        let text = channel.receive_text(MAX_TEXT.min(self.left))?;
        self.left -= text.len();
        let mut ledger: Ledger = serde_json::from_str(&text).map_err(|error| Error::Protocol {
            peer: channel.peer().to_string(),
            detail: error.to_string(),
        })?;
        // As this process's PID namespace has it.
        if let Some(pid) = channel.peer().pid {
            ledger.process.pid = pid;
        }
        Ok(ledger)
    }
}
