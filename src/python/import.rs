//! Memory of other processes without a server: what they offer at a socket, and pickled heaps.
//!
//! Another process asks for the chunks of a heap by offset, on one connection. The process that has the heap keeps each
//! chunk that it has sent until the connection ends, so that the heap does not give the chunk back and put other memory in
//! its place. The kernel ends the connection of a process that dies.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use egmem::driver::{Access, Driver as Native};
use egmem::share::{Channel, Error, ImportOptions, ImportedBuffer, Peers, Result, Unreachable};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::args::{self, Size, timeout_of};
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, ToPy, raise};
use crate::interpreter::{Closing, Open, SLICE, drop_detached, lock, signals};
use crate::ledger::from_program;
use crate::memory::{SharedBuffer, make};
use crate::pickle::{CLOSED, GRANTED, PATIENCE, TEXT, UNKNOWN, pickled, reason, send};
use crate::region::{Owner, Region, expect_within};

/// Receives memory that another process of this user offers at a socket: by `Memory.share`, or by a program in Rust or C.
///
/// It waits at most `timeout` seconds, also for the socket. `mode` is `"rw"`, `"r"`, or by default as the other process
/// offers it. Memory with `"r"` is mapped read-only: a write through it is a fault. That protects against mistakes of this
/// process, not against its intent, because the kernel cannot limit the fd.
///
/// Raises `ConnectionFailed` if no process offers memory there, `TimedOut`, and `Refused` for another user's process.
#[pyfunction]
#[pyo3(signature = (path, *, driver=None, timeout=10.0, mode=None))]
pub fn receive<'py>(
    py: Python<'py>,
    path: PathBuf,
    driver: Option<&Bound<'_, Driver>>,
    timeout: f64,
    mode: Option<&str>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    receive_at(py, &path, driver, (timeout, true), mode)
}

/// Receives memory as `receive` does, but does not wait for the socket: returns `None` if no process listens there.
#[pyfunction]
#[pyo3(name = "_receive_offered")]
pub fn receive_offered<'py>(
    py: Python<'py>,
    path: PathBuf,
    driver: &Bound<'_, Driver>,
    timeout: f64,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    receive_at(py, &path, Some(driver), (timeout, false), None)
}

/// Receives memory at a socket. `for_socket` says whether to wait for the socket too: `None` otherwise if no process listens
/// there.
fn receive_at<'py>(
    py: Python<'py>,
    path: &Path,
    driver: Option<&Bound<'_, Driver>>,
    (timeout, for_socket): (f64, bool),
    mode: Option<&str>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let driver = given_or_default(py, driver)?;
    let access = mode.map(args::mode).transpose()?;
    let patience = timeout_of(timeout)?;
    let receive = || -> PyResult<Option<ImportedBuffer>> {
        let begun = Instant::now();
        let Some(mut channel) = connect(path, patience, for_socket)? else {
            return Ok(None);
        };
        wait(&mut channel, patience.saturating_sub(begun.elapsed()))?;
        let received = receive_from(&mut channel, &driver, access);
        received.map(Some).or_raise()
    };
    let received = from_program(py, || py.detach(receive))?;
    let object = |imported| make(py, SharedBuffer, Owner::Imported(imported));
    received.map(object).transpose()
}

/// Connects to a socket. `for_socket` says whether to wait until there is one: `None` otherwise if no process listens there.
fn connect(path: &Path, patience: Duration, for_socket: bool) -> PyResult<Option<Channel>> {
    let begun = Instant::now();
    loop {
        let left = patience.saturating_sub(begun.elapsed());
        let error = match Channel::connect_within(path, Peers::same_user(), SLICE) {
            Ok(channel) => return Ok(Some(channel)),
            Err(error) => error,
        };
        let nobody_listens = matches!(
            error,
            Error::Unreachable {
                cause: Unreachable::NoSocket | Unreachable::NobodyListens,
                ..
            }
        );
        if nobody_listens && !for_socket {
            return Ok(None);
        }
        let may_come = nobody_listens || matches!(error, Error::TimedOut { .. });
        if !may_come || left.is_zero() {
            return Err(error.to_py());
        }
        thread::sleep(SLICE.min(left));
        signals()?;
    }
}

/// Waits until a message comes on a channel, without the GIL.
///
/// # Errors
/// `TimedOut`; that of a signal's handler; the channel's.
pub fn wait(channel: &mut Channel, patience: Duration) -> PyResult<()> {
    let begun = Instant::now();
    while !channel.wait_for_message(SLICE).or_raise()? {
        signals()?;
        if begun.elapsed() >= patience {
            return Err(Error::timed_out("waiting for memory", patience).to_py());
        }
    }
    Ok(())
}

/// Receives and maps the memory that has begun to arrive.
pub fn receive_from(
    channel: &mut Channel,
    driver: &Native,
    access: Option<Access>,
) -> Result<ImportedBuffer> {
    let offer = channel.receive()?;
    let have = offer.description().access;
    let offer = match access {
        Some(need) if need > have => {
            let why = "the memory is shared read-only; receive it with mode=\"r\", or share it with mode=\"rw\"";
            return Err(egmem::Error::invalid("mode", why).into());
        }
        Some(Access::Read) => offer.read_only(),
        _ => offer,
    };
    Ok(offer.import(driver, ImportOptions::new())?)
}

/// Receives an answer: what follows the word that grants something, or why nothing is granted. The channel can be used after
/// both.
///
/// # Errors
/// Those of [`wait`].
pub fn granted(channel: &mut Channel, process: u32, kind: &str) -> PyResult<PyResult<String>> {
    wait(channel, PATIENCE)?;
    let answer = channel.receive_text(TEXT).or_raise()?;
    if let Some(rest) = answer.strip_prefix(GRANTED) {
        return Ok(Ok(rest.trim().to_owned()));
    }
    let (class, message, remedy) = match (&*answer, kind) {
        (CLOSED, _) => (
            "Closed",
            format!("process {process} has closed what it pickled"),
            "keep it open there until the other process is done with it",
        ),
        (UNKNOWN, _) => (
            "Refused",
            format!(
                "process {process} does not know this pickle: it was unpickled before, or is too old"
            ),
            "pickle the memory once for each process that gets it",
        ),
        (why, "producer" | "consumer") => (
            "Refused",
            format!("process {process} did not hand over its side of a ring: {why}"),
            "keep one side in the process that pickles the other; pickle it again once the third process has ended",
        ),
        (why, _) => (
            "Refused",
            format!("process {process} could not export what it pickled: {why}"),
            "pass the offset of a live block, or pickle memory that can be exported",
        ),
    };
    Ok(Err(raise(class, &message, remedy)))
}

/// Returns what `pickle` makes of a heap.
///
/// # Errors
/// `TypeError` for a heap that was not made shareable; the system's.
pub fn reduce_heap<'py>(
    py: Python<'py>,
    heap: &egmem::Heap,
    slot: &Arc<Open<egmem::Heap>>,
    shareable: bool,
) -> PyResult<Bound<'py, PyAny>> {
    if !shareable {
        return Err(PyTypeError::new_err(
            "this Heap cannot be sent to another process: it was made without shareable=True; what to do: make it with egmem.Heap(shareable=True)",
        ));
    }
    pickled(py, "heap", (slot, None), heap.driver(), |channel, heap| {
        let weak = Arc::downgrade(&heap);
        drop(heap); // its object may go meanwhile
        serve_chunks(channel, &weak)
    })
}

/// Answers a process's questions for chunks, until the connection ends.
fn serve_chunks(channel: &mut Channel, heap: &Weak<Open<egmem::Heap>>) -> Result<()> {
    channel.send_text(GRANTED)?;
    let mut kept = BTreeMap::new();
    loop {
        while !channel.wait_for_message(Duration::MAX)? {}
        let Ok(offset) = channel.receive_text(TEXT)?.parse::<u64>() else {
            return channel.send_text(UNKNOWN);
        };
        let heap = heap.upgrade().and_then(|heap| heap.value());
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

/// The connection to the process that has the heap.
enum Connection {
    Free(Channel),
    /// A thread waits for an answer.
    Used,
    Closed,
}

/// Another process's heap, unpickled: it finds the heap's blocks by their offsets.
///
/// A chunk of the heap is mapped when the first of its blocks is asked for, and the heap does not give it back before this
/// object is closed. The object allocates nothing.
#[pyclass(extends = Closing, frozen, module = "egmem", name = "SharedHeap")]
pub struct SharedHeap {
    connection: Mutex<Connection>,
    /// By the offsets at which they begin.
    chunks: Mutex<BTreeMap<u64, Arc<Region>>>,
    driver: Native,
    /// The process that has the heap.
    #[pyo3(get)]
    process: u32,
}

impl SharedHeap {
    /// Wraps a connection to the process that has the heap.
    pub fn new(channel: Channel, driver: Native, process: u32) -> Self {
        Self {
            connection: Mutex::new(Connection::Free(channel)),
            chunks: Mutex::default(),
            driver,
            process,
        }
    }

    /// Returns the chunk at an offset, if it is mapped here, and the offset at which it begins.
    fn mapped(&self, offset: u64) -> Option<(u64, Arc<Region>)> {
        let chunks = lock(&self.chunks);
        let (start, chunk) = chunks.range(..=offset).next_back()?;
        (offset - start < chunk.len).then(|| (*start, Arc::clone(chunk)))
    }

    /// Asks the other process for the chunk at an offset.
    fn ask(&self, offset: u64) -> PyResult<()> {
        let mut channel = loop {
            let mut connection = lock(&self.connection);
            match std::mem::replace(&mut *connection, Connection::Used) {
                Connection::Free(channel) => break channel,
                Connection::Closed => {
                    *connection = Connection::Closed;
                    drop(connection);
                    let message = "the heap is closed, or the connection to its process has ended";
                    let remedy = "keep both heaps open, and ask again only after a call that was not interrupted";
                    return Err(raise("Closed", message, remedy));
                }
                Connection::Used => {}
            }
            drop(connection);
            thread::sleep(SLICE / 50);
            signals()?;
        };
        // Another thread may have asked for it meanwhile.
        let answer = match self.mapped(offset) {
            Some(_) => Ok(Ok(())),
            None => self.ask_on(&mut channel, offset),
        };
        let mut connection = lock(&self.connection);
        if let (Connection::Used, Ok(_)) = (&*connection, &answer) {
            *connection = Connection::Free(channel);
        } else {
            // The rest of an answer may come.
            *connection = Connection::Closed;
        }
        drop(connection);
        answer?
    }

    /// Asks on the connection; returns whether the other process has granted the chunk.
    ///
    /// # Errors
    /// Those after which the connection cannot be used.
    fn ask_on(&self, channel: &mut Channel, offset: u64) -> PyResult<PyResult<()>> {
        channel.send_text(&offset.to_string()).or_raise()?;
        let start = match granted(channel, self.process, "heap")? {
            Ok(start) => start,
            Err(refused) => return Ok(Err(refused)),
        };
        let start: u64 = start.parse().map_err(|_| self.broken())?;
        wait(channel, PATIENCE)?;
        let imported = receive_from(channel, &self.driver, None).or_raise()?;
        let chunk = Arc::new(Region::new(Owner::Imported(imported)));
        // Otherwise the caller would ask for ever.
        if offset.checked_sub(start).is_none_or(|at| at >= chunk.len) {
            return Err(self.broken());
        }
        lock(&self.chunks).insert(start, chunk);
        Ok(Ok(()))
    }

    /// Returns the exception for an answer that makes no sense, which ends the connection: the rest of it may come.
    fn broken(&self) -> PyErr {
        let peer = format!("process {}", self.process);
        Error::protocol(peer, "no chunk of the heap at the offset").to_py()
    }

    fn is_closed(&self) -> bool {
        matches!(*lock(&self.connection), Connection::Closed)
    }

    fn end(&self) {
        let connection = std::mem::replace(&mut *lock(&self.connection), Connection::Closed);
        let chunks = std::mem::take(&mut *lock(&self.chunks));
        drop_detached((connection, chunks));
    }
}

impl Drop for SharedHeap {
    fn drop(&mut self) {
        self.end();
    }
}

#[pymethods]
impl SharedHeap {
    /// Returns the block at an offset, which is its `offset` in the process that allocated it, with `nbytes` bytes.
    ///
    /// Do not free the block there before this process is done with it: a freed block has another user soon.
    ///
    /// Raises `Closed` if either heap is closed, and `Refused` if the heap has no memory there.
    fn block<'py>(
        &self,
        py: Python<'py>,
        offset: Size,
        nbytes: Size,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.driver.expect_this_process("heap").or_raise()?;
        let (offset, nbytes) = (offset.0, nbytes.0);
        // Memory that is mapped here is valid without the other process.
        let find = || {
            loop {
                match self.mapped(offset) {
                    Some(found) => return Ok::<_, PyErr>(found),
                    None => self.ask(offset)?,
                }
            }
        };
        let (start, whole) = from_program(py, || py.detach(find))?;
        let offset = offset - start;
        expect_within(offset, nbytes, whole.len).or_raise()?;
        let len = nbytes;
        make(py, SharedBuffer, Owner::Part { whole, offset, len })
    }

    /// Whether it was closed here, or the connection to the other process has ended.
    #[getter]
    fn closed(&self) -> bool {
        self.is_closed()
    }

    /// Ends the heap's use here. Blocks stay valid.
    fn close(&self) {
        self.end();
    }

    fn __repr__(&self) -> String {
        let state = if self.is_closed() { " closed" } else { "" };
        format!("<egmem.SharedHeap of process {}{state}>", self.process)
    }
}
