//! What `pickle` makes of memory: tickets, and the private socket at which other processes redeem them.
//!
//! A pickle has no memory and no fd. It names the socket of the process that made it and a ticket: a random number that
//! one process of the same user may present once. A ticket keeps its memory for a minute, unless the program closes it, so
//! that a temporary object can be sent; a process that dies before it has unpickled leaves a number behind, and nothing
//! else. The threads that answer and that let memory go begin with the first ticket. They never run Python, and the process
//! does not wait for them when it ends.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use egmem::driver::{Access, Driver, HandleType};
use egmem::share::{Channel, Error, Peers, Result, Shared};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::{OrRaise, ToPy, raise};
use crate::interpreter::{PerProcess, lock};
use crate::region::{Owner, Region};

/// The offset and the length of a part; `None` for all of the memory.
pub type Window = Option<(u64, u64)>;

/// Returns a window of memory.
///
/// # Errors
/// `OutOfRange`.
pub fn part_of(memory: &Shared, window: Window) -> egmem::Result<Shared> {
    match window {
        None => Ok(memory.clone()),
        Some((offset, len)) => memory.window(offset, len),
    }
}

/// Returns the memory for other processes, and the window of it that a slice is.
///
/// # Errors
/// `TypeError` for memory that was not made shareable, and for another process's.
pub fn shareable(
    py: Python<'_>,
    region: &Arc<Region>,
    name: &str,
) -> PyResult<(Arc<Shared>, Window)> {
    region.expect_here()?;
    if region.len == 0 {
        let message = "a slice of 0 bytes cannot be sent to another process";
        let remedy = "send one of 1 byte or more";
        return Err(raise("InvalidArgument", message, remedy));
    }
    let (whole, offset) = region.whole();
    let is_part = !Arc::ptr_eq(whole, region);
    match py.detach(|| whole.shared()).or_raise()? {
        Some(shared) => Ok((shared, is_part.then_some((offset, region.len)))),
        None => Err(PyTypeError::new_err(why_not(whole, name))),
    }
}

fn why_not(whole: &Region, name: &str) -> String {
    let (why, remedy) = match whole.owner() {
        Ok(Owner::Buffer(_)) => (
            "it was made without shareable=True",
            "make it with egmem.Buffer(nbytes, shareable=True)",
        ),
        Ok(Owner::Block(_)) => (
            "its heap was made without shareable=True",
            "make the heap with egmem.Heap(shareable=True)",
        ),
        Ok(Owner::OfMany(..)) => (
            "it is one of many blocks",
            "pickle the heap, and send the block's offset and nbytes",
        ),
        Ok(Owner::Pool(_)) => (
            "it belongs to a pool",
            "use egmem.Buffer(nbytes, shareable=True), or send a copy of the bytes (read)",
        ),
        Ok(Owner::Remote(_)) => (
            "it is another process's memory",
            "fetch it by its name in the other process",
        ),
        Ok(Owner::Imported(_)) => (
            "it is another process's memory",
            "share it from the process that made it",
        ),
        _ => (
            "it is a view of memory",
            "share the memory, or send a copy of the bytes (read)",
        ),
    };
    format!("this {name} cannot be sent to another process: {why}; what to do: {remedy}")
}

/// Returns what `pickle` makes of memory: the function that receives it, and its arguments.
///
/// # Errors
/// As [`shareable`]; the system's.
pub fn reduce<'py>(
    py: Python<'py>,
    region: &Arc<Region>,
    name: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let (shared, window) = shareable(py, region, name)?;
    // As the CPU here: memory that it may not access is a GPU's.
    let access = match region.cpu(py) {
        Ok(bytes) if !bytes.writable => Access::Read,
        _ => Access::ReadWrite,
    };
    let kept = Some(Arc::clone(&shared));
    let answer = move |channel: &mut Channel, memory: Arc<Shared>| match part_of(&memory, window) {
        Ok(part) => send(channel, &part, access, GRANTED),
        Err(error) => channel.send_text(&reason(&error)),
    };
    pickled(py, "memory", (&shared, kept), &region.driver, answer)
}

/// Returns a function's name and its arguments, as `pickle` takes them. The other process gets what `answer` sends.
///
/// # Errors
/// `InvalidArgument` in a forked child; the system's.
pub fn pickled<'py, T: Send + Sync + 'static>(
    py: Python<'py>,
    kind: &'static str,
    (of, memory): (&Arc<T>, Option<Arc<Shared>>),
    driver: &Driver,
    answer: impl FnOnce(&mut Channel, Arc<T>) -> Result<()> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    driver.expect_this_process(kind).or_raise()?;
    let issued = py.detach(|| issue(of, memory, answer));
    let (name, ticket) = issued.map_err(|error| {
        egmem::Error::system("making a socket for pickled memory", &error).to_py()
    })?;
    let receive = py.import("egmem._egmem")?.getattr("_unpickle")?;
    let process = std::process::id();
    let arguments = (name, ticket, process, driver.is_simulated(), kind);
    Ok((receive, arguments).into_pyobject(py)?.into_any())
}

/// The most tickets that wait. Beyond that the oldest end.
const MOST: usize = 1 << 16;
/// The most processes that are answered at a time; a process that has a heap is answered until it closes it. Beyond
/// that a connection is closed.
const MOST_AT_A_TIME: usize = 1024;
/// The most bytes of a ticket and of an answer.
pub const TEXT: usize = 1024;
/// How long a process may take with its ticket.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// The answer before the memory.
pub const GRANTED: &str = "granted";
/// The answer to a ticket whose memory is gone.
pub const CLOSED: &str = "closed";
/// The answer to an unknown ticket.
pub const UNKNOWN: &str = "unknown";

/// How long a ticket keeps memory whose object is gone, for the process that is to have it.
const KEPT: Duration = Duration::from_secs(60);

/// Memory, and since when a ticket keeps it.
type Kept = (Arc<Shared>, Instant);

/// Sends what a ticket admits to.
type Answer = Box<dyn FnOnce(&mut Channel) -> Result<()> + Send>;

/// What a ticket admits to.
struct Admits {
    secret: String,
    answer: Answer,
    /// A program may drop the object as soon as it has sent it.
    kept: Option<Kept>,
}

#[derive(Default)]
struct Tickets {
    /// The socket's name, once there is one.
    name: Mutex<Option<String>>,
    /// Whether the thread of `let_go` runs, which never ends.
    lets_go: AtomicBool,
    /// By number, in the order in which they were made.
    waiting: Mutex<BTreeMap<u64, Admits>>,
    /// Notified when a ticket keeps memory.
    keeps: Condvar,
}

static TICKETS: PerProcess<Tickets> = PerProcess::new();

fn tickets() -> &'static Tickets {
    TICKETS.get(|_| Tickets::default())
}

/// Makes a ticket for what `answer` sends of `of`, if that is not gone by then, and keeps `memory` for a time. `answer` sends
/// [`GRANTED`] first, or why there is nothing. Returns the socket's name and the ticket.
///
/// # Errors
/// The system's.
fn issue<T: Send + Sync + 'static>(
    of: &Arc<T>,
    memory: Option<Arc<Shared>>,
    answer: impl FnOnce(&mut Channel, Arc<T>) -> Result<()> + Send + 'static,
) -> std::io::Result<(String, String)> {
    let of = Arc::downgrade(of);
    let answer: Answer = Box::new(move |channel| match of.upgrade() {
        Some(of) => answer(channel, of),
        None => channel.send_text(CLOSED),
    });
    let tickets = tickets();
    let name = tickets.listen()?;
    let secret = random()?;
    let mut waiting = lock(&tickets.waiting);
    let evicted = match waiting.len() {
        ..MOST => None,
        _ => waiting.pop_first(),
    };
    let number = waiting.last_key_value().map_or(0, |(number, _)| number + 1);
    let ticket = format!("{number}-{secret}");
    let kept = memory.map(|memory| (memory, Instant::now()));
    if kept.is_some() {
        tickets.keeps.notify_one();
    }
    let admits = Admits {
        secret,
        answer,
        kept,
    };
    waiting.insert(number, admits);
    // Without the lock: unmapping takes the driver's time.
    drop(waiting);
    drop(evicted);
    Ok((name, ticket))
}

/// Takes memory from the tickets that keep it. The caller drops it without the lock: unmapping takes the driver's time.
fn take_kept(waiting: &mut BTreeMap<u64, Admits>, ends: impl Fn(&Kept) -> bool) -> Vec<Kept> {
    let taken = waiting.values_mut();
    taken
        .filter_map(|admits| admits.kept.take_if(|kept| ends(kept)))
        .collect()
}

/// Ends what tickets keep of this memory, which the program closes.
pub fn revoke(memory: &Arc<Shared>) {
    let mut waiting = lock(&tickets().waiting);
    let ended = take_kept(&mut waiting, |(kept, _)| Arc::ptr_eq(kept, memory));
    drop(waiting);
    drop(ended);
}

impl Tickets {
    /// Returns the socket's name. The first call makes the socket and the threads.
    fn listen(&'static self) -> std::io::Result<String> {
        let mut name = lock(&self.name);
        if let Some(name) = &*name {
            return Ok(name.clone());
        }
        let chosen = format!("egmem-{}", random()?);
        let socket = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&chosen)?)?;
        let thread = || thread::Builder::new().name("egmem-tickets".into());
        // A call that fails below leaves the thread to the next one. The name's lock orders them.
        if !self.lets_go.load(Relaxed) {
            thread().spawn(|| self.let_go())?;
            self.lets_go.store(true, Relaxed);
        }
        thread().spawn(move || {
            let next = || {
                let accepted = socket.accept().map_err(|error| {
                    egmem::Error::system("accepting a process that unpickles", &error)
                });
                Channel::new(accepted?.0, &Peers::same_user())
            };
            let answer = |channel| self.answer(channel);
            answer_each(next, MOST_AT_A_TIME, &AtomicBool::new(false), answer);
        })?;
        Ok(name.insert(chosen).clone())
    }

    /// Lets memory go that was kept for long enough. Looks once a second, while some is kept.
    fn let_go(&self) -> ! {
        loop {
            let keeps_none = |waiting: &mut BTreeMap<_, Admits>| {
                waiting.values().all(|admits| admits.kept.is_none())
            };
            drop(self.keeps.wait_while(lock(&self.waiting), keeps_none));
            thread::sleep(Duration::from_secs(1));
            let ended = take_kept(&mut lock(&self.waiting), |(_, since)| {
                since.elapsed() >= KEPT
            });
            drop(ended);
        }
    }

    fn answer(&self, mut channel: Channel) -> Result<()> {
        channel.set_timeout(PATIENCE);
        let ticket = channel.receive_text(TEXT)?;
        // What the ticket keeps lives until it was sent.
        match self.take(&ticket) {
            Some(Admits { answer, kept, .. }) => {
                let sent = answer(&mut channel);
                drop(kept);
                sent
            }
            None => channel.send_text(UNKNOWN),
        }
    }

    /// Takes a ticket off the list, if it is on it.
    fn take(&self, ticket: &str) -> Option<Admits> {
        let (number, secret) = ticket.split_once('-')?;
        let number = number.parse().ok()?;
        let mut waiting = lock(&self.waiting);
        if waiting.get(&number)?.secret != secret {
            return None;
        }
        waiting.remove(&number)
    }
}

/// Answers each process of this user that connects, until `ended`: by a thread of its own, so that a process that is stopped
/// delays no other. Beyond `most` at a time a connection is closed.
pub fn answer_each(
    next: impl Fn() -> Result<Channel>,
    most: usize,
    ended: &AtomicBool,
    answer: impl Fn(Channel) -> Result<()> + Clone + Send + 'static,
) {
    // Each thread that answers has a clone.
    let answering = Arc::new(());
    while !ended.load(Relaxed) {
        let channel = match next() {
            Ok(channel) => channel,
            Err(Error::NotTrusted { .. }) => continue,
            Err(_) => {
                // The process may have too many open files: it may close some.
                if !ended.load(Relaxed) {
                    thread::sleep(Duration::from_millis(10));
                }
                continue;
            }
        };
        if Arc::strong_count(&answering) > most {
            tracing::warn!("too many processes get memory at a time");
            continue;
        }
        let (one, answer) = (Arc::clone(&answering), answer.clone());
        let work = move || {
            if let Err(error) = answer(channel) {
                tracing::debug!(%error, "a process that gets memory was lost");
            }
            drop(one);
        };
        let thread = thread::Builder::new().name("egmem-answer".into());
        if let Err(error) = thread.spawn(work) {
            tracing::warn!(%error, "a process that asks for memory gets no answer");
        }
    }
}

/// Sends `granted` and memory, or why there is none.
pub fn send(channel: &mut Channel, memory: &Shared, access: Access, granted: &str) -> Result<()> {
    if let Err(error) = memory.export_parts(0..1, HandleType::PosixFd) {
        return channel.send_text(&reason(&error));
    }
    channel.send_text(granted)?;
    channel.send(memory, access)
}

/// Returns an error's text, no longer than an answer.
pub fn reason(error: &egmem::Error) -> String {
    error.to_string().chars().take(TEXT / 4).collect()
}

/// Returns 128 random bits as text.
fn random() -> std::io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}
