//! `egmem.View`: memory with an element type, a shape and a device.

use std::sync::Arc;

use egmem::driver::Location;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyTuple};

use crate::args::{GpuArg, expect_gpu};
use crate::dlpack;
use crate::error::{OrRaise, invalid, raise};
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
    fn dtype(&self) -> &'static str {
        self.dtype.name
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
    /// memory is ready at once. A stream whose GPU is unknown is `gpu`'s, or the view's.
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
    /// Checks and makes a view. Without a device it is the CPU's, or the GPU's whose own memory this is.
    ///
    /// # Errors
    /// `InvalidArgument` for a type, shape, offset or device that the memory does not have; `NoSuchPlace` for a GPU
    /// that the machine does not have.
    pub fn new(
        region: Arc<Region>,
        dtype: Option<&Bound<'_, PyAny>>,
        shape: Option<&Bound<'_, PyAny>>,
        offset: u64,
        device: Option<&str>,
    ) -> PyResult<Self> {
        let dtype = dtype.map_or(Ok(Dtype::BYTES), Dtype::parse)?;
        let size = u64::from(dtype.size);
        let rest = region.len.checked_sub(offset);
        let rest = rest
            .ok_or_else(|| invalid(&format!("offset {offset} is beyond {} bytes", region.len)))?;
        if !(region.address + offset).is_multiple_of(size) {
            return Err(invalid(&format!(
                "offset {offset} is no multiple of {size}, the size of {}",
                dtype.name
            )));
        }
        let mut shape: Vec<i64> = match shape {
            None => vec![(rest / size) as i64],
            Some(one) if one.extract::<i64>().is_ok() => vec![one.extract()?],
            Some(all) => all
                .try_iter()?
                .map(|dimension| dimension?.extract())
                .collect::<PyResult<_>>()?,
        };
        let bytes_of = |shape: &[i64]| {
            shape.iter().try_fold(size, |bytes, &dimension| {
                bytes.checked_mul(u64::try_from(dimension).ok()?)
            })
        };
        if let Some(at) = shape.iter().position(|&dimension| dimension == -1) {
            let given = shape.clone();
            shape[at] = 1;
            let unit = bytes_of(&shape).filter(|&unit| unit > 0 && rest.is_multiple_of(unit));
            let unit = unit.ok_or_else(|| {
                invalid(&format!(
                    "shape {given:?} of {} does not divide {rest} bytes; valid: one dimension of -1, and others whose \
                     product divides them",
                    dtype.name
                ))
            })?;
            shape[at] = (rest / unit) as i64;
        } else if bytes_of(&shape).is_none_or(|bytes| bytes > rest) {
            return Err(invalid(&format!(
                "shape {shape:?} of {} does not fit into the {rest} bytes from offset {offset} on",
                dtype.name
            )));
        }
        let device = match (device, region.location) {
            (Some(device), _) => parse_device(device, &region.driver)?,
            (None, Location::Device(gpu)) => (CUDA, gpu),
            (None, _) => (CPU, 0),
        };
        Ok(Self {
            region,
            dtype,
            shape,
            offset,
            device,
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
        dictionary.set_item("typestr", self.dtype.typestr())?;
        dictionary.set_item("data", (self.address(), read_only))?;
        dictionary.set_item("strides", py.None())?;
        Ok(dictionary)
    }
}

/// An element type, as DLPack and the array interfaces name it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dtype {
    /// The name, as in NumPy and PyTorch.
    pub name: &'static str,
    /// DLPack's code: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool, from 7 on the kinds of float8.
    pub code: u8,
    /// The size in bytes.
    pub size: u8,
    /// The letter of the array interface, without byte order and size. `V` are bytes without a meaning.
    letter: char,
}

const fn dtype(name: &'static str, code: u8, size: u8, letter: char) -> Dtype {
    Dtype {
        name,
        code,
        size,
        letter,
    }
}

const ALL: [Dtype; 23] = [
    dtype("uint8", 1, 1, 'u'),
    dtype("int8", 0, 1, 'i'),
    dtype("uint16", 1, 2, 'u'),
    dtype("int16", 0, 2, 'i'),
    dtype("uint32", 1, 4, 'u'),
    dtype("int32", 0, 4, 'i'),
    dtype("uint64", 1, 8, 'u'),
    dtype("int64", 0, 8, 'i'),
    dtype("float16", 2, 2, 'f'),
    dtype("float32", 2, 4, 'f'),
    dtype("float64", 2, 8, 'f'),
    dtype("bfloat16", 4, 2, 'V'),
    dtype("complex64", 5, 8, 'c'),
    dtype("complex128", 5, 16, 'c'),
    dtype("bool", 6, 1, 'b'),
    dtype("float8_e3m4", 7, 1, 'V'),
    dtype("float8_e4m3", 8, 1, 'V'),
    dtype("float8_e4m3b11fnuz", 9, 1, 'V'),
    dtype("float8_e4m3fn", 10, 1, 'V'),
    dtype("float8_e4m3fnuz", 11, 1, 'V'),
    dtype("float8_e5m2", 12, 1, 'V'),
    dtype("float8_e5m2fnuz", 13, 1, 'V'),
    dtype("float8_e8m0fnu", 14, 1, 'V'),
];

impl Dtype {
    /// Bytes.
    pub const BYTES: Self = ALL[0];

    /// Returns the array interfaces' name: `<f4`, `|u1`.
    pub fn typestr(self) -> String {
        let order = if self.size == 1 || self.letter == 'V' {
            '|'
        } else {
            '<'
        };
        format!("{order}{}{}", self.letter, self.size)
    }

    /// Returns the first version of DLPack that has the type.
    pub fn dlpack_version(self) -> [u32; 2] {
        [1, u32::from(self.code >= 7)] // float8
    }

    /// Reads a name, a NumPy type, a PyTorch type, or a class such as `numpy.float32`.
    ///
    /// # Errors
    /// `InvalidArgument` for a type that is not here, and for one of the other byte order.
    pub fn parse(given: &Bound<'_, PyAny>) -> PyResult<Self> {
        if given.is_instance_of::<PyTuple>()
            || given.is_instance_of::<PyList>()
            || given.is_instance_of::<PyInt>()
        {
            let message = format!("dtype is {given}, which is a shape");
            let remedy = format!("pass shape={given}, and the element type as dtype");
            return Err(raise("InvalidArgument", &message, &remedy));
        }
        // NumPy's types have the same name in each byte order.
        let native = given.getattr("isnative").and_then(|is| is.extract());
        if !native.unwrap_or(true) {
            return Err(swapped(given));
        }
        let attributes = ["name", "__name__"].into_iter();
        let names = attributes.filter_map(|name| given.getattr(name).ok()?.extract().ok());
        let names: Vec<String> = names.chain([given.str()?.to_string()]).collect();
        if let Some(dtype) = names.iter().find_map(|name| Self::named(name)) {
            return Ok(dtype);
        }
        let other_order = |name: &String| name.strip_prefix('>').and_then(Self::named).is_some();
        if names.iter().any(other_order) {
            return Err(swapped(given));
        }
        let all: Vec<_> = ALL.iter().map(|dtype| dtype.name).collect();
        Err(invalid(&format!(
            "there is no element type {given}; valid: {}",
            all.join(", ")
        )))
    }

    /// Returns the type of a name, such as `float32` or `torch.float32`, or of a string of the array interfaces, such
    /// as `<f4`, `=f4` or `f4`.
    fn named(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        let short = name.strip_prefix(['<', '=', '|']).unwrap_or(name);
        // Bytes without a meaning are no type: several types are exported as such.
        ALL.into_iter().find(|dtype| {
            dtype.name == name || dtype.letter != 'V' && dtype.typestr()[1..] == *short
        })
    }
}

fn swapped(given: &Bound<'_, PyAny>) -> PyErr {
    let message = format!("elements of type {given} have the other byte order");
    let remedy =
        "pass a little-endian type, or view the memory as bytes and give those the type in NumPy";
    raise("InvalidArgument", &message, remedy)
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
