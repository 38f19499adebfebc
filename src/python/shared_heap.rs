//! A pickled heap: another process asks for its chunks by offset, on one connection.
//!
//! The process that has the heap keeps each chunk that it has sent until the connection ends, so that the heap does not
//! give the chunk back and put other memory in its place. The kernel ends the connection of a process that dies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use egmem::driver::Driver;
use egmem::share::{Channel, Error};
use pyo3::prelude::*;

use crate::args::Size;
use crate::error::{OrRaise, ToPy, raise};
use crate::import::{granted, receive_from, wait};
use crate::interpreter::{Closing, SLICE, drop_detached, lock, signals};
use crate::ledger::from_program;
use crate::memory::{SharedBuffer, make};
use crate::region::{Owner, Region, expect_within};
use crate::tickets::PATIENCE;

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
    driver: Driver,
    /// The process that has the heap.
    #[pyo3(get)]
    process: u32,
}

impl SharedHeap {
    /// Wraps a connection to the process that has the heap.
    pub fn new(channel: Channel, driver: Driver, process: u32) -> Self {
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
                    return Err(raise(
                        "Closed",
                        "the heap is closed, or the connection to its process has ended",
                        "keep both heaps open, and ask again only after a call that was not interrupted",
                        None,
                    ));
                }
                Connection::Used => {}
            }
            drop(connection);
            std::thread::sleep(SLICE / 50);
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
