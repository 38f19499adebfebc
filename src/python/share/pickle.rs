//! What `pickle` makes of memory.

use std::sync::{Arc, Mutex};

use egmem::driver::{Access, Driver};
use egmem::share::Shared;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::common::Window;
use super::tickets::{self, To};
use crate::error::{OrRaise, ToPy, raise};
use crate::region::{Owner, Region};

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
    if region.len() == 0 {
        return Err(raise(
            "InvalidArgument",
            "a slice of 0 bytes cannot be sent to another process",
            "send one of 1 byte or more",
            None,
        ));
    }
    let (whole, offset) = region.whole();
    let is_part = !Arc::ptr_eq(whole, region);
    match py.detach(|| whole.shared()).or_raise()? {
        Some(shared) => Ok((shared, is_part.then_some((offset, region.len())))),
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
    let to = To::Memory(Arc::downgrade(&shared), window, access);
    pickled(py, "_unpickle", (to, Some(shared)), region.driver())
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
    pickled(py, "_unpickle_heap", (to, None), heap.driver())
}

/// Returns a function's name and its arguments, as `pickle` takes them.
///
/// # Errors
/// The system's.
pub fn pickled<'py>(
    py: Python<'py>,
    receive: &str,
    (to, memory): (To, Option<Arc<Shared>>),
    driver: &Driver,
) -> PyResult<Bound<'py, PyAny>> {
    let issued = py.detach(|| tickets::issue(to, memory));
    let (name, ticket) = issued.map_err(|error| {
        egmem::Error::system("making a socket for pickled memory", &error).to_py()
    })?;
    let receive = py.import("egmem._egmem")?.getattr(receive)?;
    let arguments = (name, ticket, std::process::id(), driver.is_simulated());
    Ok((receive, arguments).into_pyobject(py)?.into_any())
}
