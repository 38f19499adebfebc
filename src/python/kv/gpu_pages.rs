//! `egmem.kv.GpuPages`: where a serving engine's blocks lie.

use std::any::Any;

use egmem::driver::DevicePtr;
use egmem::kv;
use pyo3::prelude::*;

use crate::error::{OrRaise, invalid};

/// A serving engine's cache on a GPU: parts, for instance the keys and the values of each layer, each with a piece of
/// every block. Block `b` of a part is at its base plus `b * stride`, and has `part_bytes` there. A page of the tier
/// has the pieces of one block side by side, in the parts' order.
///
/// `bases` are addresses, `stride` and `part_bytes` bytes, and `blocks` is how many there are. `keep` is an object
/// that owns the memory: it lives as long as this object and its jobs. The addresses must be valid: others crash the
/// process, or the GPU.
///
/// A part may lie in several allocations of a GPU side by side, as in PyTorch's expandable segments. They stay mapped
/// as they are while this object and its jobs live. Batches of copies end at their borders, for which the driver is
/// asked once. If a driver refuses a batch all the same, the default method copies one by one, and `method="batch"`
/// raises `DriverError`.
#[pyclass(frozen, module = "egmem.kv")]
pub struct GpuPages {
    /// It keeps the owners of the memory.
    inner: kv::GpuPages,
    /// The GPU of all parts, if it is known.
    pub(super) gpu: Option<i32>,
}

impl GpuPages {
    /// # Errors
    /// Those of `kv::GpuPages::from_raw`.
    fn of(
        bases: Vec<u64>,
        (stride, part_bytes, blocks): (u64, u64, u64),
        gpu: Option<i32>,
        owner: impl Any + Send + Sync,
    ) -> PyResult<Self> {
        let bases = bases.into_iter().map(DevicePtr).collect();
        // SAFETY: the caller of the Python class names memory that has all blocks, and passes its owner, which this
        // object and every job keep; the order of other work is the caller's, as with any copy in Python.
        let inner = unsafe { kv::GpuPages::from_raw(bases, stride, part_bytes, blocks) };
        Ok(Self {
            inner: inner.or_raise()?.keeping(owner),
            gpu,
        })
    }
}

impl GpuPages {
    /// Returns the cache for copies on a stream of a GPU, which keep the stream's object.
    ///
    /// # Errors
    /// `InvalidArgument` for tensors on another GPU.
    pub(super) fn on(
        &self,
        device: i32,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<kv::GpuPages> {
        match self.gpu {
            Some(gpu) if gpu != device => Err(invalid(&format!(
                "the cache's tensors are on GPU {gpu}, and the stream is of GPU {device}"
            ))),
            _ => Ok(match stream {
                Some(stream) => self.inner.clone().keeping(stream.clone().unbind()),
                None => self.inner.clone(),
            }),
        }
    }
}

#[pymethods]
impl GpuPages {
    #[new]
    #[pyo3(signature = (bases, stride, part_bytes, blocks, *, keep=None))]
    fn new(
        bases: Vec<u64>,
        stride: u64,
        part_bytes: u64,
        blocks: u64,
        keep: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        Self::of(bases, (stride, part_bytes, blocks), None, keep)
    }

    /// Describes PyTorch tensors of one shape and type on one GPU, whose first dimension counts the blocks; in a
    /// block the elements are contiguous. The tensors that `tensors` has now are kept, even if the list changes
    /// later. They may lie in PyTorch's expandable segments.
    #[staticmethod]
    fn from_tensors(tensors: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut bases = Vec::new();
        let mut layout = None;
        let mut gpu = None;
        let mut kept: Vec<Py<PyAny>> = Vec::new();
        for tensor in tensors.try_iter()? {
            let tensor = tensor?;
            let on = gpu_of(&tensor)?;
            if *gpu.get_or_insert(on) != on {
                return Err(invalid("the tensors of a cache are on one GPU"));
            }
            let blocks: u64 = tensor.getattr("shape")?.get_item(0)?.extract()?;
            if blocks == 0 {
                return Err(invalid("a tensor of the cache has no block"));
            }
            let size: u64 = tensor.call_method0("element_size")?.extract()?;
            let stride: u64 = tensor.call_method1("stride", (0,))?.extract()?;
            let count: u64 = tensor.call_method0("numel")?.extract()?;
            let first = tensor.get_item(0)?;
            if !first.call_method0("is_contiguous")?.extract::<bool>()? {
                return Err(invalid(
                    "the elements of a block are not contiguous in a tensor",
                ));
            }
            let this = (stride * size, count / blocks * size, blocks);
            if *layout.get_or_insert(this) != this {
                return Err(invalid(
                    "the tensors of a cache have the same shape and type",
                ));
            }
            bases.push(tensor.call_method0("data_ptr")?.extract()?);
            kept.push(tensor.unbind());
        }
        let layout = layout.ok_or_else(|| invalid("a cache has at least one tensor"))?;
        Self::of(bases, layout, gpu, kept)
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

    /// The bytes of a block in all parts: those of a page.
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
