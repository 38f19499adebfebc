//! `egmem.Stream`, and streams of other libraries.

use egmem::driver::{Driver as Native, StreamHandle};
use pyo3::prelude::*;

use crate::args::GpuArg;
use crate::device;
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, invalid};
use crate::event::Event;
use crate::interrupts;
use crate::region::expect_real;

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
        self.inner
            .driver()
            .expect_this_process("stream")
            .or_raise()?;
        interrupts::until(py, || match self.inner.is_done() {
            Ok(true) => Some(Ok(())),
            Ok(false) => None,
            // A driver that refuses the question may answer the wait.
            Err(_) => Some(self.inner.synchronize()),
        })?
        .or_raise()
    }

    /// Makes work submitted to the stream from now on wait for an event: for its last record before this call, by any process
    /// that has it. Returns at once.
    fn wait(&self, py: Python<'_>, event: &Bound<'_, Event>) -> PyResult<()> {
        let event = event.get().inner();
        py.detach(|| self.inner.wait(event)).or_raise()
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
    gpu: Option<i32>,
    usual: i32,
) -> PyResult<egmem::Stream> {
    if let Ok(own) = stream.cast::<Stream>() {
        return Ok(own.get().inner.clone());
    }
    let raw = if let Ok(raw) = stream.extract::<u64>() {
        raw
    } else if let Ok(told) = stream.call_method0("__cuda_stream__") {
        told.get_item(1)?.extract()?
    } else if let Ok(raw) = stream
        .getattr("cuda_stream")
        .or_else(|_| stream.getattr("ptr"))
    {
        raw.extract()?
    } else {
        return Err(invalid(&format!("{} is no stream", stream.repr()?)));
    };
    let told = |name| stream.getattr(name).and_then(|gpu| gpu.extract::<i32>());
    let told = told("device_index").or_else(|_| told("device_id"));
    // CuPy's default streams have -1: they are those of the current GPU.
    let told = told.ok().filter(|gpu| *gpu >= 0);
    if let (None, Some(gpu)) = (told, gpu) {
        device::expect_gpu(gpu, driver)?;
    }
    let gpu = told.or(gpu);
    let count = || stream.py().detach(|| driver.device_count()).or_raise();
    if gpu.is_none() && raw <= LAST_DEFAULT && count()? > 1 {
        return Err(invalid(&format!(
            "each GPU has a default stream {raw}; pass gpu= to say which"
        )));
    }
    foreign(driver, gpu.unwrap_or(usual), raw)
}

/// Handles up to this are default streams: 0 and 1 (`CU_STREAM_LEGACY`), and 2 (`CU_STREAM_PER_THREAD`).
const LAST_DEFAULT: u64 = 2;

/// Returns another library's stream by its handle, to use within the call.
///
/// # Errors
/// As [`given`].
pub fn foreign(driver: &Native, gpu: i32, raw: u64) -> PyResult<egmem::Stream> {
    expect_real(driver, "a stream of another library")?;
    let handle = StreamHandle { device: gpu, raw };
    // SAFETY: the caller of the Python function passes a live stream of that GPU, as with any CUDA call in Python,
    // and it is used only during this call.
    Ok(unsafe { egmem::Stream::borrowed(driver, handle) })
}
