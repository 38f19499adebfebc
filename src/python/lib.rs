//! The native module of the Python package `egmem`, and how pickled objects are received.
//!
//! The functions below are a thin face: they check arguments, release the GIL, call the facade crate and convert
//! errors. No lock of egmem is held while Python code runs, and no egmem code that holds a lock asks for the GIL.
//! Making an exception runs Python code, so the error is built after the lock is released.

mod args;
mod blocks;
mod buffer;
mod cli;
mod copies;
mod dlpack;
mod driver;
mod error;
mod exchange;
mod frees;
mod heap;
mod holds;
#[cfg(feature = "test-hooks")]
mod hooks;
mod import;
mod interpreter;
mod kv;
mod ledger;
mod memory;
mod owner;
mod pickle;
mod places;
mod region;
mod ring;
mod share;
mod stream;
mod torch_alloc;
mod view;

use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use egmem::Driver;
use egmem::shapes::{Consumer, Producer};
use egmem::share::{Channel, Error, ImportOptions, ImportedBuffer, Peers};
use pyo3::prelude::*;

use driver::given_or_default;
use error::{OrRaise, ToPy, not_supported, raise};
use import::{SharedHeap, granted, receive_from, wait};
use interpreter::{closing, object};
use ledger::from_program;
use memory::{SharedBuffer, make};
use pickle::PATIENCE;
use region::Owner;
use ring::{RingSide, Side};
use stream::Event;

#[pyo3::pymodule]
mod _egmem {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::interpreter::expect_first()?;
        // PyO3 makes the exception about an argument of another type by attaching again. Late in the interpreter's shutdown,
        // where `Py_IsInitialized` says no, it panics there unless it has seen the interpreter before. An import that is as late
        // must not start the interpreter anew.
        // SAFETY: always may be called.
        if unsafe { pyo3::ffi::Py_IsInitialized() } != 0 {
            Python::initialize();
        }
        Ok(())
    }

    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[cfg(feature = "test-hooks")]
    #[pymodule_export]
    use crate::hooks::{_begin_capture, _end_capture, _fail, _measure};
    #[pymodule_export]
    use crate::{
        args::{gpu, node, size},
        blocks::{Block, Blocks},
        buffer::{Buffer, Pool, PoolBlock},
        cli::{_doctor, _run, ps, ps_dict},
        copies::Slice,
        driver::{Driver, Topology, default_driver, open, set_default_driver, simulated, topology},
        exchange::{Client, RemoteBuffer, connect, gather},
        frees::{deferred, free_deferred, hold, release},
        heap::Heap,
        import::{SharedHeap, receive, receive_offered},
        interpreter::{Closing, end_runs},
        kv::{
            Tier,
            copies::{GpuPages, Job},
            events::{Events, Subscription, TierEvent},
            store::{Load, PageView, Store},
        },
        ledger::{allocations, locate, memory_summary},
        memory::{Memory, SharedBuffer},
        ring::{RingSide, ring},
        share::{Offer, close_offers},
        stream::{Event, Stream},
        torch_alloc::{CupySource, TorchSlot, register},
        unpickle,
        view::View,
    };
}

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
fn expect_kind(driver: &Driver, process: u32, simulated: bool) -> PyResult<()> {
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
