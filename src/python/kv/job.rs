//! `egmem.kv.Job`: copies in progress.

use std::sync::Mutex;

use egmem::kv;
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::region::{drop_detached, lock};

use super::gpu_pages::GpuPages;

/// Copies in progress. It keeps the tier, its pages, the cache's tensors and the stream until they have ended; its end waits.
#[pyclass(frozen, module = "egmem.kv")]
pub struct Job {
    /// `None` once the copies have ended.
    inner: Mutex<Option<kv::Job>>,
    bytes: u64,
    _keep: (Py<GpuPages>, Option<Py<PyAny>>),
}

impl Job {
    /// Wraps a job with what it needs.
    pub fn new(job: kv::Job, gpu: Py<GpuPages>, stream: Option<Py<PyAny>>) -> Self {
        Self {
            bytes: job.bytes(),
            inner: Mutex::new(Some(job)),
            _keep: (gpu, stream),
        }
    }
}

impl Drop for Job {
    /// Waits here, while the tensors and the stream still live.
    fn drop(&mut self) {
        let job = lock(&self.inner).take();
        drop_detached(job);
    }
}

#[pymethods]
impl Job {
    /// Returns whether the copies have ended; their pages are released then. Raises the error of the copies.
    fn is_done(&self) -> PyResult<bool> {
        let mut inner = lock(&self.inner);
        let Some(job) = inner.as_mut() else {
            return Ok(true);
        };
        let done = job.is_done().or_raise()?;
        if done {
            *inner = None;
        }
        Ok(done)
    }

    /// Waits until the copies have ended; other threads run meanwhile. Raises the error of the copies.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let Some(job) = lock(&self.inner).take() else {
            return Ok(());
        };
        py.detach(|| job.wait()).or_raise()
    }

    /// The bytes that are copied.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    fn __repr__(&self) -> String {
        let state = match *lock(&self.inner) {
            Some(_) => "started",
            None => "ended",
        };
        format!("<egmem.kv.Job of {} bytes, {state}>", self.bytes)
    }
}
