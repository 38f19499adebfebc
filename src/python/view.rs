//! `egmem.View`: memory with an element type, a shape and a device.

use std::borrow::Cow;
use std::sync::Arc;

use egmem::driver::Location;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::args::{GpuArg, expect_gpu};
use crate::dlpack;
use crate::error::{OrRaise, invalid, raise};
use crate::interpreter::call;
use crate::region::Region;

/// Memory as one device sees it, with an element type and a shape. It keeps the memory, which cannot be closed
/// meanwhile.
///
/// Made by `Memory.view` and `Memory.on`. It exports DLPack, and the array interface of its device; none copies.
#[pyclass(frozen, module = "egmem")]
pub struct View {
    /// The memory.
    pub region: Arc<Region>,
    /// The elements' type.
    pub dtype: Dtype,
    /// The elements' number in each dimension; the last one is contiguous.
    pub shape: Vec<i64>,
    /// The first element, in bytes from the memory's start.
    pub offset: u64,
    /// DLPack's device type and id.
    pub device: (i32, i32),
}

#[pymethods]
impl View {
    /// The number of elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The element type's name.
    #[getter]
    fn dtype(&self) -> &str {
        &self.dtype.name
    }

    /// The device: `"cpu"`, `"cuda_host"` or `"cuda:0"`.
    #[getter]
    fn device(&self) -> String {
        device_name(self.device)
    }

    /// The number of bytes.
    #[getter]
    fn nbytes(&self) -> i64 {
        self.shape.iter().product::<i64>() * i64::from(self.dtype.size)
    }

    /// The dictionary of NumPy's array interface.
    #[getter]
    pub fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let bytes = self.region.cpu(py)?;
        self.interface(py, !bytes.writable)
    }

    /// The dictionary of CUDA's array interface, version 3. Its stream is the one that a pool's allocation is ordered by.
    ///
    /// Raises `NoDeviceInterface`, which is also an `AttributeError`, for a view that is no GPU's and on a simulated driver.
    #[getter]
    pub fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (kind, gpu) = self.device;
        if kind != CUDA {
            let message = "a view of the CPU has no CUDA array interface";
            let remedy = "use a view of a GPU: memory.on(\"cuda:0\")";
            return Err(raise("NoDeviceInterface", message, remedy));
        }
        let writable = self.region.gpu(py, gpu)?;
        let dictionary = self.interface(py, !writable)?;
        let stream = self.region.stream().map(|stream| stream.handle().raw);
        // 0 would be ambiguous: 1 is the legacy default stream.
        dictionary.set_item("stream", stream.map(|raw| raw.max(1)))?;
        Ok(dictionary)
    }

    /// Returns a DLPack capsule.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        dlpack::export(py, self, stream, max_version, dl_device, copy)
    }

    /// Returns DLPack's device type and id.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.device
    }

    /// Makes work that is submitted to `stream` from now on wait for the memory's allocation in its pool. Other
    /// memory is ready at once. A stream whose GPU is unknown is `gpu`'s, or the view's. The free does not follow the
    /// stream: pass it to `PoolBlock.free_after`.
    #[pyo3(signature = (stream, *, gpu=None))]
    fn ready_on(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        gpu: Option<GpuArg>,
    ) -> PyResult<()> {
        let (kind, of_view) = self.device;
        let gpu = gpu.or((kind == CUDA).then_some(GpuArg(of_view)));
        let region = &self.region;
        let stream = crate::stream::given(&region.driver, stream, gpu, region.default_gpu())?;
        match region.stream() {
            Some(own) => py.detach(|| stream.wait_for(own)).or_raise(),
            None => Ok(()),
        }
    }

    fn __repr__(&self) -> String {
        let device = self.device();
        format!(
            "<egmem.View {} {:?} on {device} at {:#x}>",
            self.dtype.name,
            self.shape,
            self.address()
        )
    }
}

impl View {
    /// Returns a view of all bytes. Without a device it is the CPU's, or the GPU's whose own memory this is.
    ///
    /// # Errors
    /// `InvalidArgument` for another word than a device's; `NoSuchPlace` for a GPU that the machine does not have.
    pub fn bytes(region: Arc<Region>, device: Option<&str>) -> PyResult<Self> {
        let device = match (device, region.location) {
            (Some(device), _) => parse_device(device, &region.driver)?,
            (None, Location::Device(gpu)) => (CUDA, gpu),
            (None, _) => (CPU, 0),
        };
        Ok(Self {
            shape: vec![region.len as i64],
            dtype: Dtype {
                name: "uint8".into(),
                code: 1,
                size: 1,
                typestr: "|u1".into(),
            },
            offset: 0,
            region,
            device,
        })
    }

    /// Returns a view of elements from `offset` on.
    ///
    /// # Errors
    /// As [`bytes`](Self::bytes); `InvalidArgument` for a type, shape or offset that the memory does not have.
    pub fn typed(
        self,
        py: Python<'_>,
        dtype: Option<&Bound<'_, PyAny>>,
        shape: Option<&Bound<'_, PyAny>>,
        offset: u64,
    ) -> PyResult<Self> {
        let arguments = (dtype, shape, self.region.address, self.region.len, offset);
        let read = call(py, "egmem._views", "read", arguments)?;
        let (dtype, shape) = read.extract()?;
        Ok(Self {
            dtype,
            shape,
            offset,
            ..self
        })
    }

    /// Returns the first element's address.
    pub fn address(&self) -> u64 {
        self.region.address + self.offset
    }

    /// Returns the dictionary that both array interfaces have.
    fn interface<'py>(&self, py: Python<'py>, read_only: bool) -> PyResult<Bound<'py, PyDict>> {
        crate::frees::watch_captures(py)?;
        self.region.expose();
        let dictionary = PyDict::new(py);
        dictionary.set_item("version", 3)?;
        dictionary.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        dictionary.set_item("typestr", &self.dtype.typestr)?;
        dictionary.set_item("data", (self.address(), read_only))?;
        dictionary.set_item("strides", py.None())?;
        Ok(dictionary)
    }
}

/// An element type, as `egmem._views` reads it.
#[derive(FromPyObject)]
pub struct Dtype {
    /// The name, as in NumPy and PyTorch.
    #[pyo3(from_py_with = owned)]
    name: Cow<'static, str>,
    /// DLPack's code; from 7 on the kinds of float8.
    pub code: u8,
    /// The size in bytes.
    pub size: u8,
    /// The array interfaces' name.
    #[pyo3(from_py_with = owned)]
    typestr: Cow<'static, str>,
}

fn owned(text: &Bound<'_, PyAny>) -> PyResult<Cow<'static, str>> {
    text.extract().map(Cow::Owned)
}

/// `kDLCPU`.
pub const CPU: i32 = 1;
/// `kDLCUDA`.
pub const CUDA: i32 = 2;
/// `kDLCUDAHost`: pinned memory of the CPU.
pub const CUDA_HOST: i32 = 3;

/// Returns DLPack's device for its name.
///
/// # Errors
/// `InvalidArgument` for another name; `NoSuchPlace` for a GPU that the driver's machine does not have.
pub fn parse_device(name: &str, driver: &egmem::Driver) -> PyResult<(i32, i32)> {
    let gpu = |digits: &str| digits.parse::<i32>().ok().filter(|gpu| *gpu >= 0);
    match (name, name.strip_prefix("cuda:").and_then(gpu)) {
        ("cpu", _) => Ok((CPU, 0)),
        ("cuda_host", _) => Ok((CUDA_HOST, 0)),
        (_, Some(gpu)) => {
            expect_gpu(gpu, driver)?;
            Ok((CUDA, gpu))
        }
        _ => Err(invalid(&format!(
            "there is no device {name:?}; valid: \"cpu\", \"cuda_host\", \"cuda:0\" and so on"
        ))),
    }
}

/// Returns the name of DLPack's device.
pub fn device_name((kind, gpu): (i32, i32)) -> String {
    match kind {
        CPU => "cpu".into(),
        CUDA_HOST => "cuda_host".into(),
        _ => format!("cuda:{gpu}"),
    }
}
