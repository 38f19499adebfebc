//! `egmem.Buffer`: memory that is mapped for itself.

use std::sync::Arc;

use egmem::driver::{Access, DevicePtr, Location};
use egmem::topology::Placement;
use egmem::{BufferOptions, Growth};
use pyo3::prelude::*;

use crate::args::{GpuArg, NodeArg, Size, With, choice};
use crate::backing::{self, Words};
use crate::class::closing;
use crate::driver::{Driver, given_or_default};
use crate::error::{OrRaise, invalid};
use crate::interrupts::told;
use crate::memory::Memory;
use crate::places::location;
use crate::region::{Owner, Region};
use crate::site::from_program;

/// Memory on a chosen node, mapped at one address for the CPU and the GPUs.
///
/// `Buffer(nbytes, node=0)` is on a host node, `near_gpu=1` on the host node nearest to that GPU, `device=1` in the
/// GPU's own memory, `spread=True` on all host nodes. Without any of them it is near GPU 0. A node may be an
/// `egmem.Node`, a GPU an `egmem.Gpu`. A size is a number of bytes, or text such as `"64MiB"`; the memory is rounded
/// up to 2 MiB.
///
/// `access_by` lists the GPUs that may use it (default: all that can), `host` is the CPU's access: `"rw"`, `"r"` or
/// `""`. `label` names it in `egmem ps`. `overcommit` asks for more than the node has free.
///
/// `backing` is what host memory is made of: `"driver"` (the default) memory that the driver creates, `"registered"` pages of
/// this process that the driver pins, several times as fast, `"auto"` registered pages where they are as good or better.
/// Copies of other libraries fail if they reach over a border of two chunks of registered memory. With `one_copy`, `"auto"` is
/// `"driver"` where there would be such a border.
///
/// Host memory is allocated in chunks of 64 MiB, of a 2048th if it can be shared and has more than 128 GiB; `gentle`
/// takes chunks of 16 MiB with rests between them, so that other processes' driver calls wait less. `progress(done,
/// total)` is called after each chunk, in bytes and with no lock held. If it raises, or a signal does, such as Ctrl-C
/// between two chunks, everything is given back.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct Buffer;

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
        access_by: Option<Vec<GpuArg>>,
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
        let backing = backing.map(backing::parse).transpose()?;
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
        let memory = Memory::new(Region::new(Owner::Buffer(Arc::new(buffer))));
        Ok(closing(memory).add_subclass(Self))
    }

    /// The bytes allocated: those requested, rounded up.
    #[getter]
    fn padded(slf: PyRef<'_, Self>) -> PyResult<u64> {
        let region = slf.as_super().region()?;
        match region.owner().or_raise()? {
            Owner::Buffer(buffer) => Ok(buffer.padded()),
            _ => Ok(region.len()),
        }
    }

    /// What the memory is: `"driver"` or `"registered"`.
    #[getter]
    fn backing(slf: PyRef<'_, Self>) -> PyResult<String> {
        Ok(words(&slf)?.backing)
    }

    /// Why it is that.
    #[getter]
    fn backing_reason(slf: PyRef<'_, Self>) -> PyResult<String> {
        Ok(words(&slf)?.reason)
    }
}

fn words(buffer: &PyRef<'_, Buffer>) -> PyResult<Words> {
    let region = buffer.as_super().region()?;
    match region.owner().or_raise()? {
        Owner::Buffer(own) => Ok(own.backing().into()),
        _ => backing::at(buffer.py(), region.driver(), DevicePtr(region.address())),
    }
}

/// Parses the CPU's access.
///
/// # Errors
/// `InvalidArgument`.
pub fn access(text: &str) -> PyResult<Access> {
    let words = [
        ("rw", Access::ReadWrite),
        ("r", Access::Read),
        ("", Access::None),
    ];
    choice("host", text, &words)
}
