//! Memory for other processes without a server: pickling, `Memory.share` and `receive`.

mod chunks;
mod import;
mod offer;
mod tickets;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use egmem::driver::{Access, Driver};
use egmem::share::{Channel, Error, Shared};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::{OrRaise, ToPy, invalid};
use crate::memory::Memory;
use crate::region::{Owner, Region};
use tickets::To;

pub use import::SharedBufferBase;
pub use offer::{Offer, offer};

/// The offset and the length of a part; `None` for all of the memory.
type Window = Option<(u64, u64)>;

/// How long a wait may last before signals are looked for.
const SLICE: Duration = Duration::from_millis(50);

/// Adds the functions and types.
pub fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Offer>()?;
    module.add_class::<chunks::SharedHeap>()?;
    module.add_function(wrap_pyfunction!(chunks::unpickle_heap, module)?)?;
    module.add_function(wrap_pyfunction!(import::receive, module)?)?;
    module.add_function(wrap_pyfunction!(import::unpickle, module)?)?;
    module.add_function(wrap_pyfunction!(offer::close_offers, module)?)?;
    Ok(())
}

/// Parses the access of other processes.
///
/// # Errors
/// `InvalidArgument`.
fn mode(text: &str) -> PyResult<Access> {
    match text {
        "rw" => Ok(Access::ReadWrite),
        "r" => Ok(Access::Read),
        _ => Err(invalid(&format!("mode is {text:?}; valid: \"rw\", \"r\""))),
    }
}

/// Returns the memory for other processes, and the window of it that a slice is.
///
/// # Errors
/// `TypeError` for memory that was not made shareable, and for another process's.
fn shareable(memory: &Bound<'_, Memory>, region: &Arc<Region>) -> PyResult<(Arc<Shared>, Window)> {
    region.expect_here()?;
    let (whole, offset) = region.whole();
    let is_part = !Arc::ptr_eq(whole, region);
    match memory.py().detach(|| whole.shared()).or_raise()? {
        Some(shared) => Ok((shared, is_part.then_some((offset, region.len())))),
        None => Err(PyTypeError::new_err(why_not(
            whole,
            &memory.get_type().name()?.to_string(),
        ))),
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
        Ok(Owner::OfMany(_)) => (
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
pub fn reduce<'py>(memory: &Bound<'py, Memory>) -> PyResult<Bound<'py, PyAny>> {
    let py = memory.py();
    let region = memory.get().region()?;
    let (shared, window) = shareable(memory, &region)?;
    let to = To::Memory(Arc::downgrade(&shared), window);
    pickled(py, "_unpickle", to, region.driver())
}

/// Returns what `pickle` makes of a heap.
///
/// # Errors
/// `TypeError` for a heap that was not made shareable; the system's.
pub fn reduce_heap<'py>(
    py: Python<'py>,
    heap: &egmem::Heap,
    slot: &Arc<Mutex<Option<egmem::Heap>>>,
    shareable: bool,
) -> PyResult<Bound<'py, PyAny>> {
    if !shareable {
        return Err(PyTypeError::new_err(
            "this Heap cannot be sent to another process: it was made without shareable=True; what to do: make it with egmem.Heap(shareable=True)",
        ));
    }
    let to = To::Heap(Arc::downgrade(slot));
    pickled(py, "_unpickle_heap", to, heap.driver())
}

/// Returns a function's name and its arguments, as `pickle` takes them.
fn pickled<'py>(
    py: Python<'py>,
    receive: &str,
    to: To,
    driver: &Driver,
) -> PyResult<Bound<'py, PyAny>> {
    let issued = py.detach(|| tickets::issue(to));
    let (name, ticket) = issued.map_err(|error| {
        egmem::Error::system("making a socket for pickled memory", &error).to_py()
    })?;
    let receive = py.import("egmem._egmem")?.getattr(receive)?;
    let arguments = (name, ticket, std::process::id(), driver.is_simulated());
    Ok((receive, arguments).into_pyobject(py)?.into_any())
}

/// Waits until a message comes on a channel. `go_on` is asked between waits.
fn wait(
    channel: &mut Channel,
    patience: Duration,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<(), tickets::Refused> {
    let begun = Instant::now();
    while !channel
        .wait_for_message(SLICE)
        .map_err(tickets::Refused::Lost)?
    {
        if !go_on() {
            return Err(tickets::Refused::Stopped);
        }
        if begun.elapsed() >= patience {
            let error = Error::TimedOut {
                what: "waiting for memory".into(),
                after: patience,
            };
            return Err(tickets::Refused::Lost(error));
        }
    }
    Ok(())
}
