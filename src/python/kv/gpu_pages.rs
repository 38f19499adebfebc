//! `egmem.kv.GpuPages`: where a serving engine's blocks lie.

use std::any::Any;

use egmem::driver::DevicePtr;
use egmem::kv::{self, PartShape};
use pyo3::prelude::*;

use crate::args::{Count, GpuArg, OneOrEach, Size};
use crate::error::{OrRaise, invalid};

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
    /// It keeps the owners of the memory.
    inner: kv::GpuPages,
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
        owner: impl Any + Send + Sync,
    ) -> PyResult<Self> {
        let part = |(base, stride, bytes)| (DevicePtr(base), PartShape { stride, bytes });
        let parts = parts.into_iter().map(part).collect();
        // SAFETY: the caller of the Python class names memory that has all blocks, and passes its owner, which this
        // object and every job keep; the stream of the copies orders them, and is the caller's or the one that the
        // arrays' library orders its own work by.
        let inner = unsafe { kv::GpuPages::from_raw_parts(parts, blocks) };
        let inner = inner.or_raise()?.keeping(owner);
        Ok(Self {
            inner: at.into_iter().fold(inner, |inner, at| inner.at(at.0)),
            arrays,
        })
    }
}

impl GpuPages {
    /// Returns the GPU of the arrays, if it is known.
    pub(super) fn gpu(&self) -> Option<GpuArg> {
        self.arrays.as_ref().map(|(gpu, _)| GpuArg(*gpu))
    }

    /// Returns the stream for copies that name none: the current one of the arrays' library.
    ///
    /// # Errors
    /// `InvalidArgument` for addresses, for arrays of a library whose stream is not known, and for another GPU than
    /// the arrays'; Python's errors.
    pub(super) fn current_stream<'py>(
        &self,
        py: Python<'py>,
        gpu: Option<GpuArg>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let given = match &self.arrays {
            Some((of_arrays, Some(library))) => {
                self.expect_gpu(gpu.map_or(*of_arrays, |gpu| gpu.0))?;
                let arrays = py.import("egmem._arrays")?;
                return arrays.call_method1("current_stream", (library, of_arrays));
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

    /// Returns the cache for copies on a stream of a GPU, which keep the stream's object.
    ///
    /// # Errors
    /// `InvalidArgument` for tensors on another GPU.
    pub(super) fn on(&self, device: i32, stream: &Bound<'_, PyAny>) -> PyResult<kv::GpuPages> {
        self.expect_gpu(device)?;
        Ok(self.inner.clone().keeping(stream.clone().unbind()))
    }
}

#[pymethods]
impl GpuPages {
    #[new]
    #[pyo3(signature = (bases, stride, part_bytes, blocks, *, at=None, keep=None))]
    fn new(
        bases: Vec<u64>,
        stride: OneOrEach<u64>,
        part_bytes: OneOrEach<u64>,
        blocks: Count,
        at: Option<Size>,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let strides = stride.each("stride", bases.len(), "base")?;
        let bytes = part_bytes.each("part_bytes", bases.len(), "base")?;
        let parts = bases.into_iter().zip(strides).zip(bytes);
        let parts = parts.map(|((base, stride), bytes)| (base, stride, bytes));
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
        let arrays = tensors.py().import("egmem._arrays")?;
        let found = arrays.call_method1("parts_of", (tensors, block_dim))?;
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
}
