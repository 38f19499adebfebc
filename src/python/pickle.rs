//! What `pickle` makes of memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use egmem::driver::{Access, Driver};
use egmem::share::{Channel, Result, Shared};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::{OrRaise, ToPy, raise};
use crate::interpreter::Open;
use crate::region::{Owner, Region};
use crate::tickets::{CLOSED, GRANTED, TEXT, UNKNOWN, issue, reason, send};

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
    let kept = Some(Arc::clone(&shared));
    let answer = move |channel: &mut Channel, memory: Arc<Shared>| match part_of(&memory, window) {
        Ok(part) => send(channel, &part, access, GRANTED),
        Err(error) => channel.send_text(&reason(&error)),
    };
    pickled(py, "memory", (&shared, kept), &region.driver, answer)
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

/// Returns a function's name and its arguments, as `pickle` takes them. The other process gets what `answer` sends.
///
/// # Errors
/// The system's.
pub fn pickled<'py, T: Send + Sync + 'static>(
    py: Python<'py>,
    kind: &str,
    (of, memory): (&Arc<T>, Option<Arc<Shared>>),
    driver: &Driver,
    answer: impl FnOnce(&mut Channel, Arc<T>) -> Result<()> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let issued = py.detach(|| issue(of, memory, answer));
    let (name, ticket) = issued.map_err(|error| {
        egmem::Error::system("making a socket for pickled memory", &error).to_py()
    })?;
    let receive = py.import("egmem._egmem")?.getattr("_unpickle")?;
    let process = std::process::id();
    let arguments = (name, ticket, process, driver.is_simulated(), kind);
    Ok((receive, arguments).into_pyobject(py)?.into_any())
}
