//! Offers this process's ledger to other processes of its user.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use egmem_share::socket::make_private;
use egmem_share::{Channel, Closer, InstanceId, Listener, Peers};

use crate::driver::lock;
use crate::fork::Generation;
use crate::ledger::Ledger;
use crate::{Error, MemoryError, Result, folder};

/// The most bytes of a ledger that is sent, as JSON: the largest allocations that fit, and the sums of all.
pub const MAX_TEXT: usize = 16 << 20;

/// Room for the data that is sent besides the allocations.
const BESIDES: usize = 1 << 20;

/// How long a reader may take for all.
const PATIENCE: Duration = Duration::from_secs(5);

/// While it lives, other processes of this user can ask for this process's ledger, as `egmem ps` does.
///
/// A thread answers at a Unix socket below `$XDG_RUNTIME_DIR/egmem`, or else `/tmp/egmem-<uid>`: a folder of mode 0700.
/// Dropping this ends an answer that is being sent.
/// It reads nothing from the other process, whose user the kernel identifies, and sends at most [`MAX_TEXT`].
#[derive(Debug)]
pub struct Offer {
    path: PathBuf,
    listener: Arc<Listener>,
    answering: Arc<Mutex<Answering>>,
    thread: Option<JoinHandle<()>>,
    born: Generation,
}

/// The state of the thread.
#[derive(Debug)]
enum Answering {
    /// It waits for a process.
    Nobody,
    /// It sends the ledger, which this ends.
    Process(Closer),
    /// It is to end.
    Ended,
}

/// Offers this process's ledger until the result is dropped.
///
/// Without a call, the environment variable `EGMEM_PS=1` does the same for the whole life of a process, from its first
/// allocation on.
///
/// # Errors
/// [`System`](MemoryError::System) that names the last folder that was tried or its socket, also for a folder that other
/// users can access; or if no thread can be started.
///
/// ```
/// let offer = egmem::ledger::offer()?;
/// assert!(offer.path().exists());
/// # Ok::<(), egmem::share::Error>(())
/// ```
pub fn offer() -> Result<Offer> {
    offer_in_one_of(folder::places())
}

/// As [`offer`], in the first place where a socket can be made.
pub(crate) fn offer_in_one_of(places: impl IntoIterator<Item = PathBuf>) -> Result<Offer> {
    let mut failed = Error::from(MemoryError::invalid("folders", "there is none"));
    for place in places {
        let made = make_private(&place).map_err(|error| {
            let what = format!("the folder {} for ledgers", place.display());
            Error::from(MemoryError::system(what, &error))
        });
        match made.and_then(|()| offer_in(&place)) {
            Ok(offer) => return Ok(offer),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// As [`offer`], in a folder that was checked.
pub(crate) fn offer_in(folder: &Path) -> Result<Offer> {
    offer_with(folder, PATIENCE)
}

/// As [`offer_in`]; a reader may take `patience` for all.
pub(crate) fn offer_with(folder: &Path, patience: Duration) -> Result<Offer> {
    let pid = std::process::id();
    // Another than the exporter's: a process may offer its ledger more than once.
    let instance = InstanceId::random()?;
    let path = folder.join(folder::name(pid, &instance.to_string()));
    let listener = Arc::new(Listener::bind(&path, Peers::same_user())?);
    let answering = Arc::new(Mutex::new(Answering::Nobody));
    let (accepts, state) = (Arc::clone(&listener), Arc::clone(&answering));
    let thread = std::thread::Builder::new()
        .name("egmem-ps".into())
        .spawn(move || serve(&accepts, &state, patience))
        .map_err(|error| MemoryError::system("starting a thread", &error))?;
    Ok(Offer {
        path,
        listener,
        answering,
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
        if let Answering::Process(closer) = replace(&self.answering, Answering::Ended) {
            closer.close();
        }
        self.listener.close();
        // The thread does not panic. If it did, the panic hook has printed that already.
        let _ = thread.join();
    }
}

/// Replaces the thread's state, unless it is to end; returns the previous one.
fn replace(state: &Mutex<Answering>, new: Answering) -> Answering {
    let mut state = lock(state);
    match *state {
        Answering::Ended => Answering::Ended,
        _ => std::mem::replace(&mut state, new),
    }
}

fn serve(listener: &Listener, state: &Mutex<Answering>, patience: Duration) {
    let is_ended = |new| matches!(replace(state, new), Answering::Ended);
    while !is_ended(Answering::Nobody) {
        let sent = listener.accept().and_then(|channel| {
            match is_ended(Answering::Process(channel.closer()?)) {
                true => Ok(()),
                false => answer(channel, patience),
            }
        });
        let Err(error) = sent else { continue };
        if is_ended(Answering::Nobody) {
            return;
        }
        tracing::debug!(%error, "a process did not get the ledger");
        if error.memory().is_some() {
            // The process may have no file descriptor left.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn answer(mut channel: Channel, patience: Duration) -> Result<()> {
    channel.set_timeout(patience);
    let text = encode(Ledger::of_this_process(), MAX_TEXT - BESIDES)?;
    channel.send_text(&text)
}

/// Returns a ledger as JSON, with as many allocations as fit into `most` bytes, the largest first, and without backtraces.
pub(crate) fn encode(mut ledger: Ledger, most: usize) -> Result<String> {
    let failed = |error: serde_json::Error| MemoryError::invalid("ledger", error.to_string());
    ledger.allocations.sort_by_key(|entry| Reverse(entry.bytes));
    let mut bytes = serde_json::to_string(&ledger.tiers).map_err(failed)?.len();
    let mut kept = 0;
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
