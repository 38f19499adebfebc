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
use crate::error::{OrRaise, ToPy, not_supported, raise};
use crate::interpreter::{SLICE, closing, object, signals};
use crate::ledger::from_program;
use crate::memory::{SharedBuffer, make};
use crate::region::Owner;
use crate::ring::{RingSide, Side};
use crate::shared_heap::SharedHeap;
use crate::stream::Event;
use crate::tickets::{CLOSED, GRANTED, PATIENCE, TEXT, UNKNOWN};

/// What another process has pickled.
enum Received {
    Memory(ImportedBuffer),
    Heap(Channel),
    Event(egmem::Event),
    Ring(Side),
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
    let receive = || -> PyResult<Received> {
        let mut channel = connect_to(name, process)?;
        channel.send_text(ticket).or_raise()?;
        granted(&mut channel, process, kind)??;
        if kind == "heap" {
            return Ok(Received::Heap(channel));
        }
        wait(&mut channel, PATIENCE)?;
        let options = ImportOptions::new();
        let received = match kind {
            "event" => channel.receive_event(&driver).map(Received::Event),
            "producer" => Producer::receive_untyped(&driver, &mut channel, options)
                .map(|side| Received::Ring(Side::Producer(side))),
            "consumer" => Consumer::receive_untyped(&driver, &mut channel, options)
                .map(|side| Received::Ring(Side::Consumer(side))),
            _ => receive_from(&mut channel, &driver, None).map(Received::Memory),
        };
        received.or_raise()
    };
    match from_program(py, || py.detach(receive))? {
        Received::Memory(imported) => make(py, SharedBuffer, Owner::Imported(imported)),
        Received::Heap(channel) => {
            let heap = SharedHeap::new(channel, driver, process);
            object(py, closing(heap))
        }
        Received::Event(event) => object(py, Event::of(event)),
        Received::Ring(side) => object(py, RingSide::of(&driver, side)),
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

/// Connects to the socket of a process that pickled something.
///
/// # Errors
/// `ConnectionFailed`; `Refused` if another user's process has the socket's name by now.
fn connect_to(name: &str, process: u32) -> PyResult<Channel> {
    let address = SocketAddr::from_abstract_name(name);
    let stream = address.and_then(|address| UnixStream::connect_addr(&address));
    let stream = stream.map_err(|error| match error.kind() {
        ErrorKind::ConnectionRefused | ErrorKind::NotFound => raise(
            "ConnectionFailed",
            &format!("process {process}, which pickled the memory, has ended"),
            "keep it until the processes that get its memory have unpickled it; after that it may end",
            None,
        ),
        _ => {
            let what = "connecting to the process that pickled the memory";
            Error::from(egmem::Error::system(what, &error)).to_py()
        }
    })?;
    let mut channel = Channel::new(stream, &Peers::same_user()).or_raise()?;
    channel.set_timeout(PATIENCE);
    Ok(channel)
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
    Ok(Err(raise(class, &message, remedy, None)))
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
        std::thread::sleep(SLICE.min(left));
        signals()?;
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
