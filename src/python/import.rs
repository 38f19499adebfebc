//! What other processes have pickled, and memory that they offer, without a server.

use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use egmem::driver::{Access, Driver as Native};
use egmem::shapes::{Consumer, Producer};
use egmem::share::{Channel, Error, ImportOptions, ImportedBuffer, Peers, Unreachable};
use pyo3::prelude::*;

use crate::args::{self, timeout_of};
use crate::driver::{Driver, given_or_default};
use crate::error::{ToPy, not_supported, raise};
use crate::interpreter::{closing, object};
use crate::ledger::from_program;
use crate::memory::{SharedBuffer, make};
use crate::region::Owner;
use crate::ring::{RingSide, Side};
use crate::shared_heap::SharedHeap;
use crate::stream::Event;
use crate::tickets::{CLOSED, GRANTED, PATIENCE, TEXT, UNKNOWN};

/// How long a wait may last before signals are looked for.
pub const SLICE: Duration = Duration::from_millis(50);

/// Why another process gives nothing.
pub enum Refused {
    /// The process that made a ticket does not answer: it has ended.
    Ended,
    /// Its memory was closed.
    Closed,
    /// The ticket was used before, or is no ticket.
    Unknown,
    /// The memory could not be exported.
    Failed(String),
    /// A side of a ring was not handed over.
    NoSide(String),
    /// The connection failed.
    Lost(Error),
    /// The caller stopped the wait.
    Stopped,
}

/// What another process has pickled.
enum Received {
    Memory(ImportedBuffer),
    Heap(Channel),
    Event(egmem::Event),
    Ring(RingSide),
}

/// Receives what another process has pickled.
#[pyfunction]
#[pyo3(name = "_unpickle")]
pub fn unpickle<'py>(
    py: Python<'py>,
    name: &str,
    ticket: &str,
    process: u32,
    simulated: bool,
    kind: &str,
) -> PyResult<Bound<'py, PyAny>> {
    let driver = given_or_default(py, None)?;
    expect_kind(&driver, process, simulated)?;
    let receive = |channel: &mut Channel| {
        let options = ImportOptions::new();
        Ok(match kind {
            "event" => Received::Event(channel.receive_event(&driver)?),
            "producer" => {
                let side = Producer::receive_untyped(&driver, channel, options)?;
                Received::Ring(RingSide::of(&driver, Side::Producer(side)))
            }
            "consumer" => {
                let side = Consumer::receive_untyped(&driver, channel, options)?;
                Received::Ring(RingSide::of(&driver, Side::Consumer(side)))
            }
            _ => Received::Memory(receive_from(channel, &driver, None)?),
        })
    };
    let received = from_program(py, || {
        waiting(py, process, |go_on| {
            let mut channel = redeem(name, ticket, go_on).map_err(|refused| match refused {
                Refused::Failed(why) if kind != "memory" => Refused::NoSide(why),
                refused => refused,
            })?;
            if kind == "heap" {
                return Ok(Received::Heap(channel));
            }
            wait(&mut channel, PATIENCE, go_on)?;
            receive(&mut channel).map_err(Refused::Lost)
        })
    });
    match received? {
        Received::Memory(imported) => make(py, SharedBuffer, Owner::Imported(imported)),
        Received::Heap(channel) => {
            let heap = SharedHeap::new(channel, driver, process);
            object(py, closing(heap))
        }
        Received::Event(event) => object(py, Event::of(event)),
        Received::Ring(side) => object(py, side),
    }
}

/// Checks that this process's driver can import what another process pickled.
///
/// # Errors
/// `NotSupported` if one is simulated and the other is not.
pub fn expect_kind(driver: &Native, process: u32, simulated: bool) -> PyResult<()> {
    if driver.is_simulated() == simulated {
        return Ok(());
    }
    let kind = |simulated| if simulated { "a simulated" } else { "CUDA's" };
    Err(not_supported(
        &format!(
            "process {process} pickled memory of {} driver, and the default driver here is {}",
            kind(simulated),
            kind(!simulated)
        ),
        "use one kind in both: set EGMEM_SIM for both processes, or call egmem.set_default_driver first",
    ))
}

/// Returns the exception for memory that was not received from a process.
fn explain(refused: Refused, process: u32) -> PyErr {
    let (class, message, remedy) = match refused {
        Refused::Lost(error) => return error.to_py(),
        Refused::Ended => (
            "ConnectionFailed",
            format!("process {process}, which pickled the memory, has ended"),
            "keep it until the processes that get its memory have unpickled it; after that it may end",
        ),
        Refused::Closed => (
            "Closed",
            format!("process {process} has closed what it pickled"),
            "keep it open there until the other process is done with it",
        ),
        Refused::Unknown => (
            "Refused",
            format!(
                "process {process} does not know this pickle: it was unpickled before, or is too old"
            ),
            "pickle the memory once for each process that gets it",
        ),
        Refused::Failed(why) => (
            "Refused",
            format!("process {process} could not export the memory: {why}"),
            "pass the offset of a live block, or pickle memory that can be exported",
        ),
        Refused::NoSide(why) => (
            "Refused",
            format!("process {process} did not hand over its side of a ring: {why}"),
            "keep one side in the process that pickles the other; pickle it again once the third process has ended",
        ),
        Refused::Stopped => ("Error", "the wait was stopped".into(), "try again"),
    };
    raise(class, &message, remedy, None)
}

/// Calls `work` without the GIL, which asks `process` for something. The function that it gets looks for signals, and returns
/// `false` if one raised.
///
/// # Errors
/// The exception of a signal's handler; that of the refusal.
pub fn waiting<T: Send>(
    py: Python<'_>,
    process: u32,
    work: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, Refused> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let done = py.detach(|| {
        work(&mut || match Python::attach(|py| py.check_signals()) {
            Ok(()) => true,
            Err(error) => {
                raised = Some(error);
                false
            }
        })
    });
    match raised {
        Some(error) => Err(error),
        None => done.map_err(|refused| explain(refused, process)),
    }
}

/// Waits until a message comes on a channel. `go_on` is asked between waits.
pub fn wait(
    channel: &mut Channel,
    patience: Duration,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<(), Refused> {
    let begun = Instant::now();
    while !channel.wait_for_message(SLICE).map_err(Refused::Lost)? {
        if !go_on() {
            return Err(Refused::Stopped);
        }
        if begun.elapsed() >= patience {
            let error = Error::timed_out("waiting for memory", patience);
            return Err(Refused::Lost(error));
        }
    }
    Ok(())
}

/// Presents a ticket at a socket, and returns the channel on which what it admits to comes. `go_on` is asked between
/// waits.
///
/// # Errors
/// Why there is no memory.
fn redeem(name: &str, ticket: &str, go_on: &mut dyn FnMut() -> bool) -> Result<Channel, Refused> {
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
pub fn granted(channel: &mut Channel, go_on: &mut dyn FnMut() -> bool) -> Result<String, Refused> {
    wait(channel, PATIENCE, go_on)?;
    let answer = channel.receive_text(TEXT).map_err(Refused::Lost)?;
    match (answer.as_str(), answer.strip_prefix(GRANTED)) {
        (_, Some(rest)) => Ok(rest.trim().to_owned()),
        (CLOSED, _) => Err(Refused::Closed),
        (UNKNOWN, _) => Err(Refused::Unknown),
        (why, _) => Err(Refused::Failed(why.to_owned())),
    }
}

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
) -> PyResult<Bound<'py, PyAny>> {
    let driver = given_or_default(py, driver)?;
    let access = mode.map(args::mode).transpose()?;
    let received = receive_at(py, &path, &driver, access, (timeout_of(timeout)?, true))?;
    let received = received.ok_or_else(|| explain(Refused::Ended, 0))?; // it has waited for the socket
    make(py, SharedBuffer, Owner::Imported(received))
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
    let driver = given_or_default(py, Some(driver))?;
    let received = receive_at(py, &path, &driver, None, (timeout_of(timeout)?, false))?;
    let object = |imported| make(py, SharedBuffer, Owner::Imported(imported));
    received.map(object).transpose()
}

/// Receives memory at a socket. The last argument says how long to wait, and whether to wait for the socket too: `None`
/// otherwise if no process listens there.
fn receive_at(
    py: Python<'_>,
    path: &Path,
    driver: &Native,
    access: Option<Access>,
    (patience, for_socket): (Duration, bool),
) -> PyResult<Option<ImportedBuffer>> {
    from_program(py, || {
        // Without a ticket it is refused by no process, only lost.
        waiting(py, 0, |go_on| {
            let begun = Instant::now();
            let mut channel = match connect(path, (patience, for_socket), go_on) {
                Err(Refused::Lost(error)) if !for_socket && nobody_listens(&error) => {
                    return Ok(None);
                }
                channel => channel?,
            };
            let left = patience.saturating_sub(begun.elapsed());
            wait(&mut channel, left, go_on)?;
            let received = receive_from(&mut channel, driver, access);
            received.map(Some).map_err(Refused::Lost)
        })
    })
}

fn nobody_listens(error: &Error) -> bool {
    matches!(
        error,
        Error::Unreachable {
            cause: Unreachable::NoSocket | Unreachable::NobodyListens,
            ..
        }
    )
}

/// Connects to a socket. `for_socket` says whether to wait until there is one.
fn connect(
    path: &Path,
    (patience, for_socket): (Duration, bool),
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Channel, Refused> {
    let begun = Instant::now();
    loop {
        let left = patience.saturating_sub(begun.elapsed());
        let error = match Channel::connect_within(path, Peers::same_user(), SLICE) {
            Ok(channel) => return Ok(channel),
            Err(error) => error,
        };
        let may_come = match &error {
            Error::TimedOut { .. } => true,
            error => for_socket && nobody_listens(error),
        };
        if !may_come || left.is_zero() {
            return Err(Refused::Lost(error));
        }
        std::thread::sleep(SLICE.min(left));
        if !go_on() {
            return Err(Refused::Stopped);
        }
    }
}

/// Receives and maps the memory that has begun to arrive.
pub fn receive_from(
    channel: &mut Channel,
    driver: &Native,
    access: Option<Access>,
) -> Result<ImportedBuffer, Error> {
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
