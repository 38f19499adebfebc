//! Asks the processes of this user for their ledgers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use egmem_share::{Channel, Peers, Unreachable};
use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;
use crate::offer::MAX_TEXT;
use crate::{Error, MemoryError, Result, folder, procs};

/// How long a process may take for each piece of its answer.
const PATIENCE: Duration = Duration::from_secs(2);

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

/// Returns the ledgers of all processes of this user that offer theirs, by process ids, and those that did not answer.
/// Removes the sockets of processes that have ended. A folder that cannot be read, or that other users can access, is
/// among those that did not answer.
pub fn processes() -> (Vec<Ledger>, Vec<Silent>) {
    let (mut ledgers, mut silent) = (Vec::new(), Vec::new());
    for place in folder::places() {
        if let Err(error) = processes_in(&place, &mut ledgers, &mut silent) {
            silent.push(Silent {
                pid: None,
                path: place,
                why: error.to_string(),
            });
        }
    }
    ledgers.sort_by_key(|ledger: &Ledger| ledger.process.pid);
    // A process may offer its ledger at more than one socket.
    ledgers.dedup_by_key(|ledger| (ledger.process.pid, ledger.process.instance));
    (ledgers, silent)
}

pub(crate) fn processes_in(
    place: &Path,
    ledgers: &mut Vec<Ledger>,
    silent: &mut Vec<Silent>,
) -> Result<()> {
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
        match ask(&path) {
            Ok(ledger) => ledgers.push(ledger),
            Err(Error::Unreachable {
                cause: Unreachable::NobodyListens | Unreachable::NoSocket,
                ..
            }) if !procs::is_alive(pid) => {
                // The name has a random part, so that no other process's socket is meant.
                let _ = std::fs::remove_file(&path);
            }
            Err(error) => silent.push(Silent {
                pid: Some(pid),
                path,
                why: error.to_string(),
            }),
        }
    }
    Ok(())
}

fn ask(path: &Path) -> Result<Ledger> {
    let mut channel = Channel::connect(path, Peers::same_user())?;
    channel.set_timeout(PATIENCE);
    let text = channel.receive_text(MAX_TEXT)?;
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
