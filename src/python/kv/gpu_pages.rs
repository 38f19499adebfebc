//! `egmem.kv.GpuPages`: where a serving engine's blocks lie.

use std::any::Any;

use egmem::driver::DevicePtr;
use egmem::kv::{self, PartShape};
use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;

use crate::args::{Count, GpuArg, OneOrEach, Size};
use crate::error::{OrRaise, invalid};
use crate::stream::Library;

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
    /// The GPU of all parts, and the library whose current stream orders copies. Unknown for addresses.
    arrays: Option<(i32, Option<Library>)>,
}

impl GpuPages {
    /// # Errors
    /// Those of `kv::GpuPages::from_raw_parts`.
    fn of(
        parts: Vec<(DevicePtr, PartShape)>,
        blocks: u64,
        arrays: Option<(i32, Option<Library>)>,
        at: Option<Size>,
        owner: impl Any + Send + Sync,
    ) -> PyResult<Self> {
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
        self.arrays.map(|(gpu, _)| GpuArg(gpu))
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
        let given = match self.arrays {
            Some((of_arrays, Some(library))) => {
                self.expect_gpu(gpu.map_or(of_arrays, |gpu| gpu.0))?;
                return library.current_stream(py, of_arrays);
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
        let shapes = strides.into_iter().zip(bytes);
        let shapes = shapes.map(|(stride, bytes)| PartShape { stride, bytes });
        let bases = bases.into_iter().map(DevicePtr);
        Self::of(bases.zip(shapes).collect(), blocks.0, None, at, keep)
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
        let mut parts = Vec::new();
        let mut first: Option<(i32, Option<Library>, u64)> = None;
        let mut kept: Vec<Py<PyAny>> = Vec::new();
        for tensor in tensors.try_iter()? {
            let tensor = tensor?;
            let array = GpuArray::of(&tensor)?;
            let (of_array, blocks) = array.blocks(block_dim)?;
            let (gpu, library, count) = *first.get_or_insert((array.gpu, array.library, blocks));
            if gpu != array.gpu {
                return Err(invalid("the tensors of a cache are on one GPU"));
            }
            if library != array.library {
                return Err(invalid("the tensors of a cache are of one library"));
            }
            if count != blocks {
                return Err(invalid(&format!(
                    "the tensors of a cache have {count} and {blocks} blocks; valid: as many blocks in each, which \
                     dimension block_dim= counts"
                )));
            }
            parts.extend(of_array);
            kept.push(tensor.unbind());
        }
        let (gpu, library, blocks) =
            first.ok_or_else(|| invalid("a cache has at least one tensor"))?;
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

/// The most parts of one array.
const MAX_PARTS: u64 = 1 << 16;

/// An array on a GPU.
pub struct GpuArray {
    pub library: Option<Library>,
    pub gpu: i32,
    address: u64,
    item_bytes: u64,
    /// The length of each dimension, and the bytes between two of its elements.
    dimensions: Vec<(u64, u64)>,
}

/// An array's blocks: its parts, and how many blocks there are.
pub type Blocks = (Vec<(DevicePtr, PartShape)>, u64);

impl GpuArray {
    /// Reads a PyTorch tensor, a CuPy array, or an array with a tensor's methods.
    ///
    /// # Errors
    /// `TypeError` for another object; `InvalidArgument` for an array that is on no GPU, or that has a negative stride;
    /// Python's errors.
    pub fn of(array: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::read(array).map_err(|error| {
            if !error.is_instance_of::<PyAttributeError>(array.py()) {
                return error;
            }
            let kind = array.get_type();
            PyTypeError::new_err(format!(
                "{kind} is no tensor on a GPU; valid: tensors of PyTorch, arrays of CuPy"
            ))
        })
    }

    fn read(array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let library = Library::of(array)?;
        let shape: Vec<u64> = array.getattr("shape")?.extract()?;
        let (gpu, address, strides, unit, item_bytes) = if library == Some(Library::CUPY) {
            let gpu = array.getattr("device")?.getattr("id")?.extract()?;
            let address = array.getattr("data")?.getattr("ptr")?.extract()?;
            let strides: Vec<i64> = array.getattr("strides")?.extract()?;
            (gpu, address, strides, 1, array.getattr("itemsize")?)
        } else {
            let gpu = gpu_of(array)?;
            let address = array.call_method0("data_ptr")?.extract()?;
            let size = array.call_method0("element_size")?;
            let strides: Vec<i64> = array.call_method0("stride")?.extract()?;
            (gpu, address, strides, size.extract()?, size)
        };
        let bytes = |stride: i64| u64::try_from(stride).ok()?.checked_mul(unit);
        let strides: Option<Vec<u64>> = strides.into_iter().map(bytes).collect();
        let strides =
            strides.ok_or_else(|| invalid("an array of the cache has a negative stride"))?;
        Ok(Self {
            library,
            gpu,
            address,
            item_bytes: item_bytes.extract()?,
            dimensions: shape.into_iter().zip(strides).collect(),
        })
    }

    /// Returns the blocks that dimension `block_dim` counts. The elements of a block in the dimensions behind it lie
    /// side by side, in any order of these dimensions. Each index in the dimensions before it is a part.
    ///
    /// # Errors
    /// `InvalidArgument` for no such dimension, no element, blocks with gaps, too many parts, and, without
    /// `block_dim`, for a first dimension of 2: keys and values, or two blocks.
    pub fn blocks(&self, block_dim: Option<usize>) -> PyResult<Blocks> {
        let shape: Vec<u64> = self.dimensions.iter().map(|(len, _)| *len).collect();
        if block_dim.is_none() && shape.len() >= 3 && shape[0] == 2 {
            return Err(invalid(&format!(
                "an array of the cache has the shape {shape:?}, which may be keys and values of {} blocks, or 2 blocks; \
                 pass block_dim=1 for keys and values, block_dim=0 for 2 blocks",
                shape[1]
            )));
        }
        let dim = block_dim.unwrap_or(0);
        let Some(&(blocks, stride)) = self.dimensions.get(dim) else {
            return Err(invalid(&format!(
                "block_dim is {dim}, and an array of the cache has the shape {shape:?}; valid: a dimension of each array"
            )));
        };
        if blocks == 0 || shape.contains(&0) {
            return Err(invalid(&format!(
                "an array of the cache has no block: its shape is {shape:?}"
            )));
        }
        let bytes = self.dense_bytes(&self.dimensions[dim + 1..])?;
        let mut offsets = self.offsets(&self.dimensions[..dim])?;
        let mut bytes_of_part = bytes;
        // Parts that lie side by side in memory as in a page are one.
        if (0..)
            .zip(&offsets)
            .all(|(index, offset)| *offset == index * bytes)
        {
            bytes_of_part = bytes.saturating_mul(offsets.len() as u64);
            offsets.truncate(1);
        }
        let shape = PartShape {
            // A single block's stride says nothing.
            stride: if blocks == 1 { bytes_of_part } else { stride },
            bytes: bytes_of_part,
        };
        let part = |offset: u64| (DevicePtr(self.address.wrapping_add(offset)), shape);
        Ok((offsets.into_iter().map(part).collect(), blocks))
    }

    /// Returns the bytes of the elements of some dimensions.
    ///
    /// # Errors
    /// `InvalidArgument` if they do not lie side by side.
    fn dense_bytes(&self, dimensions: &[(u64, u64)]) -> PyResult<u64> {
        let mut dimensions: Vec<_> = dimensions.iter().filter(|(len, _)| *len > 1).collect();
        dimensions.sort_unstable_by_key(|(_, stride)| *stride);
        let mut bytes = self.item_bytes;
        for (len, stride) in dimensions {
            if *stride != bytes {
                return Err(invalid(&format!(
                    "a block's elements are not contiguous in an array of the cache, whose dimensions have these lengths \
                     and bytes between elements: {:?}; copy it to an array whose blocks have no gaps, or pass block_dim= \
                     for the dimension that counts the blocks",
                    self.dimensions
                )));
            }
            bytes = bytes.saturating_mul(*len);
        }
        Ok(bytes)
    }

    /// Returns where each index of some dimensions lies, in bytes from the array's beginning.
    ///
    /// # Errors
    /// `InvalidArgument` for too many.
    fn offsets(&self, dimensions: &[(u64, u64)]) -> PyResult<Vec<u64>> {
        let lens = dimensions.iter().map(|(len, _)| *len);
        let count = lens.fold(1, u64::saturating_mul);
        if count > MAX_PARTS {
            return Err(invalid(&format!(
                "the dimensions before block_dim have {count} parts; valid: 1 to {MAX_PARTS}"
            )));
        }
        let mut offsets = vec![0_u64];
        for &(len, stride) in dimensions {
            let at = |offset: u64| {
                (0..len).map(move |index| offset.wrapping_add(index.wrapping_mul(stride)))
            };
            offsets = offsets.into_iter().flat_map(at).collect();
        }
        Ok(offsets)
    }
}

/// Returns the GPU of a tensor. A kernel that accesses memory of the CPU that is not pinned loses the GPU's context.
///
/// # Errors
/// `InvalidArgument` for a tensor that is on no GPU.
fn gpu_of(tensor: &Bound<'_, PyAny>) -> PyResult<i32> {
    let device = tensor.getattr("device")?;
    let kind: String = device.getattr("type")?.extract()?;
    if kind != "cuda" {
        return Err(invalid(&format!(
            "a tensor of the cache is on {kind:?}; valid: tensors on a GPU"
        )));
    }
    device.getattr("index")?.extract()
}
