//! `egmem.Heap`: blocks of any size without a driver call.

use std::sync::Arc;

use egmem::HeapOptions;
use egmem::driver::Location;
use egmem::size::Bytes;
use pyo3::prelude::*;

use crate::args::{self, GpuArg, NodeArg, OneOrEach, Size, With, access, layout, layouts, seconds};
use crate::blocks::{Block, Blocks};
use crate::driver::{Driver, given_or_default};
use crate::error::OrRaise;
use crate::frees::retry;
use crate::interpreter::{Closing, Open, closing, object, to_python, told};
use crate::ledger::from_program;
use crate::memory::make;
use crate::places::{location, node_of, simulated_of};
use crate::region::Owner;

/// Suballocates blocks of memory on a node, for the CPU and the GPUs, without a driver call.
///
/// `node`, `near_gpu`, `device`, `access_by`, `host`, `shareable`, `overcommit` and `label` are as for `Buffer`. `limit`
/// is the most memory it may have, `chunk` how much it adds at a time, `reserve` how much it has from the start,
/// `grow_ahead` how much it keeps free by a thread of its own, all in bytes. `wait_for_gpu` has an allocation wait
/// for blocks freed after GPU work before it fails, `scrub_on_free` overwrites freed blocks with zeros,
/// `thread_cache` limits the bytes that each thread keeps, and memory that was not needed for `decay` seconds goes back
/// to the machine by itself. `backing` is as for `Buffer`, but by default `"auto"`; each block lies in one chunk.
#[pyclass(extends = Closing, frozen, module = "egmem", name = "Heap")]
pub struct Heap {
    inner: Arc<Open<egmem::Heap>>,
    shareable: bool,
    place: Location,
}

impl Heap {
    /// Returns a handle of the heap, in the process that made it.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` in a forked child, where the heap's locks may be held for ever.
    pub fn handle(&self) -> PyResult<egmem::Heap> {
        self.inner.get("heap", egmem::Heap::driver)
    }

    fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&egmem::Heap) -> egmem::Result<T> + Send,
    ) -> PyResult<T> {
        let heap = self.handle()?;
        // The closure drops the handle, without the GIL.
        py.detach(move || work(&heap)).or_raise()
    }

    fn make<'py>(
        &self,
        py: Python<'py>,
        nbytes: Size,
        align: Size,
        zeroed: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let layout = layout(nbytes, align)?;
        let heap = self.handle()?;
        retry(py, heap.driver())?;
        let block = py.detach(move || match zeroed {
            true => heap.allocate_zeroed(layout),
            false => heap.allocate(layout),
        });
        let block = block.or_raise()?;
        let offset = block.offset();
        make(py, Block { offset }, Owner::Block(Arc::new(block)))
    }
}

#[pymethods]
impl Heap {
    #[new]
    #[pyo3(signature = (
        node=None, *, near_gpu=None, device=None, limit=None, chunk=None, reserve=None, grow_ahead=None, access_by=None, host=None,
        wait_for_gpu=false, scrub_on_free=false, thread_cache=None, decay=None, shareable=false, overcommit=false, label=None,
        backing=None, driver=None,
    ))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        node: Option<NodeArg>,
        near_gpu: Option<GpuArg>,
        device: Option<GpuArg>,
        limit: Option<Size>,
        chunk: Option<Size>,
        reserve: Option<Size>,
        grow_ahead: Option<Size>,
        access_by: Option<OneOrEach<GpuArg>>,
        host: Option<&str>,
        wait_for_gpu: bool,
        scrub_on_free: bool,
        thread_cache: Option<Size>,
        decay: Option<f64>,
        shareable: bool,
        overcommit: bool,
        label: Option<String>,
        backing: Option<&str>,
        driver: Option<&Bound<'_, Driver>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let driver = given_or_default(py, driver)?;
        let place = location(py, &driver, node, near_gpu, device)?;
        let bytes = |size: Option<Size>| size.map(|size| size.0);
        let options = egmem::Heap::on(place)
            .wait_for_gpu(wait_for_gpu)
            .scrub_on_free(scrub_on_free)
            .overcommit(overcommit)
            .with(access_by, HeapOptions::access_by)
            .with(host.map(access).transpose()?, |options, host| {
                options.access(Location::Host, host)
            })
            .with(shareable.then_some(()), |options, ()| options.shareable())
            .with(label, HeapOptions::label)
            .with(
                backing.map(args::backing).transpose()?,
                HeapOptions::backing,
            )
            .with(
                decay.map(|decay| seconds("decay is", decay)).transpose()?,
                HeapOptions::decay,
            )
            .with(bytes(limit), HeapOptions::limit)
            .with(bytes(chunk), HeapOptions::chunk)
            .with(bytes(reserve), HeapOptions::reserve)
            .with(bytes(grow_ahead), HeapOptions::grow_ahead)
            .with(bytes(thread_cache), HeapOptions::thread_cache);
        let heap = from_program(py, || py.detach(|| options.build(&driver)).or_raise())?;
        let inner = Arc::new(Open::new(heap));
        let heap = Self {
            inner,
            shareable,
            place,
        };
        Ok(closing(heap))
    }

    /// Allocates a block of `nbytes` at a multiple of `align`. Its bytes are not initialised.
    #[pyo3(signature = (nbytes, align=Size(256)), text_signature = "($self, nbytes, align=256)")]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        nbytes: Size,
        align: Size,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.make(py, nbytes, align, false)
    }

    /// As `allocate`, with every byte 0.
    #[pyo3(signature = (nbytes, align=Size(256)), text_signature = "($self, nbytes, align=256)")]
    fn allocate_zeroed<'py>(
        &self,
        py: Python<'py>,
        nbytes: Size,
        align: Size,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.make(py, nbytes, align, true)
    }

    /// Allocates a block for each of `sizes`, or none if one fails: a `Blocks`, which takes 32 bytes for each block
    /// where a `Block` takes several hundred. `sizes` is a list of sizes, or an array of integers.
    #[pyo3(signature = (sizes, align=Size(256)), text_signature = "($self, sizes, align=256)")]
    fn allocate_many<'py>(
        &self,
        py: Python<'py>,
        sizes: &Bound<'_, PyAny>,
        align: Size,
    ) -> PyResult<Bound<'py, PyAny>> {
        let layouts = layouts(sizes, align)?;
        let heap = self.handle()?;
        retry(py, heap.driver())?;
        let blocks = py.detach(move || Blocks::allocate(heap, layouts.into_iter()));
        object(py, closing(blocks.or_raise()?))
    }

    /// Adds memory until at least `nbytes` are free. `progress(done, total)` is called after each chunk, in bytes and
    /// with no lock held. If it raises, or a signal does, such as Ctrl-C, the added memory is given back.
    #[pyo3(signature = (nbytes, progress=None))]
    fn reserve(
        &self,
        py: Python<'_>,
        nbytes: Size,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let heap = self.handle()?;
        // Dropped without the GIL: the last handle gives memory back.
        told(py, progress, move |tell| heap.reserve_with(nbytes.0, tell))
    }

    /// Gives unused memory back in whole chunks, but leaves at least `keep` bytes free; returns the number of bytes.
    #[pyo3(signature = (keep=Size(0)), text_signature = "($self, keep=0)")]
    fn trim(&self, py: Python<'_>, keep: Size) -> PyResult<u64> {
        self.run(py, |heap| heap.trim_to(keep.0))
    }

    /// Collects the blocks that were freed after GPU work which has finished; returns their number. With `wait` it
    /// waits for the work of all; Ctrl-C does not end that wait.
    #[pyo3(signature = (wait=false))]
    fn collect(&self, py: Python<'_>, wait: bool) -> PyResult<usize> {
        self.run(py, |heap| {
            if wait {
                heap.collect_all()
            } else {
                heap.collect()
            }
        })
    }

    /// Returns the heap's statistics as a dictionary. In bytes, unless the name says blocks:
    ///
    /// - `live_blocks`, `live`: blocks in use, and the bytes that were asked for in them
    /// - `used`: what these blocks and the deferred ones take, with rounding
    /// - `deferred_blocks`: blocks that `free_after` freed and whose GPU work has not finished
    /// - `free`, `largest_free`: free bytes outside slabs, which are pages of blocks of one size, and the largest free range
    /// - `free_in_slabs`, `slab_ends`: free bytes in slabs, and ends of slabs too small for a block
    /// - `cached`: free bytes that threads keep for themselves; `threads`: the threads that do
    /// - `backed`, `limit`: the memory that the heap has, and the most that it may have
    /// - `backed_high_water`, `used_high_water`: the most that `backed` and `used` ever were
    /// - `metadata`: the heap's own tables, in ordinary memory
    /// - `allocated_blocks`, `freed_blocks`, `failed`: allocations, frees and failed allocations since the heap was made
    /// - `cache_takings`: how often the heap emptied all threads' caches because memory was short
    /// - `quarantined`: freed bytes that a debug mode holds back; 0 in Python
    /// - `classes`: a list of the sizes of small blocks: `bytes` of a block, `blocks` that there is room for, and `free`
    /// - `driver`: the driver calls that the heap has made, by kind
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.run(py, |heap| Ok(heap.stats()))?;
        to_python(py, &stats)
    }

    /// Returns a drawing of which ranges are used, as SVG.
    fn to_svg(&self, py: Python<'_>) -> PyResult<String> {
        self.run(py, |heap| Ok(heap.occupancy().to_svg("heap")))
    }

    /// The bytes that have memory now.
    #[getter]
    fn backed(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, |heap| Ok(heap.backed()))
    }

    /// The most bytes that can have memory.
    #[getter]
    fn limit(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, |heap| Ok(heap.limit()))
    }

    /// The host NUMA node, or `None` for memory of a GPU.
    #[getter]
    fn node(&self) -> Option<i32> {
        node_of(self.place)
    }

    /// What the memory is: `"driver"` or `"registered"`.
    #[getter]
    fn backing(&self, py: Python<'_>) -> PyResult<String> {
        self.run(py, |heap| Ok(heap.backing().backing.to_string()))
    }

    /// Why it is that.
    #[getter]
    fn backing_reason(&self, py: Python<'_>) -> PyResult<String> {
        self.run(py, |heap| Ok(heap.backing().why.to_string()))
    }

    /// The driver that the heap belongs to.
    #[getter]
    fn driver(&self) -> PyResult<Driver> {
        Ok(Driver::of(self.handle()?.driver()))
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Pickles the heap itself, for one process of this user: it finds blocks by their offsets. See docs/python.md.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        crate::import::reduce_heap(py, &self.handle()?, &self.inner, self.shareable)
    }

    /// Ends the heap's use. Blocks stay valid; the memory is released with the last one.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let Ok(heap) = self.handle() else {
            return "<egmem.Heap closed>".into();
        };
        let (backed, limit) = py.detach(|| (heap.backed(), heap.limit()));
        let simulated = simulated_of(heap.driver());
        format!(
            "<egmem.Heap of {} (limit {}) on {}{simulated}>",
            Bytes(backed),
            Bytes(limit),
            self.place
        )
    }
}
