//! Offers this process's ledger to other processes of its user.

use std::cmp::Reverse;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use egmem_share::{Channel, InstanceId, Listener, Peers};

use crate::fork::Generation;
use crate::ledger::Ledger;
use crate::{Error, MemoryError, Result, folder};

/// The most bytes of a ledger that is sent, as JSON: the largest allocations that fit, and the sums of all.
pub const MAX_TEXT: usize = 16 << 20;

/// Room for what is sent besides the allocations.
const BESIDES: usize = 1 << 20;

/// How long a reader may take for all.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the thread waits at most before it looks whether it should end.
const LONGEST: Duration = Duration::from_secs(60);

/// While it lives, other processes of this user can ask for this process's ledger, as `egmem ps` does.
///
/// A thread answers at a Unix socket below `$XDG_RUNTIME_DIR/egmem`, or else `/tmp/egmem-<uid>`: a folder of mode 0700.
/// It reads nothing from the other process, whose user the kernel identifies, and sends at most [`MAX_TEXT`].
#[derive(Debug)]
pub struct Offer {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    born: Generation,
}

/// Offers this process's ledger until the result is dropped.
///
/// Without a call, the environment variable `EGMEM_PS=1` does the same for the whole life of a process, from its first
/// allocation on.
///
/// # Errors
/// [`System`](MemoryError::System) that names the folder or the socket, also for a folder that other users can access; or if
/// no thread can be started.
///
/// ```
/// let offer = egmem::ledger::offer()?;
/// assert!(offer.path().exists());
/// # Ok::<(), egmem::share::Error>(())
/// ```
pub fn offer() -> Result<Offer> {
    offer_in(&folder::open()?)
}

/// As [`offer`], in a folder that was checked.
pub(crate) fn offer_in(folder: &Path) -> Result<Offer> {
    let pid = std::process::id();
    // Another than the exporter's: a process may offer its ledger more than once.
    let instance = InstanceId::random()?;
    let path = folder.join(folder::name(pid, &instance.to_string()));
    let mut listener = Listener::bind(&path, Peers::same_user())?;
    listener.set_timeout(LONGEST)?;
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    let thread = std::thread::Builder::new()
        .name("egmem-ps".into())
        .spawn(move || serve(&listener, &seen))
        .map_err(|error| MemoryError::system("starting a thread", &error))?;
    Ok(Offer {
        path,
        stop,
        thread: Some(thread),
        born: Generation::current(),
    })
}

impl Offer {
    /// Returns the socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the socket's file, for a process that ends without dropping this.
    pub(crate) fn remove_file(&self) {
        if self.born.is_current() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if !self.born.is_current() {
            // A forked child has neither the thread nor the socket's file. Dropping the handle would detach a thread by an
            // identifier that the child may have given to another one.
            std::mem::forget(thread);
            return;
        }
        self.stop.store(true, Relaxed);
        // Wakes the thread. Held until it has ended: it skips connections that are closed again. If the file is gone, the
        // thread ends at its next look.
        if let Ok(_wakes) = UnixStream::connect(&self.path) {
            // It panics nowhere; if it did, that was reported.
            let _ = thread.join();
        }
    }
}

fn serve(listener: &Listener, stop: &AtomicBool) {
    loop {
        let accepted = listener.accept();
        if stop.load(Relaxed) {
            return;
        }
        let sent = match accepted {
            Ok(channel) => answer(channel),
            Err(Error::TimedOut { .. }) => Ok(()),
            Err(error) => {
                // The process may have no file descriptor left.
                std::thread::sleep(Duration::from_millis(20));
                Err(error)
            }
        };
        if let Err(error) = sent {
            tracing::debug!(%error, "a process did not get the ledger");
        }
    }
}

fn answer(mut channel: Channel) -> Result<()> {
    channel.set_timeout(PATIENCE);
    let text = encode(Ledger::of_this_process(), MAX_TEXT - BESIDES)?;
    channel.send_text(&text)
}

/// Returns a ledger as JSON, with as many allocations as fit into `most` bytes, the largest first, and without backtraces.
pub(crate) fn encode(mut ledger: Ledger, most: usize) -> Result<String> {
    let failed = |error: serde_json::Error| MemoryError::invalid("ledger", error.to_string());
    ledger.allocations.sort_by_key(|entry| Reverse(entry.bytes));
    let (mut bytes, mut kept) = (0, 0);
    for entry in &mut ledger.allocations {
        if let Some(site) = &mut entry.site {
            site.backtrace = None;
        }
        bytes += serde_json::to_string(entry).map_err(failed)?.len() + 1;
        if bytes > most {
            break;
        }
        kept += 1;
    }
    ledger.omitted += (ledger.allocations.len() - kept) as u64;
    ledger.allocations.truncate(kept);
    ledger.allocations.sort_by_key(|entry| entry.number);
    Ok(serde_json::to_string(&ledger).map_err(failed)?)
}
