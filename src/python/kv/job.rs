//! `egmem.kv.Job`: copies in progress.

use std::sync::{Mutex, OnceLock, TryLockError};

use egmem::kv::{self, CopyMethod, PageId};
use pyo3::prelude::*;

use crate::error::{OrRaise, invalid};
use crate::gil::drop_detached;
use crate::interrupts;

use super::gpu_pages::GpuPages;
use super::keys::numbers;

/// Copies in progress. It keeps the tier, its pages, the cache's tensors and the stream until they have ended; its
/// end waits. If the driver never reports their end, all of that is kept for ever.
#[pyclass(frozen, module = "egmem.kv")]
pub struct Job {
    /// Locked by a thread that asks for the end, or waits for it.
    copies: Mutex<Option<kv::Job>>,
    result: OnceLock<Result<(), kv::Error>>,
    driver: egmem::Driver,
    bytes: u64,
}

impl Job {
    /// Wraps a job, which keeps its memory alive.
    pub fn new(job: kv::Job) -> Self {
        Self {
            driver: job.stream().driver().clone(),
            bytes: job.bytes(),
            copies: Mutex::new(Some(job)),
            result: OnceLock::new(),
        }
    }

    /// Returns whether the copies have ended; `false` while another thread asks. With `waits` it waits after an error of the
    /// query: a driver that refuses the query may answer the wait. The caller has no GIL: other threads need it for their calls.
    fn ask(&self, waits: bool) -> Result<bool, kv::Error> {
        let result = self.result.get().cloned().or_else(|| {
            let mut copies = match self.copies.try_lock() {
                Ok(copies) => copies,
                Err(TryLockError::WouldBlock) => return None,
                Err(TryLockError::Poisoned(error)) => error.into_inner(),
            };
            let asked = match copies.as_mut().map(kv::Job::is_done) {
                Some(Ok(true)) => Ok(()),
                Some(Ok(false)) => return None,
                // The job stays: the query may have been refused while the copies run.
                Some(Err(error)) if !waits => return Some(Err(error)),
                Some(Err(_)) => copies.take().map_or(Ok(()), kv::Job::wait),
                // A thread that waited has panicked, or has the result by now.
                None => {
                    let lost = "the thread that waited for them panicked";
                    Err(egmem::Error::failed("copies", lost).into())
                }
            };
            *copies = None;
            Some(self.result.get_or_init(|| asked).clone())
        });
        result.map_or(Ok(false), |result| result.map(|()| true))
    }
}

impl Drop for Job {
    /// Waits without the GIL, which other threads may need for the copies to go on.
    fn drop(&mut self) {
        drop_detached(self.copies.get_mut().map_or(None, Option::take));
    }
}

#[pymethods]
impl Job {
    /// Returns whether the copies have ended; their pages are released then. Raises the error of the copies, at each
    /// call.
    fn is_done(&self, py: Python<'_>) -> PyResult<bool> {
        self.driver.expect_this_process("job").or_raise()?;
        py.detach(|| self.ask(false)).or_raise()
    }

    /// Waits until the copies have ended; other threads run meanwhile, and may wait too. Raises the error of the
    /// copies, at each call. A signal handler that raises ends the wait; the copies go on.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        self.driver.expect_this_process("job").or_raise()?;
        interrupts::until(py, || match self.ask(true) {
            Ok(false) => None,
            ended => Some(ended.map(drop)),
        })?
        .or_raise()
    }

    /// The bytes that are copied.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    fn __repr__(&self) -> String {
        let state = self.result.get().map_or("started", |_| "ended");
        format!("<egmem.kv.Job of {} bytes, {state}>", self.bytes)
    }
}

/// Starts copies of pages to blocks of a cache, or of blocks to pages, on a stream: the given one, or the current one of the
/// library of the cache's arrays.
///
/// # Errors
/// `InvalidArgument`; those of `Tier::load_by` and `store_by`; Python's.
pub fn start(
    py: Python<'_>,
    (tier, is_load): (&kv::Tier, bool),
    (pages, blocks): (&Bound<'_, PyAny>, &Bound<'_, PyAny>),
    gpu_pages: &Bound<'_, GpuPages>,
    (stream, gpu, method): (Option<&Bound<'_, PyAny>>, Option<i32>, &str),
) -> PyResult<Job> {
    let (pages, blocks) = (numbers(pages)?, numbers(blocks)?);
    if pages.len() != blocks.len() {
        let counts = format!("{} blocks for {} pages", blocks.len(), pages.len());
        return Err(invalid(&counts));
    }
    let method = copy_method(method)?;
    let cache = gpu_pages.get();
    let stream = match stream {
        Some(stream) => stream.clone(),
        None => cache.current_stream(py, gpu)?,
    };
    let on = crate::stream::given(tier.driver(), &stream, gpu.or(cache.gpu()), 0)?;
    // The job keeps the object, so the stream lives until the copies have ended.
    let layout = cache.on(on.device(), &stream)?;
    let ids = pages.into_iter().map(PageId::from_bits);
    let pairs: Vec<_> = ids.zip(blocks).collect();
    let job = py.detach(|| match is_load {
        true => tier.load_by(method, &on, &pairs, &layout),
        false => tier.store_by(method, &on, &pairs, &layout),
    });
    Ok(Job::new(job.or_raise()?))
}

/// Reads the name of a copy method.
///
/// # Errors
/// `InvalidArgument`.
fn copy_method(name: &str) -> PyResult<CopyMethod> {
    let mut words = name.split(':');
    let kind = words.next().unwrap_or_default();
    let numbers: Option<Vec<u32>> = words.map(|word| word.parse().ok()).collect();
    match (kind, numbers.as_deref()) {
        ("auto", Some([])) => Ok(CopyMethod::Auto),
        ("loop", Some([])) => Ok(CopyMethod::Loop),
        ("batch", Some([])) => Ok(CopyMethod::Batch),
        ("kernel", Some([])) => Ok(CopyMethod::KERNEL),
        ("kernel", Some(&[blocks])) => Ok(CopyMethod::Kernel { blocks }),
        _ => Err(invalid(&format!(
            "method is {name:?}; valid: \"auto\", \"kernel\", \"kernel:16\" (blocks), \"batch\", \"loop\""
        ))),
    }
}
