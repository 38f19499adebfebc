//! `egmem.Pool`: memory in the order of streams.

use std::sync::Mutex;

use egmem::driver::{HandleTypes, Location};
use egmem::pool::PoolOptions;
use pyo3::prelude::*;

use crate::args::{GpuArg, NodeArg, Size, With};
use crate::class::{Closing, closing, to_python};
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, closed, invalid};
use crate::gil::{copy_of, drop_detached, lock};
use crate::memory::{Memory, make};
use crate::places::location;
use crate::region::Owner;
use crate::site::from_program;
use crate::stream::given;

/// A memory pool on a host node or a GPU: allocations in the order of a stream (`cuMemPoolCreate`).
///
/// `max_size` limits it, `release_threshold` is how many bytes it keeps at a synchronisation, `gpu` is the GPU whose
/// stream the pool has for its allocations. `node`, `near_gpu`, `device`, `access_by`, `overcommit` and `label` are as
/// for `Buffer`; without a place the pool is near `gpu`.
#[pyclass(extends = Closing, frozen, module = "egmem", name = "Pool")]
pub struct Pool {
    inner: Mutex<Option<(egmem::Pool, egmem::Stream)>>,
    place: Location,
}

impl Pool {
    fn handle(&self) -> PyResult<(egmem::Pool, egmem::Stream)> {
        let (pool, stream) = copy_of(&self.inner).ok_or_else(|| closed("pool"))?;
        pool.driver().expect_this_process("pool").or_raise()?;
        Ok((pool, stream))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let pool = lock(&self.inner).take();
        drop_detached(pool);
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
        access_by: Option<Vec<GpuArg>>,
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
        let inner = Mutex::new(Some(made.or_raise()?));
        Ok(closing(Self { inner, place }))
    }

    /// Allocates `nbytes`. Work that is submitted to `stream` from now on may use them; without a stream the pool's
    /// own is waited for. `gpu` is as for `Block.free_after`.
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
            .map(|stream| given(pool.driver(), stream, gpu.map(|gpu| gpu.0), own.device()))
            .transpose()?;
        let allocate = || {
            let block = pool.allocate(nbytes.0, &own)?;
            match theirs {
                Some(theirs) => theirs.wait_for(&own)?,
                None => own.synchronize()?,
            }
            Ok(block)
        };
        let block: egmem::Result<_> = from_program(py, || py.detach(allocate));
        make(py, PoolBlock, Owner::Pool(block.or_raise()?))
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
        match self.place {
            Location::HostNuma(node) => Some(node),
            _ => None,
        }
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        lock(&self.inner).is_none()
    }

    /// Ends the pool's use. Its allocations stay valid; the pool is destroyed with the last one.
    fn close(&self, py: Python<'_>) {
        let pool = lock(&self.inner).take();
        py.detach(|| drop(pool));
    }

    fn __repr__(&self) -> String {
        match self.handle() {
            Err(_) => "<egmem.Pool closed>".into(),
            Ok((pool, _)) if pool.driver().is_simulated() => {
                format!("<egmem.Pool on {}, SIMULATED>", self.place)
            }
            Ok(_) => format!("<egmem.Pool on {}>", self.place),
        }
    }
}

/// An allocation of a pool, made by `Pool.allocate`. It is freed in the order of the pool's stream, after the work of
/// GPUs that may use it.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct PoolBlock;

#[pymethods]
impl PoolBlock {
    /// Closes the allocation, and frees it after all work submitted to `stream` so far. `gpu` is as for
    /// `Block.free_after`.
    ///
    /// Raises `InUse` while a view lives.
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
        let stream = given(
            region.driver(),
            stream,
            gpu.map(|gpu| gpu.0),
            region.default_gpu(),
        )?;
        drop(region);
        let region = memory.take()?.ok_or_else(|| closed("memory"))?;
        let Some(Owner::Pool(block)) = region.into_owner() else {
            return Err(invalid("it is no allocation of a pool"));
        };
        py.detach(|| block.free_on(&stream)).or_raise()
    }
}
