//! `egmem.Event`: points in streams' work, for other processes too.

use std::sync::Arc;

use egmem::driver::IpcEventHandle;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::GpuArg;
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, invalid};
use crate::interrupts;
use crate::pickle::pickled;
use crate::stream;
use crate::tickets::GRANTED;

/// A point in a stream's work. With `interprocess=True` it can be pickled: the other process's GPU work waits for it, and
/// the other way, with no CPU in between.
///
/// A pickled event exists until the processes that got it have deleted theirs or have ended. Keep it until they have
/// unpickled it.
#[pyclass(frozen, module = "egmem", name = "Event")]
pub struct Event {
    inner: Arc<egmem::Event>,
}

impl Event {
    /// Returns the Python object of an event.
    pub fn of(event: egmem::Event) -> Self {
        let inner = Arc::new(event);
        Self { inner }
    }

    pub fn inner(&self) -> &Arc<egmem::Event> {
        &self.inner
    }
}

#[pymethods]
impl Event {
    /// Creates an event on a GPU.
    #[new]
    #[pyo3(
        signature = (gpu=GpuArg(0), *, interprocess=false, driver=None),
        text_signature = "(gpu=0, *, interprocess=False, driver=None)"
    )]
    fn new(
        py: Python<'_>,
        gpu: GpuArg,
        interprocess: bool,
        driver: Option<&Bound<'_, Driver>>,
    ) -> PyResult<Self> {
        let driver = given_or_default(py, driver)?;
        let made = py.detach(|| match interprocess {
            true => egmem::Event::interprocess(&driver, gpu.0),
            false => egmem::Event::new(&driver, gpu.0, false),
        });
        Ok(Self::of(made.or_raise()?))
    }

    /// Opens another process's event by the 64 bytes of `cudaIpcEventHandle_t`, such as PyTorch's `Event.ipc_handle()`.
    ///
    /// That process keeps its event until this one is deleted: CUDA leaves undefined what calls do afterwards. An event that
    /// was pickled needs no such care.
    #[staticmethod]
    #[pyo3(signature = (gpu, handle, *, driver=None))]
    fn from_ipc_handle(
        py: Python<'_>,
        gpu: GpuArg,
        handle: &[u8],
        driver: Option<&Bound<'_, Driver>>,
    ) -> PyResult<Self> {
        let Ok(bytes) = <&[u8; 64]>::try_from(handle) else {
            return Err(invalid(&format!(
                "a handle of {} bytes; valid: 64",
                handle.len()
            )));
        };
        let driver = given_or_default(py, driver)?;
        let handle = IpcEventHandle::from_bytes(bytes);
        // SAFETY: the caller of the Python function sees to it that the other process keeps its event, as documented.
        let opened = py.detach(|| unsafe { egmem::Event::import(&driver, gpu.0, &handle, None) });
        Ok(Self::of(opened.or_raise()?))
    }

    /// The 64 bytes by which another process opens the event, for code other than egmem's: PyTorch's
    /// `Event.from_ipc_handle(device, handle)`. Keep this event until that process has deleted its own.
    ///
    /// They let any process that has them record the event: treat them as a secret.
    fn ipc_handle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        // SAFETY: the caller of the Python function keeps the event, as documented.
        let handle = py.detach(|| unsafe { self.inner.export() }).or_raise()?;
        Ok(PyBytes::new(py, handle.expose_bytes()))
    }

    /// The GPU's ordinal.
    #[getter]
    fn gpu(&self) -> i32 {
        self.inner.handle().device
    }

    /// The driver's handle: a `CUevent`.
    #[getter]
    fn handle(&self) -> u64 {
        self.inner.handle().raw
    }

    /// Whether another process made it.
    #[getter]
    fn imported(&self) -> bool {
        self.inner.is_imported()
    }

    /// Marks the work submitted to a stream so far: an `egmem.Stream`, or another library's.
    fn record(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let stream = stream::given(self.inner.driver(), stream, None, self.gpu())?;
        py.detach(|| self.inner.record(&stream)).or_raise()
    }

    /// Returns whether the marked work is done; `True` if the event was never recorded.
    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.inner.is_done()).or_raise()
    }

    /// Waits until the marked work is done. A signal handler that raises ends the wait. Raises if the event is of a process
    /// that has ended before its work.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let driver = self.inner.driver();
        driver.expect_this_process("event").or_raise()?;
        interrupts::until(py, || match self.inner.is_done() {
            Ok(true) => Some(Ok(())),
            Ok(false) => None,
            // A driver that refuses the question may answer the wait.
            Err(_) => Some(self.inner.synchronize()),
        })?
        .or_raise()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if !self.inner.is_interprocess() {
            return Err(PyTypeError::new_err(
                "this Event cannot be sent to another process: it was made without interprocess=True, or by another \
                 process; what to do: make it with egmem.Event(interprocess=True)",
            ));
        }
        let (of, driver) = ((&self.inner, None), self.inner.driver());
        pickled(py, "event", of, driver, |channel, event| {
            channel.send_text(GRANTED)?;
            channel.send_event(&event)
        })
    }

    fn __repr__(&self) -> String {
        format!("<egmem.Event {:#x} on GPU {}>", self.handle(), self.gpu())
    }
}
