//! `Memory.share`: memory at a Unix socket, for any process of the user.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use egmem::driver::Access;
use egmem::share::{Channel, Error, Listener, Peers, Result, Shared};
use pyo3::prelude::*;

use crate::args;
use crate::error::{OrRaise, ToPy};
use crate::interpreter::{Closing, PerProcess, closing, drop_detached, lock};
use crate::pickle::{part_of, shareable};
use crate::region::{Offered, Region};
use crate::tickets::answer_each;

/// How long a process may take to receive the memory.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most processes that receive it at a time; beyond that a connection is closed.
const MOST_AT_A_TIME: usize = 64;

/// Memory that is offered at a Unix socket until this object is closed or deleted. Made by `Memory.share`.
#[pyclass(extends = Closing, frozen, module = "egmem", name = "Offer")]
pub struct Offer {
    open: Arc<Open>,
    path: PathBuf,
}

/// An offer, until it ends or is dropped. A forked child ends nothing: the socket and its thread are the parent's.
struct Open {
    parts: Mutex<Option<Parts>>,
    driver: egmem::Driver,
}

/// Ends an offer when it is dropped.
pub struct Ends(Arc<Open>);

struct Parts {
    // In this order: the thread has ended before the socket's file is removed and the memory may be closed.
    thread: Option<JoinHandle<()>>,
    ended: Arc<AtomicBool>,
    listener: Arc<Listener>,
    _region: Offered,
}

/// The offers of this process, so that none leaves its socket at the end.
static OFFERS: PerProcess<Mutex<Vec<Weak<Open>>>> = PerProcess::new();

impl Open {
    /// Ends the offer: no process gets the memory any more, and the socket's file is gone.
    fn end(&self) {
        let parts = lock(&self.parts).take();
        match self.driver.is_of_this_process() {
            true => drop_detached(parts),
            false => std::mem::forget(parts),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.end();
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        self.listener.close();
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ = thread.join();
        }
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
        lock(&self.open.parts).is_none()
    }

    /// Ends the offer and removes the socket. Processes that have received the memory keep it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.open.driver.expect_this_process("offer").or_raise()?;
        py.detach(|| self.open.end());
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
        let thread = serve(Arc::clone(&listener), shared, access, Arc::clone(&ended))?;
        Ok::<_, Error>(Parts {
            thread: Some(thread),
            ended,
            listener,
            _region: Offered::new(region),
        })
    });
    let parts = Mutex::new(Some(parts.map_err(ToPy::to_py)?));
    let open = Arc::new(Open { parts, driver });
    let mut offers = lock(OFFERS.get(|_| Mutex::default()));
    offers.retain(|offer| offer.strong_count() > 0);
    offers.push(Arc::downgrade(&open));
    Py::new(py, closing(Offer { open, path }))
}

/// Starts the thread that sends the memory to each process that connects.
fn serve(
    listener: Arc<Listener>,
    shared: Shared,
    access: Access,
    ended: Arc<AtomicBool>,
) -> Result<JoinHandle<()>, Error> {
    let send = move |mut channel: Channel| {
        channel.set_timeout(PATIENCE);
        channel.send(&shared, access)
    };
    let serve = move || answer_each(|| listener.accept(), MOST_AT_A_TIME, &ended, send);
    let thread = std::thread::Builder::new().name("egmem-offers".into());
    thread
        .spawn(serve)
        .map_err(|error| egmem::Error::system("starting a thread for a socket", &error).into())
}

/// Ends this process's offers, so that their sockets are gone.
#[pyfunction]
#[pyo3(name = "_close_offers")]
pub fn close_offers(py: Python<'_>) {
    py.detach(|| {
        let offers = std::mem::take(&mut *lock(OFFERS.get(|_| Mutex::default())));
        offers
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|open| open.end());
    });
}
