//! `egmem.Block`: a part of a heap's memory.

use std::sync::Arc;

use egmem::heap::NotFreed;
use pyo3::prelude::*;

use crate::args::GpuArg;
use crate::error::{OrRaise, ToPy, closed, in_use, invalid, raise};
use crate::memory::Memory;
use crate::region::{Owner, Region};

/// A block of a heap, made by `Heap.allocate`, or an element of `Blocks`. It may outlive the heap's object.
///
/// The heap may give the memory to another block as soon as the last view of this one is gone. If a GPU's work may
/// still use it then, the heap waits for the GPU; `free_after` frees without a wait.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct Block;

#[pymethods]
impl Block {
    /// The block's offset in bytes from its heap's first address: `SharedHeap.block` finds it by that.
    #[getter]
    fn offset(slf: PyRef<'_, Self>) -> PyResult<u64> {
        let region = slf.as_super().region()?;
        match region.owner().or_raise()? {
            Owner::Block(block) => Ok(block.offset()),
            Owner::OfMany(one) => Ok(one.block().offset()),
            _ => Err(invalid("it is no block")),
        }
    }

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
        let region = memory.region()?;
        region.expect_here()?;
        if let Owner::OfMany(_) = region.owner().or_raise()? {
            let message = "the block is one of allocate_many, which are freed together";
            let remedy = "delete it, and call free_after of its egmem.Blocks";
            return Err(raise("InvalidArgument", message, remedy, None));
        }
        let stream = crate::stream::given(
            region.driver(),
            stream,
            gpu.map(|gpu| gpu.0),
            region.default_gpu(),
        )?;
        drop(region);
        let region = memory.take()?.ok_or_else(|| closed("block"))?;
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
