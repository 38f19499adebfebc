//! `egmem.Stream` and `egmem.Event`, and streams of other libraries.

use std::sync::Arc;

use egmem::driver::{Driver as Native, IpcEventHandle, StreamHandle};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::{GpuArg, expect_gpu};
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, invalid, not_supported};
use crate::interpreter::{call, not_copied, until};
use crate::pickle::{GRANTED, pickled};

/// A stream of a GPU. Other libraries take it by `__cuda_stream__`.
#[pyclass(frozen, module = "egmem", name = "Stream")]
pub struct Stream {
    inner: egmem::Stream,
}

#[pymethods]
impl Stream {
    /// Creates a stream on a GPU.
    #[new]
    #[pyo3(signature = (gpu=GpuArg(0), *, driver=None), text_signature = "(gpu=0, *, driver=None)")]
    fn new(py: Python<'_>, gpu: GpuArg, driver: Option<&Bound<'_, Driver>>) -> PyResult<Self> {
        let driver = given_or_default(py, driver)?;
        let inner = py
            .detach(|| egmem::Stream::new(&driver, gpu.0))
            .or_raise()?;
        Ok(Self { inner })
    }

    /// The GPU's ordinal.
    #[getter]
    fn gpu(&self) -> i32 {
        self.inner.device()
    }

    /// The driver's handle: a `CUstream`.
    #[getter]
    fn handle(&self) -> u64 {
        self.inner.handle().raw
    }

    /// Waits until all work on the stream is done. A signal handler that raises ends the wait; the work goes on.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let stream = self.here()?;
        wait_for(py, || stream.is_done(), || stream.synchronize())
    }

    /// Makes work submitted to the stream from now on wait for an event: for its last record before this call, by any process
    /// that has it. Returns at once.
    fn wait(&self, py: Python<'_>, event: &Bound<'_, Event>) -> PyResult<()> {
        let (stream, event) = (self.here()?, &event.get().inner);
        py.detach(|| stream.wait(event)).or_raise()
    }

    /// CUDA's stream protocol: version and handle.
    fn __cuda_stream__(&self) -> (u32, u64) {
        (0, self.inner.handle().raw)
    }

    fn __repr__(&self) -> String {
        format!(
            "<egmem.Stream {:#x} on GPU {}>",
            self.inner.handle().raw,
            self.inner.device()
        )
    }
}

impl Stream {
    /// Returns the stream, in the process that made it.
    fn here(&self) -> PyResult<&egmem::Stream> {
        let driver = self.inner.driver();
        driver.expect_this_process("stream").or_raise()?;
        Ok(&self.inner)
    }
}

/// Asks until GPU work is done. A driver that refuses the question may answer the wait.
fn wait_for(
    py: Python<'_>,
    is_done: impl Fn() -> egmem::Result<bool> + Sync,
    wait: impl Fn() -> egmem::Result<()> + Sync,
) -> PyResult<()> {
    let ask = || match is_done() {
        Ok(true) => Some(Ok(())),
        Ok(false) => None,
        Err(_) => Some(wait()),
    };
    until(py, ask)?.or_raise()
}

/// Returns the stream behind an argument: an `egmem.Stream`; an object with `__cuda_stream__`, `cuda_stream`
/// (PyTorch) or `ptr` (CuPy); or a handle. It may be used only within the call, because others own it.
///
/// Its GPU is the object's (`device_index`, `device_id`), or `gpu`, or else `usual`.
///
/// # Errors
/// `InvalidArgument` for anything else, and for a default stream whose GPU is unknown where there are several;
/// `NoSuchPlace` for a `gpu` that the machine does not have; `NotSupported` for another library's stream under a
/// simulated driver.
pub fn given(
    driver: &Native,
    stream: &Bound<'_, PyAny>,
    gpu: Option<GpuArg>,
    usual: i32,
) -> PyResult<egmem::Stream> {
    driver.expect_this_process("stream").or_raise()?;
    if let Ok(own) = stream.cast::<Stream>() {
        return Ok(own.get().inner.clone());
    }
    let handle = call(stream.py(), "egmem._arrays", "handle_of", (stream,))?;
    let (raw, told): (u64, Option<i32>) = handle.extract()?;
    let gpu = gpu.map(|gpu| gpu.0);
    if let (None, Some(gpu)) = (told, gpu) {
        expect_gpu(gpu, driver)?;
    }
    let gpu = told.or(gpu);
    let count = || stream.py().detach(|| driver.device_count()).or_raise();
    if gpu.is_none() && raw <= StreamHandle::PER_THREAD && count()? > 1 {
        return Err(invalid(&format!(
            "each GPU has a default stream {raw}; pass gpu= to say which"
        )));
    }
    foreign(driver, gpu.unwrap_or(usual), raw)
}

/// Returns another library's stream by its handle, to use within the call.
///
/// # Errors
/// As [`given`].
pub fn foreign(driver: &Native, gpu: i32, raw: u64) -> PyResult<egmem::Stream> {
    if driver.is_simulated() {
        let message = "a stream of another library is no stream of a simulated driver";
        return Err(not_supported(message, "use egmem.Stream"));
    }
    let handle = StreamHandle { device: gpu, raw };
    // SAFETY: the caller of the Python function passes a live stream of that GPU, as with any CUDA call in Python,
    // and it is used only during this call.
    Ok(unsafe { egmem::Stream::borrowed(driver, handle) })
}

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

    /// Returns the event, in the process that made it.
    fn here(&self) -> PyResult<&egmem::Event> {
        let driver = self.inner.driver();
        driver.expect_this_process("event").or_raise()?;
        Ok(&self.inner)
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
        let event = self.here()?;
        // SAFETY: the caller of the Python function keeps the event, as documented.
        let handle = py.detach(|| unsafe { event.export() }).or_raise()?;
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
        let stream = given(self.inner.driver(), stream, None, self.gpu())?;
        py.detach(|| self.inner.record(&stream)).or_raise()
    }

    /// Returns whether the marked work is done; `True` if the event was never recorded.
    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        let event = self.here()?;
        py.detach(|| event.is_done()).or_raise()
    }

    /// Waits until the marked work is done. A signal handler that raises ends the wait. Raises if the event is of a process
    /// that has ended before its work.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let event = self.here()?;
        wait_for(py, || event.is_done(), || event.synchronize())
    }

    fn __copy__(slf: &Bound<'_, Self>) -> PyResult<()> {
        not_copied(slf)
    }

    fn __deepcopy__(slf: &Bound<'_, Self>, _memo: &Bound<'_, PyAny>) -> PyResult<()> {
        not_copied(slf)
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
