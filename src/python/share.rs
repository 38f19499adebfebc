//! `Memory.share`: memory at a Unix socket, for any process of the user.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use egmem::driver::Driver;
use egmem::share::{Channel, Error, Listener, Peers};
use pyo3::prelude::*;

use crate::args;
use crate::error::OrRaise;
use crate::interpreter::{Closing, Open, PerProcess, closing, drop_detached, lock};
use crate::pickle::{answer_each, part_of, shareable};
use crate::region::{Offered, Region};

/// How long a process may take to receive the memory.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most processes that receive it at a time; beyond that a connection is closed.
const MOST_AT_A_TIME: usize = 64;

/// Memory that is offered at a Unix socket until this object is closed or deleted. Made by `Memory.share`.
#[pyclass(extends = Closing, frozen, module = "egmem", name = "Offer")]
pub struct Offer {
    open: Arc<Open<Parts>>,
    path: PathBuf,
    driver: Driver,
}

/// Ends an offer when it is dropped.
pub struct Ends(Arc<Open<Parts>>);

impl Drop for Ends {
    fn drop(&mut self) {
        drop_detached(self.0.take());
    }
}

/// An offer: when it is dropped, no process gets the memory any more, and the socket's file is gone.
struct Parts {
    // In this order: the thread has ended before the socket's file is removed and the memory may be closed.
    thread: Option<JoinHandle<()>>,
    ended: Arc<AtomicBool>,
    listener: Arc<Listener>,
    region: Offered,
}

/// The offers of this process, so that none leaves its socket at the end.
static OFFERS: PerProcess<Mutex<Vec<Weak<Open<Parts>>>>> = PerProcess::new();

impl Drop for Parts {
    fn drop(&mut self) {
        let thread = self.thread.take();
        // A forked child ends nothing: the socket and its thread are the parent's.
        if !self.region.is_here() {
            std::mem::forget((thread, Arc::clone(&self.listener)));
            return;
        }
        self.ended.store(true, Relaxed);
        self.listener.close();
        // It does not panic.
        let _ = thread.map(JoinHandle::join);
    }
}

impl Offer {
    /// Returns a value whose drop ends the offer.
    pub fn ends(&self) -> Ends {
        Ends(Arc::clone(&self.open))
    }
}

#[pymethods]
impl Offer {
    /// The socket's path.
    #[getter]
    fn path(&self) -> &OsStr {
        self.path.as_os_str()
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.open.is_closed()
    }

    /// Ends the offer and removes the socket. Processes that have received the memory keep it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.driver.expect_this_process("offer").or_raise()?;
        self.open.close(py);
        Ok(())
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { " closed" } else { "" };
        format!("<egmem.Offer at {}{state}>", self.path.display())
    }
}

/// Offers memory at a socket.
///
/// # Errors
/// `TypeError` for memory that was not made shareable; `InvalidArgument` for a mode; the system's errors.
pub fn offer(
    py: Python<'_>,
    region: &Arc<Region>,
    name: &str,
    path: PathBuf,
    mode: &str,
) -> PyResult<Py<Offer>> {
    let access = args::mode(mode)?;
    let (shared, window) = shareable(py, region, name)?;
    let driver = region.driver.clone();
    let parts = py.detach(|| {
        let shared = part_of(&shared, window)?;
        let listener = Arc::new(Listener::bind(&path, Peers::same_user())?);
        let ended = Arc::new(AtomicBool::new(false));
        let (accepting, is_over) = (Arc::clone(&listener), Arc::clone(&ended));
        let send = move |mut channel: Channel| {
            channel.set_timeout(PATIENCE);
            channel.send(&shared, access)
        };
        let next = move || accepting.accept();
        let serve = move || answer_each(next, MOST_AT_A_TIME, &is_over, send);
        let thread = thread::Builder::new().name("egmem-offers".into());
        let thread = thread
            .spawn(serve)
            .map_err(|error| egmem::Error::system("starting a thread for a socket", &error))?;
        Ok::<_, Error>(Parts {
            thread: Some(thread),
            ended,
            listener,
            region: Offered::new(region),
        })
    });
    let open = Arc::new(Open::new(parts.or_raise()?));
    let mut offers = lock(OFFERS.get(|_| Mutex::default()));
    offers.retain(|offer| offer.strong_count() > 0);
    offers.push(Arc::downgrade(&open));
    Py::new(py, closing(Offer { open, path, driver }))
}

/// Ends this process's offers, so that their sockets are gone.
#[pyfunction]
#[pyo3(name = "_close_offers")]
pub fn close_offers(py: Python<'_>) {
    py.detach(|| {
        let offers = std::mem::take(&mut *lock(OFFERS.get(|_| Mutex::default())));
        for offer in offers.iter().filter_map(Weak::upgrade) {
            drop(offer.take());
        }
    });
}
