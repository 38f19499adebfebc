//! Memory that goes back once no GPU can use it.
//!
//! Python programs delete objects while GPUs still work on them, in any thread and at any time: also while another
//! thread captures a stream into a graph, which a wait for the GPU would make invalid. Such memory is kept here until
//! a wait is possible. In doubt it stays: memory that is freed too early costs the GPU's context, or another object's
//! bytes.
//!
//! **Lifetime.** A caller of [`free_after_gpus`] hands over the owner of the memory. The owner is dropped after a
//! wait for all GPUs that began later: in the same call, or in the next call of [`free_after_gpus`], by [`retry`] at
//! an allocation, at the end of the last [`hold`], or by `egmem.free_deferred`. A static list keeps it until then; at
//! the process's end the list is not dropped. A forked child has an empty list, and drops nothing of the parent's.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use egmem::driver::{Code, Driver, StreamHandle};
use egmem::{Error, Stream};
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;

use crate::error::{OrRaise, ToPy, raise, warn};
use crate::holds::Holds;
use crate::interpreter::{PerProcess, lock, python};

/// Memory that waits for GPUs.
struct Kept {
    driver: Driver,
    bytes: u64,
    _memory: Box<dyn Send>,
}

/// Returns whether the work has ended; it owns the memory.
type IsOver = Box<dyn FnMut() -> bool + Send>;

#[derive(Default)]
struct Frees {
    /// Captures that callers report: they begin after waits.
    holds: Holds,
    kept: Mutex<Vec<Kept>>,
    /// Why a driver refused a wait, until a warning reports it.
    refused: Mutex<Option<String>>,
    /// Work that keeps its own memory, and how much of it there is.
    works: Mutex<Vec<IsOver>>,
    running: AtomicUsize,
}

static FREES: PerProcess<Frees> = PerProcess::new();

/// The number of kept objects: with 0, no call searches for them. A forked child has the parent's number until its
/// first search.
static COUNT: AtomicU64 = AtomicU64::new(0);

fn frees() -> &'static Frees {
    FREES.get(|_| Frees::default())
}

impl Frees {
    /// Waits for the GPUs, unless a capture is under way.
    fn wait(&self, driver: &Driver) -> Result<(), NotWaited> {
        let waited = self.holds.wait(|| wait(driver));
        waited.unwrap_or(Err(NotWaited::Capture))
    }

    fn keep(&self, memory: impl IntoIterator<Item = Kept>) {
        let mut kept = lock(&self.kept);
        kept.extend(memory);
        COUNT.store(kept.len() as u64, Relaxed);
    }

    /// Takes the memory that waits for a driver's GPUs.
    fn take(&self, driver: &Driver) -> Vec<Kept> {
        let mut kept = lock(&self.kept);
        let of_driver = |memory: &mut Kept| memory.driver.same(driver);
        let taken = kept.extract_if(.., of_driver).collect();
        COUNT.store(kept.len() as u64, Relaxed);
        taken
    }

    fn note(&self, why: &NotWaited) {
        match why {
            NotWaited::Capture => tracing::debug!("memory is kept until a capture has ended"),
            NotWaited::Driver(error) => {
                tracing::warn!(%error, "memory is kept, because a GPU may use it");
                *lock(&self.refused) = Some(error.to_string());
            }
        }
    }

    fn retry(&self, driver: &Driver) {
        if self.holds.is_held() {
            return;
        }
        let taken = self.take(driver);
        match self.wait(driver) {
            Ok(()) => drop(taken),
            Err(_) => self.keep(taken),
        }
    }
}

/// Drops the owner of `bytes` bytes of a driver's memory once all GPU work submitted so far has ended: in this call
/// if a wait is possible. In a forked child nothing is dropped. The caller has no lock that a drop of memory takes,
/// and no GIL, which the GPUs' work may need.
pub fn free_after_gpus(driver: &Driver, bytes: u64, memory: impl Send + 'static) {
    if !driver.is_of_this_process() {
        std::mem::forget(memory);
        return;
    }
    let frees = frees();
    if frees.holds.is_held() {
        return free_later(driver, bytes, memory);
    }
    let earlier = match COUNT.load(Relaxed) {
        0 => Vec::new(),
        _ => frees.take(driver),
    };
    match frees.wait(driver) {
        Ok(()) => {
            drop(memory);
            drop(earlier);
        }
        Err(why) => {
            frees.note(&why);
            frees.keep(earlier);
            free_later(driver, bytes, memory);
        }
    }
}

/// As [`free_after_gpus`], for a caller that knows of a capture: waits for nothing in this call.
pub fn free_later(driver: &Driver, bytes: u64, memory: impl Send + 'static) {
    let kept = Kept {
        driver: driver.clone(),
        bytes,
        _memory: Box::new(memory),
    };
    frees().keep([kept]);
}

/// Waits for the GPUs, without the GIL.
///
/// # Errors
/// `NotReady` while a stream is captured; the driver's errors.
pub fn wait_for_gpus(py: Python<'_>, driver: &Driver) -> PyResult<()> {
    py.detach(|| frees().wait(driver)).or_raise()
}

/// Frees the kept memory of a driver, if the GPUs can be waited for now.
pub fn free_deferred_of(driver: &Driver) {
    if COUNT.load(Relaxed) > 0 {
        frees().retry(driver);
    }
}

/// As [`free_deferred_of`], at an allocation of Python's, without the GIL. A `RuntimeWarning` reports a driver that
/// refused a wait.
///
/// # Errors
/// The warning, where the program has warnings raised.
pub fn retry(py: Python<'_>, driver: &Driver) -> PyResult<()> {
    sweep(py);
    if COUNT.load(Relaxed) == 0 || !driver.is_of_this_process() {
        return Ok(());
    }
    py.detach(|| free_deferred_of(driver));
    let refused = lock(&frees().refused).take();
    let Some(refused) = refused else {
        return Ok(());
    };
    let bytes = deferred().1;
    if bytes == 0 {
        return Ok(());
    }
    let text =
        format!("{bytes} bytes of egmem's memory are kept, because a GPU may use them: {refused}");
    warn::<PyRuntimeWarning>(py, &text)
}

/// Has PyTorch report its captures, if it is loaded: it may take memory whose address is given away, without an
/// import of `egmem.torch`.
pub fn watch_captures(py: Python<'_>) -> PyResult<()> {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.load(Relaxed) {
        return Ok(());
    }
    // At the interpreter's end modules are gone.
    let Ok(captures) = py.import("egmem._captures") else {
        return Ok(());
    };
    let watched = python(py, || captures.call_method0("watch_torch"))?.extract()?;
    WATCHED.store(watched, Relaxed);
    Ok(())
}

/// Keeps memory from now on instead of waiting for GPUs, until [`release`]. Returns after waits that are under way.
#[pyfunction]
#[pyo3(name = "_hold_frees")]
pub fn hold(py: Python<'_>) {
    py.detach(|| frees().holds.begin());
}

/// Ends one [`hold`]. The end of the last one frees the kept memory.
#[pyfunction]
#[pyo3(name = "_release_frees")]
pub fn release(py: Python<'_>) {
    py.detach(|| {
        if frees().holds.end() {
            free_kept();
        }
    });
}

fn free_kept() {
    let frees = frees();
    let mut drivers: Vec<Driver> = Vec::new();
    for memory in &*lock(&frees.kept) {
        if !drivers.iter().any(|driver| driver.same(&memory.driver)) {
            drivers.push(memory.driver.clone());
        }
    }
    for driver in drivers {
        frees.retry(&driver);
    }
}

/// Returns how much memory waits until GPUs can be waited for: the number of objects, and their bytes.
///
/// Memory whose address was given away waits for the GPUs when its last view ends. While a stream is captured into a
/// CUDA graph that wait is not made: the memory is freed later.
#[pyfunction]
pub fn deferred() -> (u64, u64) {
    let kept = lock(&frees().kept);
    let bytes = kept.iter().map(|memory| memory.bytes).sum();
    (kept.len() as u64, bytes)
}

/// Frees the memory that `deferred` counts, unless a stream is being captured; returns the bytes that still wait.
#[pyfunction]
pub fn free_deferred(py: Python<'_>) -> u64 {
    py.detach(free_kept);
    deferred().1
}

/// Why it is unknown whether the GPUs have ended their work.
#[derive(Debug)]
pub enum NotWaited {
    /// A stream is being captured into a graph: the wait would make the capture invalid.
    Capture,
    /// The driver refuses the wait.
    Driver(Error),
}

impl ToPy for NotWaited {
    fn to_py(self) -> PyErr {
        match self {
            Self::Capture => raise(
                "NotReady",
                "the GPUs cannot be waited for while a stream is being captured into a graph",
                "call it again after the capture",
            ),
            Self::Driver(error) => error.to_py(),
        }
    }
}

/// Waits until every GPU on which this process has a context has done all work submitted so far.
///
/// A GPU without a context has no work, and waiting for it would create one. `cuCtxSynchronize` makes captures of the
/// context's streams invalid, so it is not called during captures that the driver reports: those of streams that the
/// legacy default stream waits for. The caller knows of no other capture, and has no GIL, because a GPU's work may
/// need it.
///
/// # Errors
/// [`NotWaited`]: a GPU may still work.
pub fn wait(driver: &Driver) -> Result<(), NotWaited> {
    let count = driver.device_count().map_err(NotWaited::Driver)?;
    let used = || (0..count).filter(|gpu| driver.has_context(*gpu) != Some(false));
    for gpu in used() {
        let raw = 0;
        // SAFETY: each context has the legacy default stream, and it is only asked about within this call.
        let default = unsafe { Stream::borrowed(driver, StreamHandle { device: gpu, raw }) };
        match ended(default.is_capturing().map(drop)) {
            Err(error) if error.code() == Some(Code::STREAM_CAPTURE_IMPLICIT) => {
                return Err(NotWaited::Capture);
            }
            result => result.map_err(NotWaited::Driver)?,
        }
    }
    for gpu in used() {
        match ended(driver.ctx_synchronize(gpu)) {
            // A capture that was not reported. It is invalid now.
            Err(error) if error.code() == Some(Code::STREAM_CAPTURE_UNSUPPORTED) => {
                return Err(NotWaited::Capture);
            }
            result => result.map_err(NotWaited::Driver)?,
        }
    }
    Ok(())
}

/// A lost context runs no work.
fn ended(result: egmem::Result<()>) -> egmem::Result<()> {
    match result {
        Err(Error::ContextLost { .. }) => Ok(()),
        result => result,
    }
}

/// Keeps what `is_over` owns until it has returned `true`.
pub fn keep_while_running(is_over: impl FnMut() -> bool + Send + 'static) {
    let frees = frees();
    let mut works = lock(&frees.works);
    works.push(Box::new(is_over));
    frees.running.store(works.len(), Relaxed);
}

/// Drops the memory of work that has ended, without the GIL.
pub fn sweep(py: Python<'_>) {
    let frees = frees();
    if frees.running.load(Relaxed) == 0 {
        return;
    }
    py.detach(|| {
        let mut works = lock(&frees.works);
        let ended: Vec<_> = works.extract_if(.., |is_over| is_over()).collect();
        frees.running.store(works.len(), Relaxed);
        drop(works);
        drop(ended);
    });
}
