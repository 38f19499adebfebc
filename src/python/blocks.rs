//! `egmem.Block` and `egmem.Blocks`: parts of a heap's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use egmem::heap::{NotAllFreed, NotFreed};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

use crate::args::GpuArg;
use crate::driver::Driver;
use crate::error::{OrRaise, ToPy, closed, in_use, raise};
use crate::frees::sweep;
use crate::interpreter::{Closing, Open};
use crate::memory::{Memory, make};
use crate::owner::Many;
use crate::region::{Owner, Region};

/// A block of a heap, made by `Heap.allocate`, or an element of `Blocks`. It may outlive the heap's object.
///
/// The heap may give the memory to another block as soon as the last view of this one is gone. If a GPU's work may
/// still use it then, the heap waits for the GPU; `free_after` frees without a wait.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct Block {
    /// The block's offset in bytes from its heap's first address: `SharedHeap.block` finds it by that.
    #[pyo3(get)]
    pub offset: u64,
}

#[pymethods]
impl Block {
    /// Closes the block, and frees it once all work submitted to `stream` so far has run. No other stream may use it.
    /// `gpu` is the stream's GPU, for a handle or an object without that attribute.
    ///
    /// Raises `InUse` while a view lives, and an error for a stream that is being captured into a graph. The block is
    /// not freed then.
    #[pyo3(signature = (stream, *, gpu=None))]
    fn free_after(
        slf: PyRef<'_, Self>,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        gpu: Option<GpuArg>,
    ) -> PyResult<()> {
        let memory = slf.as_super();
        if let Owner::OfMany(..) = memory.region()?.owner().or_raise()? {
            let message = "the block is one of allocate_many, which are freed together";
            let remedy = "delete it, and call free_after of its egmem.Blocks";
            return Err(raise("InvalidArgument", message, remedy));
        }
        let (region, stream) = memory.take_after(stream, gpu)?;
        let Some(Owner::Block(block)) = region.into_owner() else {
            return Ok(());
        };
        let block = match Arc::try_unwrap(block) {
            Ok(block) => block,
            Err(block) => {
                memory.put_back(Region::new(Owner::Block(block)));
                return Err(in_use("the block is being sent to another process"));
            }
        };
        match py.detach(|| block.free_after(&stream)) {
            Ok(()) => Ok(()),
            Err(NotFreed { error, block }) => {
                memory.put_back(Region::new(Owner::Block(Arc::new(block))));
                Err(error.to_py())
            }
        }
    }
}

/// Blocks of a heap, made by `Heap.allocate_many`: a sequence whose elements are made when they are asked for.
///
/// `blocks[i]` is a `Block` that keeps all of them. `addresses` has every address at once. The blocks are freed together:
/// with the last reference to this object and to its elements, by `close`, or by `free_after`. It may outlive the heap's
/// object.
#[pyclass(extends = Closing, frozen, module = "egmem")]
pub struct Blocks {
    inner: Open<Arc<Many>>,
}

impl Blocks {
    /// Allocates a block of each size, or none. The caller has no GIL.
    ///
    /// # Errors
    /// Those of the heap.
    pub fn allocate(
        heap: egmem::Heap,
        layouts: impl ExactSizeIterator<Item = std::alloc::Layout>,
    ) -> egmem::Result<Self> {
        let mut blocks = Vec::with_capacity(layouts.len());
        for layout in layouts {
            blocks.push(heap.allocate(layout)?);
        }
        let many = Many {
            heap,
            bytes: blocks.iter().map(egmem::Block::len).sum(),
            blocks,
            exposed: AtomicBool::new(false),
        };
        Ok(Self {
            inner: Open::new(Arc::new(many)),
        })
    }

    fn many(&self) -> PyResult<Arc<Many>> {
        self.inner.get("list of blocks", |many| many.heap.driver())
    }

    /// Takes the blocks out of the object; `None` if they were freed before.
    ///
    /// # Errors
    /// `InUse` if an element lives.
    fn take(&self, py: Python<'_>) -> PyResult<Option<Many>> {
        sweep(py);
        let users = {
            let mut inner = self.inner.lock();
            match inner.as_ref().map_or(0, Arc::strong_count) {
                0 | 1 => return Ok(inner.take().and_then(Arc::into_inner)),
                users => users,
            }
        };
        let elements = users - 1;
        let message = format!(
            "the blocks cannot be freed: {elements} of their elements or views live, or copies on streams still run"
        );
        let remedy = "delete the elements and their views first, and wait for streams that copy (stream.synchronize()), or drop all references: the last one frees the blocks";
        Err(raise("InUse", &message, remedy))
    }
}

#[pymethods]
impl Blocks {
    fn __len__(&self) -> PyResult<usize> {
        Ok(self.many()?.blocks.len())
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: isize) -> PyResult<Bound<'py, PyAny>> {
        let many = self.many()?;
        let len = many.blocks.len();
        let at = match index {
            0.. => Some(index as usize),
            _ => len.checked_sub(index.unsigned_abs()),
        };
        let Some(index) = at.filter(|at| *at < len) else {
            let why = format!(
                "there is no block {index}; valid: -{len} to {}",
                len.saturating_sub(1)
            );
            return Err(PyIndexError::new_err(why));
        };
        let offset = many.blocks[index].offset();
        make(py, Block { offset }, Owner::OfMany(many, index))
    }

    /// The addresses, as a memoryview of unsigned 64-bit numbers: `numpy.asarray(blocks.addresses)` copies nothing. They
    /// are read anew at each access.
    #[getter]
    fn addresses<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let many = self.many()?;
        many.exposed.store(true, Relaxed);
        let bytes = PyBytes::new_with(py, 8 * many.blocks.len(), |bytes| {
            for (bytes, block) in bytes.chunks_exact_mut(8).zip(&many.blocks) {
                bytes.copy_from_slice(&block.device_ptr().0.to_ne_bytes());
            }
            Ok(())
        })?;
        PyMemoryView::from(&bytes)?.call_method1("cast", ("Q",))
    }

    /// The bytes of all blocks together, as they were asked for.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.many()?.bytes)
    }

    /// The driver that the blocks belong to.
    #[getter]
    fn driver(&self) -> PyResult<Driver> {
        Ok(Driver::of(self.many()?.heap.driver()))
    }

    /// Whether `close` or `free_after` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Frees the blocks once all work submitted to `stream` so far has run. `gpu` is as for `Block.free_after`.
    ///
    /// Raises `InUse` while an element lives, and an error for a stream that is being captured into a graph. No block is
    /// freed then.
    #[pyo3(signature = (stream, *, gpu=None))]
    fn free_after(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        gpu: Option<GpuArg>,
    ) -> PyResult<()> {
        let stream = crate::stream::given(self.many()?.heap.driver(), stream, gpu, 0)?;
        let mut many = self.take(py)?.ok_or_else(|| closed("list of blocks"))?;
        let blocks = std::mem::take(&mut many.blocks);
        match py.detach(|| many.heap.free_all_after(blocks, &stream)) {
            Ok(()) => Ok(()),
            Err(NotAllFreed { error, blocks }) => {
                many.blocks = blocks;
                *self.inner.lock() = Some(Arc::new(many));
                Err(error.to_py())
            }
        }
    }

    /// Frees the blocks now.
    ///
    /// Raises `InUse`, a `BufferError`, while an element or a view of one lives.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.closed() {
            return Ok(());
        }
        self.many()?;
        if let Some(many) = self.take(py)? {
            py.detach(|| drop(many));
        }
        Ok(())
    }

    /// Returns the object's size in ordinary memory, which has an entry for each block.
    fn __sizeof__(&self) -> usize {
        let many = self.inner.lock();
        let blocks = many.as_ref().map_or(0, |many| many.blocks.capacity());
        size_of::<Self>() + size_of::<Many>() + blocks * size_of::<egmem::Block>()
    }

    fn __repr__(&self) -> String {
        match self.many() {
            Ok(many) => format!(
                "<egmem.Blocks: {} of {} bytes together>",
                many.blocks.len(),
                many.bytes
            ),
            Err(_) => "<egmem.Blocks closed>".into(),
        }
    }
}
