//! `egmem.Memory`: the base of buffers, blocks and fetched memory.

use std::ffi::c_int;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use egmem::driver::{Access, Location};
use egmem::size::Bytes;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView};
use pyo3::{PyClass, ffi};

use crate::args::{GpuArg, Size};
use crate::copies::{self, slice_of};
use crate::driver::Driver;
use crate::error::{OrRaise, closed, in_use, invalid, raise};
use crate::frees::{self, sweep};
use crate::interpreter::{Closing, Open, closing, drop_detached};
use crate::pickle::reduce;
use crate::places::{node_of, simulated_of};
use crate::region::{Owner, Region, access_text};
use crate::share::{Offer, offer};
use crate::stream::given;
use crate::view::{CPU, CUDA, View};
use crate::{dlpack, pickle};

/// Memory at one address for the CPU and the GPUs.
///
/// It is freed when the object and every view of it are gone. Views are made through the buffer protocol
/// (`memoryview(memory)`, `numpy.asarray(memory)`), DLPack (`torch.from_dlpack(memory)`) and the array interfaces;
/// none copies.
#[pyclass(extends = Closing, subclass, frozen, module = "egmem")]
pub struct Memory {
    open: Open<Arc<Region>>,
}

impl Memory {
    /// Holds a region.
    pub fn new(region: Region) -> Self {
        let open = Open::new(Arc::new(region));
        Self { open }
    }

    /// Returns the memory.
    ///
    /// # Errors
    /// `Closed`.
    pub fn region(&self) -> PyResult<Arc<Region>> {
        self.open.value().ok_or_else(|| closed("memory"))
    }

    /// Takes the memory out of the object; `None` if it was closed before.
    ///
    /// # Errors
    /// `InUse` if a view lives, or may live.
    pub fn take(&self, py: Python<'_>) -> PyResult<Option<Region>> {
        if let Some(shared) = self.open.value().and_then(|region| region.shared_before()) {
            pickle::revoke(&shared);
        }
        let region = self.take_without(py, |region| Arc::strong_count(region) - 1)?;
        Ok(region.and_then(Arc::into_inner))
    }

    /// Takes the memory out of the object for a tier, also while other processes may get it; `None` if it was closed
    /// before.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_offered(&self, py: Python<'_>) -> PyResult<Option<Arc<Region>>> {
        self.take_without(py, Region::views)
    }

    fn take_without(
        &self,
        py: Python<'_>,
        views: impl FnOnce(&Arc<Region>) -> usize,
    ) -> PyResult<Option<Arc<Region>>> {
        sweep(py);
        let views = {
            let mut open = self.open.lock();
            // In this order: a thread that makes an uncounted view has a share until it has noted that.
            match open
                .as_ref()
                .map(|region| (views(region), region.is_uncounted()))
            {
                Some((_, true)) => None,
                Some((views @ 1.., false)) => Some(views),
                _ => return Ok(open.take()),
            }
        };
        // The lock ends before, because making an exception runs Python code.
        Err(match views {
            Some(views) => in_use(&format!(
                "the memory cannot be closed: it has {views} live view(s), or copies on streams that still run"
            )),
            None => raise(
                "InUse",
                "the memory cannot be closed: its array interface was read, and nothing tells when such views end",
                "drop every reference to the memory and to its arrays: it is freed with the last one; or take views of \
                 memory.on(...), which are counted",
            ),
        })
    }

    /// Takes the memory, and the stream that it is freed after.
    ///
    /// # Errors
    /// As [`take`](Self::take) and [`given`]; `Closed`.
    pub fn take_after(
        &self,
        stream: &Bound<'_, PyAny>,
        gpu: Option<GpuArg>,
    ) -> PyResult<(Region, egmem::Stream)> {
        let region = self.region()?;
        region.expect_here()?;
        let own = given(&region.driver, stream, gpu, region.default_gpu())?;
        drop(region);
        let region = self.take(stream.py())?.ok_or_else(|| closed("memory"))?;
        Ok((region, own))
    }

    /// Puts back memory that was taken and could not be freed.
    pub fn put_back(&self, region: impl Into<Arc<Region>>) {
        let region = region.into();
        region.expose();
        *self.open.lock() = Some(region);
    }
}

/// Makes an object of a class that extends [`Memory`], which owns the bytes.
///
/// # Errors
/// Python's.
pub fn make<T: PyClass<BaseType = Memory>>(
    py: Python<'_>,
    kind: T,
    owner: Owner,
) -> PyResult<Bound<'_, PyAny>> {
    let memory = closing(Memory::new(Region::new(owner)));
    Ok(Bound::new(py, memory.add_subclass(kind))?.into_any())
}

#[pymethods]
impl Memory {
    /// The number of bytes.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.region()?.len)
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.region()?.len as usize)
    }

    /// The address of the first byte, the same for every GPU and, on a host node, for the CPU. It is valid while the
    /// object lives and is not closed.
    #[getter]
    fn address(&self) -> PyResult<u64> {
        let region = self.region()?;
        region.expose();
        Ok(region.address)
    }

    /// The host NUMA node, or `None` for memory of a GPU and on several nodes.
    #[getter]
    fn node(&self) -> PyResult<Option<i32>> {
        Ok(node_of(self.region()?.only_location()))
    }

    /// The host NUMA nodes that have parts of the memory, in ascending order.
    #[getter]
    fn nodes(&self) -> PyResult<Vec<i32>> {
        Ok(self.region()?.nodes())
    }

    /// Where the memory is, in words: `"host NUMA node 0"`, `"host NUMA nodes 0, 1"`, `"GPU 1"`.
    #[getter]
    fn location(&self) -> PyResult<String> {
        Ok(self.region()?.place())
    }

    /// The driver that the memory belongs to.
    #[getter]
    fn driver(&self) -> PyResult<Driver> {
        Ok(Driver::of(&self.region()?.driver))
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.open.is_closed()
    }

    /// Returns the access of the CPU (`gpu=None`) or a GPU: `"rw"`, `"r"` or `""`.
    #[pyo3(signature = (gpu=None))]
    fn access(&self, py: Python<'_>, gpu: Option<GpuArg>) -> PyResult<&'static str> {
        let region = self.region()?;
        region.expect_here()?;
        let access = match gpu {
            Some(gpu) => py.detach(|| region.gpu_access(gpu.0)).or_raise()?,
            None => match region.cpu(py) {
                Ok(bytes) if bytes.writable => Access::ReadWrite,
                Ok(_) => Access::Read,
                Err(error) if error.get_type(py).name()? == "NotAccessible" => Access::None,
                Err(error) => return Err(error),
            },
        };
        Ok(access_text(access))
    }

    /// Copies bytes out: `nbytes` of them from `offset` on, or all that follow.
    #[pyo3(signature = (offset=Size(0), nbytes=None), text_signature = "($self, offset=0, nbytes=None)")]
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: Size,
        nbytes: Option<Size>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let region = self.region()?;
        let bytes = region.cpu(py)?.part_or_rest(offset, nbytes)?;
        // SAFETY: the thread is attached. The CPU may read the range, which lies in the memory, and this call keeps the region.
        let copy = unsafe {
            let (from, len) = (bytes.ptr().cast(), bytes.len as ffi::Py_ssize_t);
            Bound::from_owned_ptr_or_err(py, ffi::PyBytes_FromStringAndSize(from, len))?
        };
        Ok(copy.cast_into()?)
    }

    /// Copies `data`, any object with the buffer protocol, to `offset`.
    ///
    /// Raises `NotAccessible` for memory that the CPU may not write.
    #[pyo3(signature = (data, offset=Size(0)), text_signature = "($self, data, offset=0)")]
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>, offset: Size) -> PyResult<()> {
        let data = PyMemoryView::from(data)?.call_method1("cast", ("B",))?;
        let data = PyBuffer::<u8>::get(&data)?;
        let (region, len) = (self.region()?, data.len_bytes());
        let bytes = region.writable(py)?.part(offset.0, len as u64)?;
        // SAFETY: the view keeps the data, which are contiguous since the cast. The CPU may write the range, which is as long;
        // this call keeps the region.
        unsafe { ptr::copy(data.buf_ptr().cast::<u8>(), bytes.ptr(), len) };
        Ok(())
    }

    /// Sets `nbytes` bytes from `offset` on, or all that follow, to `byte`, 0 to 255. Other threads run meanwhile.
    ///
    /// Raises `NotAccessible` for memory that the CPU may not write.
    #[pyo3(
        signature = (byte, offset=Size(0), nbytes=None),
        text_signature = "($self, byte, offset=0, nbytes=None)"
    )]
    fn fill(
        &self,
        py: Python<'_>,
        byte: &Bound<'_, PyAny>,
        offset: Size,
        nbytes: Option<Size>,
    ) -> PyResult<()> {
        let byte: u8 = byte.extract().map_err(|error: PyErr| {
            match error.is_instance_of::<PyOverflowError>(py) {
                true => invalid(&format!("byte is {byte}; valid: 0 to 255")),
                false => error,
            }
        })?;
        let region = self.region()?;
        let bytes = region.writable(py)?.part_or_rest(offset, nbytes)?;
        // SAFETY: this call keeps the region.
        py.detach(|| unsafe { bytes.fill(byte) }).or_raise()
    }

    /// Returns a view with a type and a shape, for one device: `"cpu"`, `"cuda_host"` or `"cuda:0"`. It copies
    /// nothing, and it exports DLPack and the array interfaces.
    ///
    /// `dtype` is a name such as `"float32"`, or a NumPy or PyTorch type. Without `shape` it has one dimension, to
    /// the memory's end; one dimension may be -1, which is then all that follows. `offset` is in bytes.
    #[pyo3(
        signature = (dtype=None, shape=None, *, offset=Size(0), device=None),
        text_signature = "($self, dtype=None, shape=None, *, offset=0, device=None)"
    )]
    fn view(
        &self,
        py: Python<'_>,
        dtype: Option<&Bound<'_, PyAny>>,
        shape: Option<&Bound<'_, PyAny>>,
        offset: Size,
        device: Option<&str>,
    ) -> PyResult<View> {
        View::bytes(self.region()?, device)?.typed(py, dtype, shape, offset.0)
    }

    /// Returns a view of all bytes for a device: `"cpu"`, `"cuda_host"` or `"cuda:0"`.
    fn on(&self, device: &str) -> PyResult<View> {
        View::bytes(self.region()?, Some(device))
    }

    /// Frees the memory now.
    ///
    /// Raises `InUse`, a `BufferError`, while a view lives. GPU work that uses the memory must have finished.
    pub fn close(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(region) = self.open.value() {
            region.expect_here()?;
        }
        if let Some(region) = self.take(py)? {
            py.detach(|| drop(region));
        }
        Ok(())
    }

    /// Fills in a view of the bytes, as Python's buffer protocol asks.
    ///
    /// # Safety
    /// As Python calls it: `view` may be written.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let py = slf.py();
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill in"));
        }
        // SAFETY: Python's view, not null. Without an object it is not released.
        unsafe { (*view).obj = ptr::null_mut() };
        frees::watch_captures(py)?;
        let region = slf.get().region()?;
        let bytes = region.cpu(py)?;
        if flags & ffi::PyBUF_WRITABLE != 0 && !bytes.writable {
            return Err(PyBufferError::new_err("the CPU may only read this memory"));
        }
        // Other libraries take the address from here: torch.from_numpy(array).to("cuda", non_blocking=True).
        region.expose();
        // SAFETY: the view is Python's. The bytes stay as long as the region, which the view owns from here until
        // `__releasebuffer__`; the function takes a new reference to the object.
        unsafe {
            let read_only = c_int::from(!bytes.writable);
            let len = bytes.len as ffi::Py_ssize_t;
            if ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                bytes.ptr().cast(),
                len,
                read_only,
                flags,
            ) != 0
            {
                return Err(PyErr::fetch(py));
            }
            (*view).internal = Arc::into_raw(region).cast_mut().cast();
        }
        Ok(())
    }

    /// Releases a view that `__getbuffer__` filled in.
    ///
    /// # Safety
    /// As Python calls it: once for each view.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `internal` came from `Arc::into_raw` and is given back once.
        let region = unsafe { Arc::from_raw((*view).internal.cast::<Region>().cast_const()) };
        drop_detached(region);
    }

    /// The dictionary of NumPy's array interface. Views that are made through it are not counted: after it was read,
    /// the object cannot be closed, and its memory is freed with its last reference.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let view = View::bytes(self.region()?, Some("cpu"))?;
        let dictionary = view.__array_interface__(py)?;
        view.region.count_no_views();
        Ok(dictionary)
    }

    /// The dictionary of CUDA's array interface, version 3. See `__array_interface__`.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let region = self.region()?;
        let gpu = region.default_gpu();
        let view = View::bytes(region, Some(&format!("cuda:{gpu}")))?;
        let dictionary = view.__cuda_array_interface__(py)?;
        view.region.count_no_views();
        Ok(dictionary)
    }

    /// Returns a DLPack capsule: of CPU memory, unless `dl_device` asks for pinned memory (3, 0) or a GPU (2,
    /// ordinal).
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let view = View::bytes(self.region()?, None)?;
        dlpack::export(py, &view, stream, max_version, dl_device, copy)
    }

    /// Returns (1, 0): CPU memory, which every library takes. `on("cuda:0")` has the device of a GPU.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let region = self.region()?;
        Ok(match region.location {
            Location::Device(gpu) => (CUDA, gpu),
            _ => (CPU, 0),
        })
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let name = slf.get_type().name()?;
        let Ok(region) = slf.get().region() else {
            return Ok(format!("<egmem.{name} closed>"));
        };
        let simulated = simulated_of(&region.driver);
        let (len, place, address) = (Bytes(region.len), region.place(), region.address);
        let access = region.access_in_words(slf.py());
        Ok(format!(
            "<egmem.{name} of {len} on {place} at {address:#x}{access}{simulated}>"
        ))
    }

    /// Offers the memory at a Unix socket, to every process of this user that calls `receive` with its path, until the
    /// result is closed or deleted. The memory cannot be closed meanwhile, but `egmem.kv.Tier.attach` takes it.
    ///
    /// The socket is the user's own (mode 0600). One at which a process listens is not replaced. With `mode="r"` other
    /// processes map the memory read-only: that protects against mistakes, not against their intent, because the kernel
    /// cannot limit an fd of this memory.
    ///
    /// Raises `TypeError` for memory that was not made with `shareable=True`.
    #[pyo3(signature = (path, *, mode="rw"))]
    fn share(slf: &Bound<'_, Self>, path: PathBuf, mode: &str) -> PyResult<Py<Offer>> {
        let name = slf.get_type().name()?.to_string();
        offer(slf.py(), &slf.get().region()?, &name, path, mode)
    }

    /// Copies all bytes to `other`, which has as many.
    ///
    /// Without `stream` the CPU copies, or a GPU where the CPU cannot reach one of them, and the copy is done when this
    /// returns: work of GPUs that writes the bytes must have finished. With `stream` a GPU copies after all work submitted
    /// to it so far and before all that follows, and both memories live until then: `close`, `free_after` and their like raise
    /// `InUse`. `gpu` is the stream's GPU, for a handle or an object without that attribute.
    #[pyo3(signature = (other, stream=None, *, gpu=None))]
    fn copy_to(
        &self,
        py: Python<'_>,
        other: &Bound<'_, Self>,
        stream: Option<&Bound<'_, PyAny>>,
        gpu: Option<GpuArg>,
    ) -> PyResult<()> {
        copies::copy(py, &self.region()?, &other.get().region()?, stream, gpu)
    }

    /// Returns a part as memory of its own, `memory[a:b]`: it copies nothing, and keeps this memory.
    fn __getitem__<'py>(
        slf: &Bound<'py, Self>,
        index: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slice_of(&slf.get().region()?, index)
    }

    /// Pickles the memory itself, for one process of this user: it maps the same bytes. See docs/python.md.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let name = slf.get_type().name()?.to_string();
        reduce(slf.py(), &slf.get().region()?, &name)
    }
}

/// Another process's memory, mapped here: unpickled, or received by `receive`.
///
/// It stays valid when the other process closes the memory or ends. A process maps the same memory once, however often
/// it gets it. A block of a heap may have another use once its process has freed it: do not free it there before this
/// process is done with it.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct SharedBuffer;
