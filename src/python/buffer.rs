//! `egmem.Buffer`, memory that is mapped for itself, and `egmem.Pool`, memory in the order of streams.

use std::sync::Arc;

use egmem::driver::{HandleTypes, Location};
use egmem::pool::PoolOptions;
use egmem::topology::Placement;
use egmem::{BufferOptions, Growth};
use pyo3::prelude::*;

use crate::args::{self, GpuArg, NodeArg, OneOrEach, Size, With, access};
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, invalid};
use crate::interpreter::{Closing, Open, closing, to_python, told};
use crate::ledger::from_program;
use crate::memory::{Memory, make};
use crate::places::{location, node_of, simulated_of};
use crate::region::{Owner, Region};
use crate::stream::{Stream, given};

/// Memory on a chosen node, mapped at one address for the CPU and the GPUs.
///
/// `Buffer(nbytes, node=0)` is on a host node, `near_gpu=1` on the host node nearest to that GPU, `device=1` in the
/// GPU's own memory, `spread=True` on all host nodes. Without any of them it is near GPU 0. A node may be an
/// `egmem.Node`, a GPU an `egmem.Gpu`. A size is a number of bytes, or text such as `"64MiB"`; the memory is rounded
/// up to 2 MiB.
///
/// `access_by` is the GPU, or lists the GPUs, that may use it (default: all that can), `host` is the CPU's access: `"rw"`, `"r"` or
/// `""`. `label` names it in `egmem ps`. `overcommit` asks for more than the node has free.
///
/// `backing` is what host memory is made of: `"driver"` (the default) memory that the driver creates, `"registered"` pages of
/// this process that the driver pins, several times as fast, `"auto"` registered pages where they are as good or better.
/// Copies of other libraries fail if they reach over a border of two chunks of registered memory. With `one_copy`, `"auto"` is
/// `"driver"` where there would be such a border.
///
/// Host memory is allocated in chunks of 64 MiB, of a 2048th if it can be shared and has more than 128 GiB (registered memory: of a 256th, 16 GiB); `gentle`
/// takes chunks of 16 MiB with rests between them, so that other processes' driver calls wait less. `progress(done,
/// total)` is called after each chunk, in bytes and with no lock held. If it raises, or a signal does, such as Ctrl-C
/// between two chunks, everything is given back.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct Buffer {
    /// The bytes allocated: those requested, rounded up.
    #[pyo3(get)]
    padded: u64,
    /// What the memory is: `"driver"` or `"registered"`.
    #[pyo3(get)]
    backing: String,
    /// Why it is that.
    #[pyo3(get)]
    backing_reason: String,
}

#[pymethods]
impl Buffer {
    #[new]
    #[pyo3(signature = (
        nbytes, node=None, *, near_gpu=None, device=None, spread=false, access_by=None, host=None, shareable=false,
        overcommit=false, label=None, progress=None, gentle=false, backing=None, one_copy=false, driver=None,
    ))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        nbytes: Size,
        node: Option<NodeArg>,
        near_gpu: Option<GpuArg>,
        device: Option<GpuArg>,
        spread: bool,
        access_by: Option<OneOrEach<GpuArg>>,
        host: Option<&str>,
        shareable: bool,
        overcommit: bool,
        label: Option<String>,
        progress: Option<&Bound<'_, PyAny>>,
        gentle: bool,
        backing: Option<&str>,
        one_copy: bool,
        driver: Option<&Bound<'_, Driver>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let driver = given_or_default(py, driver)?;
        crate::frees::retry(py, &driver)?;
        let host = host.map(access).transpose()?;
        let backing = backing.map(args::backing).transpose()?;
        let nbytes = nbytes.0;
        let options = if spread {
            if node.is_some() || near_gpu.or(device).is_some() {
                return Err(invalid("spread excludes node, near_gpu and device"));
            }
            let topology = py
                .detach(|| egmem::Topology::discover(&driver))
                .or_raise()?;
            let mut request = Placement::Spread.request(nbytes);
            if overcommit {
                request = request.allow_overcommit();
            }
            egmem::Buffer::spread(&request.place(&topology).or_raise()?)
        } else {
            egmem::Buffer::on(location(py, &driver, node, near_gpu, device)?).bytes(nbytes)
        };
        let options = options
            .with(access_by, BufferOptions::access_by)
            .with(host, |options, host| options.access(Location::Host, host))
            .with(shareable.then_some(()), |options, ()| options.shareable())
            .with(label, BufferOptions::label)
            .with(gentle.then(Growth::gentle), BufferOptions::growth)
            .with(backing, BufferOptions::backing)
            .overcommit(overcommit)
            .one_copy(one_copy);
        let buffer = from_program(py, || {
            told(py, progress, |tell| options.allocate_with(&driver, tell))
        })?;
        let own = Self {
            padded: buffer.padded(),
            backing: buffer.backing().backing.to_string(),
            backing_reason: buffer.backing().why.to_string(),
        };
        let memory = Memory::new(Region::new(Owner::Buffer(Arc::new(buffer))));
        Ok(closing(memory).add_subclass(own))
    }
}

/// A memory pool on a host node or a GPU: allocations in the order of a stream (`cuMemPoolCreate`).
///
/// `max_size` limits it, `release_threshold` is how many bytes it keeps at a synchronisation, `gpu` is the GPU whose
/// stream the pool has for its allocations. `node`, `near_gpu`, `device`, `access_by`, `overcommit` and `label` are as
/// for `Buffer`; without a place the pool is near `gpu`.
#[pyclass(extends = Closing, frozen, module = "egmem", name = "Pool")]
pub struct Pool {
    inner: Open<(egmem::Pool, egmem::Stream)>,
    place: Location,
}

impl Pool {
    fn handle(&self) -> PyResult<(egmem::Pool, egmem::Stream)> {
        self.inner.get("pool", |(pool, _)| pool.driver())
    }
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (
        node=None, *, near_gpu=None, device=None, gpu=GpuArg(0), max_size=Size(0), release_threshold=Size(0), access_by=None,
        shareable=false,
        overcommit=false, label=None, driver=None,
    ), text_signature = "(node=None, *, near_gpu=None, device=None, gpu=0, max_size=0, release_threshold=0, access_by=None, \
        shareable=False, overcommit=False, label=None, driver=None)")]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        node: Option<NodeArg>,
        near_gpu: Option<GpuArg>,
        device: Option<GpuArg>,
        gpu: GpuArg,
        max_size: Size,
        release_threshold: Size,
        access_by: Option<OneOrEach<GpuArg>>,
        shareable: bool,
        overcommit: bool,
        label: Option<String>,
        driver: Option<&Bound<'_, Driver>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let driver = given_or_default(py, driver)?;
        let near_gpu = near_gpu.or((node.is_none() && device.is_none()).then_some(gpu));
        let place = location(py, &driver, node, near_gpu, device)?;
        let shareable = shareable.then_some(HandleTypes::POSIX_FD);
        let options = egmem::Pool::options(place)
            .max_size(max_size.0)
            .release_threshold(release_threshold.0)
            .overcommit(overcommit)
            .with(access_by, PoolOptions::access_by)
            .with(shareable, PoolOptions::handle_types)
            .with(label, PoolOptions::label);
        let made: egmem::Result<_> = py.detach(|| {
            Ok((
                options.create(&driver)?,
                egmem::Stream::new(&driver, gpu.0)?,
            ))
        });
        let inner = Open::new(made.or_raise()?);
        Ok(closing(Self { inner, place }))
    }

    /// Allocates `nbytes`. Work that is submitted to `stream` from now on may use them; without a stream the pool's
    /// own is waited for. `gpu` is as for `Block.free_after`.
    ///
    /// Reads by the CPU and the free follow the work of an `egmem.Stream` that is passed here. Streams of other libraries
    /// and those of `View.ready_on` they do not follow: synchronize such a stream first, or pass it to `free_after`.
    #[pyo3(signature = (nbytes, stream=None, *, gpu=None))]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        nbytes: Size,
        stream: Option<&Bound<'py, PyAny>>,
        gpu: Option<GpuArg>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (pool, own) = self.handle()?;
        crate::frees::retry(py, pool.driver())?;
        let theirs = stream
            .map(|stream| given(pool.driver(), stream, gpu, own.device()))
            .transpose()?;
        // A stream of another library may end before the memory does.
        let is_kept = stream.is_some_and(|stream| stream.is_instance_of::<Stream>());
        let allocate = || -> egmem::Result<_> {
            let mut block = pool.allocate(nbytes.0, &own)?;
            match theirs {
                Some(theirs) if is_kept => block.use_on(&theirs)?,
                Some(theirs) => theirs.wait_for(&own)?,
                None => own.synchronize()?,
            }
            Ok(block)
        };
        let block = from_program(py, || py.detach(allocate).or_raise())?;
        make(py, PoolBlock, Owner::Pool(block))
    }

    /// Gives free memory back to the system until `keep` bytes are held.
    #[pyo3(signature = (keep=Size(0)), text_signature = "($self, keep=0)")]
    fn trim(&self, py: Python<'_>, keep: Size) -> PyResult<()> {
        let (pool, _) = self.handle()?;
        py.detach(|| pool.trim_to(keep.0)).or_raise()
    }

    /// Returns the pool's statistics as a dictionary, in bytes:
    ///
    /// - `reserved`, `reserved_high`: the memory that the pool has from the system, now and at most
    /// - `used`, `used_high`: the bytes of its allocations, now and at most
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (pool, _) = self.handle()?;
        to_python(py, &py.detach(|| pool.stats()).or_raise()?)
    }

    /// The driver's handle, a `CUmemoryPool`.
    #[getter]
    fn pool_handle(&self) -> PyResult<u64> {
        Ok(self.handle()?.0.handle().0)
    }

    /// The host NUMA node, or `None` for memory of a GPU.
    #[getter]
    fn node(&self) -> Option<i32> {
        node_of(self.place)
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.is_closed()
    }

    /// Ends the pool's use. Its allocations stay valid; the pool is destroyed with the last one.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }

    fn __repr__(&self) -> String {
        match self.handle() {
            Err(_) => "<egmem.Pool closed>".into(),
            Ok((pool, _)) => {
                let simulated = simulated_of(pool.driver());
                format!("<egmem.Pool on {}{simulated}>", self.place)
            }
        }
    }
}

/// An allocation of a pool, made by `Pool.allocate`. It is freed in the order of the pool's stream, after the work of
/// GPUs that may use it.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct PoolBlock;

#[pymethods]
impl PoolBlock {
    /// Closes the allocation, and frees it after all work submitted to `stream` so far, and to the `egmem.Stream` that it
    /// was allocated for. `gpu` is as for `Block.free_after`.
    ///
    /// Raises `InUse` while a view lives.
    #[pyo3(signature = (stream, *, gpu=None))]
    fn free_after(
        slf: PyRef<'_, Self>,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        gpu: Option<GpuArg>,
    ) -> PyResult<()> {
        let (region, stream) = slf.as_super().take_after(stream, gpu)?;
        let Some(Owner::Pool(block)) = region.into_owner() else {
            return Err(invalid("it is no allocation of a pool"));
        };
        py.detach(|| block.free_on(&stream)).or_raise()
    }
}
