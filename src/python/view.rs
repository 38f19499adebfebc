//! `egmem.View`: memory with an element type, a shape and a device.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::args::GpuArg;
use crate::error::OrRaise;
use crate::span::Span;
use crate::{device, dlpack, interfaces};

/// Memory as one device sees it, with an element type and a shape. It keeps the memory, which cannot be closed
/// meanwhile.
///
/// Made by `Memory.view` and `Memory.on`. It exports DLPack, and the array interface of its device; none copies.
#[pyclass(frozen, module = "egmem")]
pub struct View {
    span: Span,
}

impl View {
    /// Wraps a part of memory.
    pub fn wrap(span: Span) -> Self {
        Self { span }
    }

    /// Returns the part of memory.
    pub fn span(&self) -> &Span {
        &self.span
    }
}

#[pymethods]
impl View {
    /// The number of elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.span.shape)
    }

    /// The element type's name.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.span.dtype.name
    }

    /// The device: `"cpu"`, `"cuda_host"` or `"cuda:0"`.
    #[getter]
    fn device(&self) -> String {
        device::name(self.span.device)
    }

    /// The number of bytes.
    #[getter]
    fn nbytes(&self) -> i64 {
        self.span.shape.iter().product::<i64>() * i64::from(self.span.dtype.size)
    }

    /// The dictionary of NumPy's array interface.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        interfaces::numpy(py, &self.span)
    }

    /// The dictionary of CUDA's array interface, version 3.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        interfaces::cuda(py, &self.span)
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
        dlpack::export(py, &self.span, stream, max_version, dl_device, copy)
    }

    /// Returns DLPack's device type and id.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.span.device
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
        let (kind, of_view) = self.span.device;
        let gpu = gpu.map(|gpu| gpu.0);
        let gpu = gpu.or((kind == device::CUDA).then_some(of_view));
        let region = &self.span.region;
        let stream = crate::stream::given(region.driver(), stream, gpu, region.default_gpu())?;
        match self.span.region.stream() {
            Some(own) => py.detach(|| stream.wait_for(own)).or_raise(),
            None => Ok(()),
        }
    }

    fn __repr__(&self) -> String {
        let device = self.device();
        format!(
            "<egmem.View {} {:?} on {device} at {:#x}>",
            self.span.dtype.name,
            self.span.shape,
            self.span.address()
        )
    }
}
