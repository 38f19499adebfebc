//! `egmem.SharedBuffer`: memory of another process, without a server.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use egmem::driver::{Access, Driver as Native};
use egmem::share::{Channel, Error, ImportOptions, ImportedBuffer, Peers, Unreachable};
use pyo3::prelude::*;

use super::common::{self, Refused, SLICE, wait};
use super::tickets::{self, PATIENCE};
use crate::args::timeout_of;
use crate::driver::{Driver, given_or_default};
use crate::error::{ToPy, not_supported, raise};
use crate::memory::{Memory, make};
use crate::region::Owner;
use crate::site::from_program;

/// Another process's memory, mapped here: unpickled, or received by `receive`.
///
/// It stays valid when the other process closes the memory or ends. A process maps the same memory once, however often
/// it gets it. A block of a heap may have another use once its process has freed it: do not free it there before this
/// process is done with it.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct SharedBuffer;

/// Receives memory that another process has pickled.
#[pyfunction]
#[pyo3(name = "_unpickle")]
pub fn unpickle<'py>(
    py: Python<'py>,
    name: &str,
    ticket: &str,
    process: u32,
    simulated: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let driver = given_or_default(py, None)?;
    expect_kind(&driver, process, simulated)?;
    let found = from_program(py, || {
        waiting(py, |go_on| {
            let mut channel = tickets::redeem(name, ticket, go_on)?;
            wait(&mut channel, PATIENCE, go_on)?;
            receive_from(&mut channel, &driver, None).map_err(Refused::Lost)
        })
    });
    let imported = found.map_err(|failed| failed.into_exception(process))?;
    make(py, SharedBuffer, Owner::Imported(imported))
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
        Refused::Stopped => ("Error", "the wait was stopped".into(), "try again"),
    };
    raise(class, &message, remedy, None)
}

/// Why a wait failed.
pub enum Failed {
    /// A signal's handler raised.
    Raised(PyErr),
    /// The other process refused, or was lost.
    Refused(Refused),
}

impl Failed {
    /// Returns the exception, about memory of `process`.
    pub fn into_exception(self, process: u32) -> PyErr {
        match self {
            Self::Raised(error) => error,
            Self::Refused(refused) => explain(refused, process),
        }
    }
}

/// Calls `work` without the GIL. The function that it gets looks for signals, and returns `false` if one raised.
pub fn waiting<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, Refused> + Send,
) -> Result<T, Failed> {
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
        Some(error) => Err(Failed::Raised(error)),
        None => done.map_err(Failed::Refused),
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
    let access = mode.map(common::mode).transpose()?;
    match receive_at(py, &path, &driver, access, (timeout_of(timeout)?, true)) {
        Ok(imported) => make(py, SharedBuffer, Owner::Imported(imported)),
        // Without a ticket it is refused by no process, only lost.
        Err(failed) => Err(failed.into_exception(0)),
    }
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
    match receive_at(py, &path, &driver, None, (timeout_of(timeout)?, false)) {
        Ok(imported) => make(py, SharedBuffer, Owner::Imported(imported)).map(Some),
        Err(Failed::Refused(Refused::Lost(error))) if nobody_listens(&error) => Ok(None),
        Err(failed) => Err(failed.into_exception(0)),
    }
}

/// Receives memory at a socket. The last argument says how long to wait, and whether to wait for the socket too.
fn receive_at(
    py: Python<'_>,
    path: &Path,
    driver: &Native,
    access: Option<Access>,
    (patience, for_socket): (Duration, bool),
) -> Result<ImportedBuffer, Failed> {
    from_program(py, || {
        waiting(py, |go_on| {
            let begun = Instant::now();
            let mut channel = connect(path, (patience, for_socket), go_on)?;
            let left = patience.saturating_sub(begun.elapsed());
            wait(&mut channel, left, go_on)?;
            receive_from(&mut channel, driver, access).map_err(Refused::Lost)
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
