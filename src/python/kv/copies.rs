//! `egmem.kv.GpuPages`, where a serving engine's blocks lie, and `egmem.kv.Job`, copies between them and pages.

use std::sync::{Mutex, OnceLock, PoisonError, TryLockError};

use egmem::driver::DevicePtr;
use egmem::kv::{self, CopyMethod, PageId, PartShape};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::args::{Count, GpuArg, List, OneOrEach, Size};
use crate::error::{OrRaise, invalid};
use crate::interpreter::{call, drop_detached, until};

/// A serving engine's cache on a GPU: parts, for instance the keys and the values of each layer, each with a piece of
/// every block. Block `b` of a part is at its base plus `b * stride`, and has `part_bytes` there. A page of the tier
/// has the pieces of one block side by side, in the parts' order.
///
/// `bases` are addresses, `stride` and `part_bytes` bytes: a number for all parts, or a sequence with one for each.
/// `blocks` is how many there are. With `at` a block is the part of a page that begins at this offset, in bytes: the
/// caches of the ranks of a tensor-parallel engine share the pages. Kernels need a multiple of 16. `keep` is an object that owns the memory: it lives as long as this object and its
/// jobs. The addresses must be valid: others crash the process, or the GPU. Copies of a cache that is given as
/// addresses need `stream=`.
///
/// A part may lie in several allocations of a GPU side by side, as in PyTorch's expandable segments. They stay mapped
/// as they are while this object and its jobs live. Batches of copies end at their borders, for which the driver is
/// asked once. If a driver refuses a batch all the same, the default method copies one by one, and `method="batch"`
/// raises `DriverError`.
#[pyclass(frozen, module = "egmem.kv")]
pub struct GpuPages {
    inner: kv::GpuPages,
    /// The owner of the memory, which may have this object: `__traverse__`.
    owner: Py<PyAny>,
    /// Of arrays, not of addresses.
    arrays: Option<Arrays>,
}

/// The GPU of a cache's arrays, and the library whose current stream orders copies, if it is known.
type Arrays = (i32, Option<String>);

impl GpuPages {
    /// # Errors
    /// Those of `kv::GpuPages::from_raw_parts`.
    fn of(
        parts: impl IntoIterator<Item = (u64, u64, u64)>,
        blocks: u64,
        arrays: Option<Arrays>,
        at: Option<Size>,
        owner: Py<PyAny>,
    ) -> PyResult<Self> {
        let part = |(base, stride, bytes)| (DevicePtr(base), PartShape { stride, bytes });
        let parts = parts.into_iter().map(part).collect();
        // SAFETY: the caller of the Python class names memory that has all blocks, and passes its owner, which this
        // object keeps and `on` gives to every job; the stream of the copies orders them, and is the caller's or the one that the
        // arrays' library orders its own work by.
        let inner = unsafe { kv::GpuPages::from_raw_parts(parts, blocks) };
        let inner = inner.or_raise()?;
        Ok(Self {
            inner: at.into_iter().fold(inner, |inner, at| inner.at(at.0)),
            owner,
            arrays,
        })
    }
}

impl GpuPages {
    /// Returns the GPU of the arrays, if it is known.
    fn gpu(&self) -> Option<GpuArg> {
        self.arrays.as_ref().map(|(gpu, _)| GpuArg(*gpu))
    }

    /// Returns the stream for copies that name none: the current one of the arrays' library.
    ///
    /// # Errors
    /// `InvalidArgument` for addresses, for arrays of a library whose stream is not known, and for another GPU than
    /// the arrays'; Python's errors.
    fn current_stream<'py>(
        &self,
        py: Python<'py>,
        gpu: Option<GpuArg>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let given = match &self.arrays {
            Some((of_arrays, Some(library))) => {
                self.expect_gpu(gpu.map_or(*of_arrays, |gpu| gpu.0))?;
                let of_library = (library, of_arrays);
                return call(py, "egmem._arrays", "current_stream", of_library);
            }
            Some((_, None)) => "arrays of another library than PyTorch and CuPy",
            None => "addresses",
        };
        Err(invalid(&format!(
            "stream is not given, and the cache was given as {given}: pass stream=, the stream whose work the copies \
             are to follow"
        )))
    }

    /// # Errors
    /// `InvalidArgument` if the arrays are on another GPU.
    fn expect_gpu(&self, device: i32) -> PyResult<()> {
        match self.gpu() {
            Some(GpuArg(gpu)) if gpu != device => Err(invalid(&format!(
                "the cache's tensors are on GPU {gpu}, and the stream is of GPU {device}"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the cache for copies on a stream of a GPU, which keep the memory's owner and the stream's object.
    ///
    /// # Errors
    /// `InvalidArgument` for tensors on another GPU.
    fn on(&self, device: i32, stream: &Bound<'_, PyAny>) -> PyResult<kv::GpuPages> {
        self.expect_gpu(device)?;
        let owners = (self.owner.clone_ref(stream.py()), stream.clone().unbind());
        Ok(self.inner.clone().keeping(owners))
    }
}

#[pymethods]
impl GpuPages {
    #[new]
    #[pyo3(signature = (bases, stride, part_bytes, blocks, *, at=None, keep=None))]
    fn new(
        py: Python<'_>,
        bases: List<u64>,
        stride: OneOrEach<u64>,
        part_bytes: OneOrEach<u64>,
        blocks: Count,
        at: Option<Size>,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let strides = stride.each("stride", bases.0.len(), "base")?;
        let bytes = part_bytes.each("part_bytes", bases.0.len(), "base")?;
        let parts = bases.into_iter().zip(strides).zip(bytes);
        let parts = parts.map(|((base, stride), bytes)| (base, stride, bytes));
        let keep = keep.unwrap_or_else(|| py.None());
        Self::of(parts, blocks.0, None, at, keep)
    }

    /// Describes tensors of PyTorch, or arrays of CuPy, on one GPU, which may have different shapes and types and have
    /// as many blocks as each other. The arrays that `tensors` has now are kept, even if the list changes later. They
    /// may lie in PyTorch's expandable segments.
    ///
    /// Dimension `block_dim` of each counts the blocks. In the dimensions behind it a block's elements are contiguous,
    /// in any order of these dimensions: an array may be stored permuted, and pages have the bytes in the order in
    /// which they are stored. Each index in the dimensions before it is a part of its own: `block_dim=1` is for arrays of
    /// `(2, blocks, ...)`, such as FlashAttention's keys and values. Without `block_dim` the first dimension counts the
    /// blocks, and arrays of three dimensions or more whose first one is 2 are refused, because either may be meant.
    /// `at` is as for `GpuPages`.
    #[staticmethod]
    #[pyo3(signature = (tensors, *, block_dim=None, at=None))]
    fn from_tensors(
        tensors: &Bound<'_, PyAny>,
        block_dim: Option<usize>,
        at: Option<Size>,
    ) -> PyResult<Self> {
        let arguments = (tensors, block_dim);
        let found = call(tensors.py(), "egmem._arrays", "parts_of", arguments)?;
        type Found = (Vec<(u64, u64, u64)>, u64, i32, Option<String>, Py<PyAny>);
        let (parts, blocks, gpu, library, kept): Found = found.extract()?;
        Self::of(parts, blocks, Some((gpu, library)), at, kept)
    }

    /// The number of blocks.
    #[getter]
    fn blocks(&self) -> u64 {
        self.inner.blocks()
    }

    /// The number of parts.
    #[getter]
    fn parts(&self) -> usize {
        self.inner.parts()
    }

    /// The bytes of a block in all parts: without `at`, those of a page.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.inner.block_bytes()
    }

    fn __repr__(&self) -> String {
        format!(
            "<egmem.kv.GpuPages of {} blocks of {} bytes in {} part(s)>",
            self.inner.blocks(),
            self.inner.block_bytes(),
            self.inner.parts()
        )
    }

    /// Jobs have references of their own, which no collection counts: it takes no memory of copies that run.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.owner)
    }
}

/// Copies in progress. It keeps the tier, its pages, the cache's tensors and the stream until they have ended; its
/// end waits. If the driver never reports their end, all of that is kept for ever.
#[pyclass(frozen, module = "egmem.kv")]
pub struct Job {
    /// Locked by a thread that asks for the end, or waits for it.
    copies: Mutex<Option<kv::Job>>,
    result: OnceLock<Result<(), kv::Error>>,
    driver: egmem::Driver,
    /// The bytes that are copied.
    #[pyo3(get)]
    nbytes: u64,
}

impl Job {
    /// Wraps a job, which keeps its memory alive.
    pub fn new(job: kv::Job) -> Self {
        Self {
            driver: job.stream().driver().clone(),
            nbytes: job.bytes(),
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
        let copies = self.copies.get_mut();
        drop_detached(copies.unwrap_or_else(PoisonError::into_inner).take());
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
        until(py, || match self.ask(true) {
            Ok(false) => None,
            ended => Some(ended.map(drop)),
        })?
        .or_raise()
    }

    fn __repr__(&self) -> String {
        let state = self.result.get().map_or("started", |_| "ended");
        format!("<egmem.kv.Job of {} bytes, {state}>", self.nbytes)
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
    (stream, gpu, method): (Option<&Bound<'_, PyAny>>, Option<GpuArg>, &str),
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

/// Reads a list or another sequence of numbers. A NumPy array is read as a whole, without a Python object for each
/// number.
///
/// # Errors
/// `InvalidArgument` for an array of another kind; Python's errors for an object that is no sequence of numbers
/// from 0 on.
fn numbers(given: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    if !given.hasattr("astype")? {
        let List::<Count>(numbers) = given.extract()?;
        return Ok(numbers.into_iter().map(|number| number.0).collect());
    }
    // A negative number becomes one that no tier and no cache has.
    let words = call(given.py(), "egmem._arrays", "words", (given,))?;
    let words: PyBackedBytes = words.extract()?;
    let (words, _) = words.as_chunks();
    Ok(words.iter().copied().map(u64::from_le_bytes).collect())
}
