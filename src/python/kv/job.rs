//! `egmem.kv.Job`: copies in progress.

use egmem::kv::{self, CopyMethod};
use pyo3::prelude::*;

use crate::error::{OrRaise, invalid};
use crate::gil::drop_detached;
use crate::interrupts;

use super::once::Once;

/// Copies in progress. It keeps the tier, its pages, the cache's tensors and the stream until they have ended; its
/// end waits. If the driver never reports their end, all of that is kept for ever.
#[pyclass(frozen, module = "egmem.kv")]
pub struct Job {
    copies: Once<kv::Job, Result<(), kv::Error>>,
    driver: egmem::Driver,
    bytes: u64,
}

impl Job {
    /// Wraps a job, which keeps its memory alive.
    pub fn new(job: kv::Job) -> Self {
        let lost = egmem::Error::failed("copies", "the thread that waited for them panicked");
        Self {
            driver: job.stream().driver().clone(),
            bytes: job.bytes(),
            copies: Once::new(job, Err(lost.into())),
        }
    }

    /// Returns whether the copies have ended. The caller has no GIL: other threads need it for their calls.
    fn ask(&self) -> Result<bool, kv::Error> {
        // After an error the job stays: the query may have been refused while the copies run.
        let ask = |job: &mut kv::Job| Ok::<_, kv::Error>(job.is_done()?.then_some(Ok(())));
        match self.copies.poll(ask)? {
            Some(result) => result.map(|()| true),
            None => Ok(false),
        }
    }
}

impl Drop for Job {
    /// Waits without the GIL, which other threads may need for the copies to go on.
    fn drop(&mut self) {
        drop_detached(self.copies.take());
    }
}

#[pymethods]
impl Job {
    /// Returns whether the copies have ended; their pages are released then. Raises the error of the copies, at each
    /// call.
    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        self.driver.expect_this_process("job").or_raise()?;
        py.detach(|| self.ask()).or_raise()
    }

    /// Waits until the copies have ended; other threads run meanwhile, and may wait too. Raises the error of the
    /// copies, at each call. A signal handler that raises ends the wait; the copies go on.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.driver.expect_this_process("job").or_raise()?;
        interrupts::until(py, || match self.ask() {
            Ok(true) => Some(Ok(())),
            Ok(false) => None,
            // The copies' error, or a driver that refuses the question and may answer the wait.
            Err(_) => Some(self.copies.wait(kv::Job::wait)),
        })?
        .or_raise()
    }

    /// The bytes that are copied.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let is_over = py.detach(|| self.copies.is_over());
        let state = if is_over { "ended" } else { "started" };
        format!("<egmem.kv.Job of {} bytes, {state}>", self.bytes)
    }
}

/// Reads the name of a copy method.
///
/// # Errors
/// `InvalidArgument`.
pub fn copy_method(name: &str) -> PyResult<CopyMethod> {
    let mut words = name.split(':');
    let kind = words.next().unwrap_or_default();
    let numbers: Option<Vec<u32>> = words.map(|word| word.parse().ok()).collect();
    match (kind, numbers.as_deref()) {
        ("auto", Some([])) => Ok(CopyMethod::Auto),
        ("loop", Some([])) => Ok(CopyMethod::Loop),
        ("batch", Some([])) => Ok(CopyMethod::Batch),
        ("kernel", Some([])) => Ok(CopyMethod::KERNEL),
        ("kernel", Some(&[blocks])) => Ok(CopyMethod::Kernel { blocks }),
        ("bulk", Some([])) => Ok(CopyMethod::BULK),
        ("bulk", Some(&[blocks])) => Ok(CopyMethod::BULK.with_blocks(blocks)),
        ("bulk", Some(&[blocks, chunk])) => Ok(CopyMethod::Bulk { blocks, chunk }),
        _ => Err(invalid(&format!(
            "method is {name:?}; valid: \"auto\", \"kernel\", \"kernel:16\", \"bulk\", \"bulk:8\", \"bulk:8:1024\" (blocks and bytes of a \
             copy), \"batch\", \"loop\""
        ))),
    }
}
