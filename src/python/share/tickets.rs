//! Pickled memory: tickets, and the private socket at which other processes redeem them.
//!
//! A pickle has no memory and no fd. It names the socket of the process that made it and a ticket: a random number that
//! one process of the same user may present once. A ticket keeps its memory for a minute, unless the program closes it, so
//! that a temporary object can be sent; a process that dies before it has unpickled leaves a number behind, and nothing else. The thread that answers begins with the first ticket. It never
//! runs Python, and the process does not wait for it when it ends.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use egmem::driver::{Access, HandleType};
use egmem::share::{Channel, Peers, Result, Shared};
use egmem::{Event, Heap};

use super::common::{self, Refused, Window, wait};
use crate::gil::{PerProcess, lock};
use crate::ring::Sides;

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

/// What a ticket admits to.
struct Admits {
    secret: String,
    to: To,
    /// A program may drop the object as soon as it has sent it.
    kept: Option<Kept>,
}

/// What other processes may get.
pub enum To {
    /// Memory, or a window of it, and what the process may do with it.
    Memory(Weak<Shared>, Window, Access),
    /// The chunks of a heap, one by one.
    Heap(Weak<Mutex<Option<Heap>>>),
    /// An event.
    Event(Weak<Event>),
    /// The producer's side of a ring, or the consumer's.
    Ring(Weak<Sides>, bool),
}

impl To {
    fn is_gone(&self) -> bool {
        match self {
            Self::Memory(memory, ..) => memory.strong_count() == 0,
            Self::Heap(heap) => heap.strong_count() == 0,
            Self::Event(event) => event.strong_count() == 0,
            Self::Ring(sides, _) => sides.strong_count() == 0,
        }
    }
}

#[derive(Default)]
struct Tickets {
    /// The socket's name, once there is one.
    name: Mutex<Option<String>>,
    /// By number, in the order in which they were made.
    waiting: Mutex<BTreeMap<u64, Admits>>,
    /// The threads that answer.
    answering: Arc<()>,
    /// Whether a thread lets kept memory go.
    is_letting_go: AtomicBool,
}

static TICKETS: PerProcess<Tickets> = PerProcess::new();

fn tickets() -> &'static Tickets {
    TICKETS.get(|_| Tickets::default())
}

/// Makes a ticket, which keeps `memory` for a time. Returns the socket's name and the ticket.
///
/// # Errors
/// The system's.
pub fn issue(to: To, memory: Option<Arc<Shared>>) -> std::io::Result<(String, String)> {
    let tickets = tickets();
    let name = tickets.listen()?;
    let secret = random()?;
    let mut waiting = lock(&tickets.waiting);
    if waiting.len() >= MOST {
        waiting.retain(|_, admits| !admits.to.is_gone());
    }
    if waiting.len() >= MOST {
        waiting.pop_first();
    }
    let number = waiting.last_key_value().map_or(0, |(number, _)| number + 1);
    let ticket = format!("{number}-{secret}");
    let kept = memory.map(|memory| (memory, Instant::now()));
    let keeps = kept.is_some();
    waiting.insert(number, Admits { secret, to, kept });
    if keeps && !tickets.is_letting_go.swap(true, Relaxed) {
        let thread = std::thread::Builder::new().name("egmem-tickets".into());
        if let Err(error) = thread.spawn(|| tickets.let_go()) {
            tickets.is_letting_go.store(false, Relaxed);
            waiting.remove(&number);
            return Err(error);
        }
    }
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

/// Presents a ticket at a socket, and returns the channel on which what it admits to comes. `go_on` is asked between
/// waits.
///
/// # Errors
/// Why there is no memory.
pub fn redeem(
    name: &str,
    ticket: &str,
    go_on: &mut dyn FnMut() -> bool,
) -> std::result::Result<Channel, Refused> {
    let connect = || {
        let address = SocketAddr::from_abstract_name(name)?;
        UnixStream::connect_addr(&address)
    };
    let stream = connect().map_err(|error| match error.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::NotFound => Refused::Ended,
        _ => {
            let what = "connecting to the process that pickled the memory";
            Refused::Lost(egmem::Error::system(what, &error).into())
        }
    })?;
    // Another user's process may have the name by now.
    let mut channel = Channel::new(stream, &Peers::same_user()).map_err(Refused::Lost)?;
    channel.set_timeout(PATIENCE);
    channel.send_text(ticket).map_err(Refused::Lost)?;
    granted(&mut channel, go_on)?;
    Ok(channel)
}

/// Receives an answer: what follows the word that grants something.
///
/// # Errors
/// Why nothing is granted.
pub fn granted(
    channel: &mut Channel,
    go_on: &mut dyn FnMut() -> bool,
) -> std::result::Result<String, Refused> {
    wait(channel, PATIENCE, go_on)?;
    let answer = channel.receive_text(TEXT).map_err(Refused::Lost)?;
    match (answer.as_str(), answer.strip_prefix(GRANTED)) {
        (_, Some(rest)) => Ok(rest.trim().to_owned()),
        (CLOSED, _) => Err(Refused::Closed),
        (UNKNOWN, _) => Err(Refused::Unknown),
        (why, _) => Err(Refused::Failed(why.to_owned())),
    }
}

impl Tickets {
    /// Returns the socket's name. The first call makes the socket, and the thread that answers there.
    fn listen(&'static self) -> std::io::Result<String> {
        let mut name = lock(&self.name);
        if let Some(name) = &*name {
            return Ok(name.clone());
        }
        let chosen = format!("egmem-{}", random()?);
        let socket = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&chosen)?)?;
        std::thread::Builder::new()
            .name("egmem-tickets".into())
            .spawn(move || self.answer_all(&socket))?;
        Ok(name.insert(chosen).clone())
    }

    /// Lets memory go that was kept for long enough, until none is kept.
    fn let_go(&self) {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let mut waiting = lock(&self.waiting);
            let ended = take_kept(&mut waiting, |(_, since)| since.elapsed() >= KEPT);
            let is_last = waiting.values().all(|admits| admits.kept.is_none());
            if is_last {
                self.is_letting_go.store(false, Relaxed);
            }
            drop(waiting);
            drop(ended);
            if is_last {
                return;
            }
        }
    }

    fn answer_all(&'static self, socket: &UnixListener) {
        loop {
            match socket.accept() {
                Ok((stream, _)) => self.admit(stream),
                // The process has too many open files: it may close some.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Answers a process of this user.
    fn admit(&'static self, stream: UnixStream) {
        let channel = match Channel::new(stream, &Peers::same_user()) {
            Ok(channel) => channel,
            Err(error) => return tracing::debug!(%error, "a process may not unpickle memory"),
        };
        common::answer(&self.answering, MOST_AT_A_TIME, move || {
            if let Err(error) = self.answer(channel) {
                tracing::debug!(%error, "a process that unpickles memory was lost");
            }
        });
    }

    fn answer(&self, mut channel: Channel) -> Result<()> {
        channel.set_timeout(PATIENCE);
        let ticket = channel.receive_text(TEXT)?;
        self.serve(&mut channel, &ticket)
    }

    fn serve(&self, channel: &mut Channel, ticket: &str) -> Result<()> {
        // What the ticket keeps lives until the memory was sent.
        let Some(admits) = self.take(ticket) else {
            return channel.send_text(UNKNOWN);
        };
        let (memory, window, access) = match &admits.to {
            To::Heap(heap) => return serve_chunks(channel, heap),
            To::Event(event) => return serve_event(channel, event),
            To::Ring(sides, is_producer) => {
                return match sides.upgrade() {
                    Some(sides) => sides.hand_over(*is_producer, GRANTED, channel),
                    None => channel.send_text(CLOSED),
                };
            }
            To::Memory(memory, window, access) => (memory.upgrade(), window, *access),
        };
        let Some(memory) = memory else {
            return channel.send_text(CLOSED);
        };
        let part = match *window {
            None => (*memory).clone(),
            Some((offset, len)) => match memory.window(offset, len) {
                Ok(part) => part,
                Err(error) => return channel.send_text(&reason(&error)),
            },
        };
        send(channel, &part, access, GRANTED)
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

/// Answers a process's questions for chunks, until the connection ends.
fn serve_chunks(channel: &mut Channel, heap: &Weak<Mutex<Option<egmem::Heap>>>) -> Result<()> {
    channel.send_text(GRANTED)?;
    let mut kept = BTreeMap::new();
    loop {
        while !channel.wait_for_message(Duration::MAX)? {}
        let Ok(offset) = channel.receive_text(TEXT)?.parse::<u64>() else {
            return channel.send_text(UNKNOWN);
        };
        let heap = heap.upgrade().and_then(|heap| lock(&heap).clone());
        match heap.map(|heap| heap.share_chunk(offset)) {
            None => channel.send_text(CLOSED)?,
            Some(Err(error)) => channel.send_text(&reason(&error))?,
            Some(Ok((shared, start))) => {
                let granted = format!("{GRANTED} {start}");
                send(channel, &shared, Access::ReadWrite, &granted)?;
                kept.insert(start, shared);
            }
        }
    }
}

fn serve_event(channel: &mut Channel, event: &Weak<Event>) -> Result<()> {
    let Some(event) = event.upgrade() else {
        return channel.send_text(CLOSED);
    };
    channel.send_text(GRANTED)?;
    channel.send_event(&event)
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
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
