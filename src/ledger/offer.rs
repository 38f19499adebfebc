//! Offers this process's ledger to other processes of its user, also where the environment asks for it; the report of what
//! a process still has at its exit.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use egmem_share::socket::make_private;
use egmem_share::{Channel, Closer, InstanceId, Listener, Peers};

use crate::driver::lock;
use crate::fork::{Generation, PerProcess};
use crate::size::Bytes;
use crate::texts::{count, escape_lines};
use crate::{Error, Ledger, MemoryError, Result, entries};

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
    offer_in_one_of(places())
}

/// As [`offer`], in the first place where a socket can be made.
pub(crate) fn offer_in_one_of(places: impl IntoIterator<Item = PathBuf>) -> Result<Offer> {
    let mut failed = Error::from(MemoryError::invalid("folders", "there is none"));
    for place in places {
        let made = make_private(&place).map_err(|error| {
            let what = format!("the folder {} for ledgers", place.display());
            Error::from(MemoryError::system(what, &error))
        });
        match made.and_then(|()| offer_in(&place, PATIENCE)) {
            Ok(offer) => return Ok(offer),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// As [`offer`], in a folder that was checked; a reader may take `patience` for all.
pub(crate) fn offer_in(folder: &Path, patience: Duration) -> Result<Offer> {
    let pid = std::process::id();
    // Another than the exporter's: a process may offer its ledger more than once.
    let instance = InstanceId::random()?;
    let path = folder.join(socket_name(pid, &instance.to_string()));
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
            if is_ended(Answering::Process(channel.closer()?)) {
                return Ok(());
            }
            answer(channel, patience)
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

/// The folders that processes of this user may use, the preferred one first: a process may lack the environment
/// variable that another has.
pub(crate) fn places() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|path| path.is_absolute());
    let user = rustix::process::geteuid().as_raw();
    let temporary = PathBuf::from(format!("/tmp/egmem-{user}"));
    let runtime = runtime.map(|path| path.join("egmem"));
    runtime.into_iter().chain([temporary]).collect()
}

/// Returns the name of a process's socket.
fn socket_name(pid: u32, instance: &str) -> String {
    let instance: String = instance.chars().take(12).collect();
    format!("ps-{pid}-{instance}.sock")
}

/// Returns the process id in a socket's name.
pub(crate) fn pid_of(name: &str) -> Option<u32> {
    let rest = name.strip_prefix("ps-")?.strip_suffix(".sock")?;
    rest.split_once('-')?.0.parse().ok()
}

/// The environment variable that makes a process offer its ledger: any value except an empty one and `0`.
pub const PS: &str = "EGMEM_PS";

/// The environment variable that makes a process report at its exit the memory that is still allocated.
pub const LEAKS: &str = "EGMEM_LEAKS";

/// The state that lasts as long as the process. A forked child has none of its parent's, whose thread and socket it does not have.
static KEPT: PerProcess<Kept> = PerProcess::new();

#[derive(Default)]
struct Kept {
    offer: OnceLock<Offer>,
    /// Whether leaks are reported at the exit.
    reports: AtomicBool,
}

fn kept() -> &'static Kept {
    KEPT.get(|_| Kept::default())
}

/// Sets the hook before `main`, so that a program need not call anything for the environment variables to work.
#[used]
// SAFETY: the section holds pointers to functions, which the C library calls with its own arguments before `main`;
// under the C calling convention a function may ignore them. This one stores a function pointer: it uses nothing of
// the standard library that needs to be set up before.
#[unsafe(link_section = ".init_array")]
static SET_HOOK: extern "C" fn() = set_hook;

extern "C" fn set_hook() {
    entries::on_first_entry(start);
}

fn is_on(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Called once in each process, after its first entry was made.
fn start() {
    if is_on(LEAKS) {
        report_leaks_at_exit();
    }
    if !is_on(PS) {
        return;
    }
    match offer() {
        Ok(offer) => {
            let _first = kept().offer.set(offer);
            at_exit(remove_socket);
        }
        Err(error) => tracing::warn!(%error, "this process's ledger is not offered"),
    }
}

extern "C" fn remove_socket() {
    if let Some(offer) = kept().offer.get() {
        offer.remove_file();
    }
}

/// Writes to standard error, when this process ends by `exit` or by returning from `main`, which allocations it has
/// not given back: their entries, with the lines that made them, and their frames where
/// [`capture_backtraces`](egmem_core::ledger::capture_backtraces) was on. Nothing is written if there are none.
///
/// Without a call, the environment variable `EGMEM_LEAKS=1` does the same. The kernel takes all memory of a process
/// back; a report names the memory that a program that runs for longer would accumulate.
pub fn report_leaks_at_exit() {
    /// Whether the C library has the function. A forked child inherits both.
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    kept().reports.store(true, Relaxed);
    if !REGISTERED.swap(true, Relaxed) {
        at_exit(report);
    }
}

/// Calls `function` when the process ends by `exit`.
fn at_exit(function: extern "C" fn()) {
    // SAFETY: the function lives as long as the program; it does not unwind, and calls neither `exit` nor `longjmp`.
    if unsafe { libc::atexit(function) } != 0 {
        tracing::warn!("the C library has no room for a function at exit");
    }
}

extern "C" fn report() {
    // A forked child inherits the registration, and none of the memory.
    if !kept().reports.load(Relaxed) {
        return;
    }
    // Tiers are not asked: their memory need not be readable at the exit.
    let ledger = Ledger::from_parts(entries::all_allocations(), Vec::new());
    let text = leaks(&ledger);
    // If standard error is closed, the report is lost.
    let _ = std::io::stderr().write_all(escape_lines(&text).as_bytes());
}

/// Returns the report, or an empty text if nothing is left.
fn leaks(ledger: &Ledger) -> String {
    let entries = &ledger.allocations;
    if entries.is_empty() {
        return String::new();
    }
    let bytes = entries.iter().map(|entry| entry.bytes);
    let bytes = bytes.fold(0, u64::saturating_add);
    let mut text = format!(
        "egmem: still allocated at exit: {}, {}\n{}",
        count(entries.len() as u64, "allocation"),
        Bytes(bytes),
        ledger.to_text()
    );
    for entry in entries {
        let site = entry.site.as_ref();
        if let Some(frames) = site.and_then(|site| site.backtrace.as_ref()) {
            // To a String it cannot fail.
            let _ = writeln!(
                text,
                "\n{} of {}, allocated at {}:\n{}",
                Bytes(entry.bytes),
                entry.label.as_deref().unwrap_or("no label"),
                site.map(ToString::to_string).unwrap_or_default(),
                frames.to_string().trim_end()
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_process() {
        let name = socket_name(77, "0123456789abcdef");
        assert_eq!(name, "ps-77-0123456789ab.sock");
        assert_eq!(pid_of(&name), Some(77));
        for wrong in [
            "ps-77.sock",
            "ps-x-1.sock",
            "77-1.sock",
            "ps-77-1.sock.lock",
        ] {
            assert_eq!(pid_of(wrong), None);
        }
    }
}
