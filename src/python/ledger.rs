//! `egmem.allocations`, `egmem.locate`, `egmem.memory_summary`: this process's ledger, and what it has of new memory.

use egmem::Backing;
use egmem::backing::Why;
use egmem::driver::DevicePtr;
use egmem::ledger::{self, CallSite, Ledger};
use egmem::size::Bytes;
use pyo3::exceptions::{PyImportError, PyTypeError};
use pyo3::prelude::*;

use crate::driver::{Driver, given, given_or_default};
use crate::error::{OrRaise, invalid};
use crate::interpreter::{python, to_python};
use crate::memory::Memory;
use crate::places::node_of;
use crate::view::View;

/// A live allocation of this process, as it was when it was asked for. Made by `allocations` and `locate`.
///
/// A heap's chunks are allocations, its blocks are not.
#[pyclass(frozen, module = "egmem")]
pub struct Allocation {
    inner: ledger::Allocation,
}

impl Allocation {
    fn site(&self) -> Option<&ledger::CallSite> {
        self.inner.site.as_ref()
    }
}

#[pymethods]
impl Allocation {
    /// Its size in bytes, in the allocator's units.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes
    }

    /// Where it is, in words: `"host NUMA node 0"`, `"GPU 1"`.
    #[getter]
    fn location(&self) -> String {
        self.inner.location.to_string()
    }

    /// The host NUMA node, or `None` for memory of a GPU or on no particular node.
    #[getter]
    fn node(&self) -> Option<i32> {
        node_of(self.inner.location)
    }

    /// How it was allocated: `"vmm"`, `"heap chunk"`, `"pool"`, `"import"`, …
    #[getter]
    fn kind(&self) -> &'static str {
        self.inner.path.name()
    }

    /// The name that the program gave, or `None`.
    #[getter]
    fn label(&self) -> Option<&str> {
        self.inner.label.as_deref()
    }

    /// Seconds since it was allocated or imported.
    #[getter]
    fn age(&self) -> f64 {
        self.inner.age_ms as f64 / 1000.0
    }

    /// The file of the line that allocated it, or `None`: no Python code called.
    #[getter]
    fn file(&self) -> Option<&str> {
        self.site().map(|site| site.file.as_str())
    }

    /// The line, or `None`.
    #[getter]
    fn line(&self) -> Option<u32> {
        self.site().map(|site| site.line)
    }

    /// The function, or `None`.
    #[getter]
    fn function(&self) -> Option<&str> {
        self.site()?.function.as_deref()
    }

    /// The stack of the call, as a traceback shows it; `None` unless `EGMEM_BACKTRACES=1`.
    #[getter]
    fn stack(&self) -> Option<String> {
        self.site()?.backtrace.clone()
    }

    /// The first address, or `None` if it is not mapped.
    #[getter]
    fn address(&self) -> Option<u64> {
        self.inner.mapped.first().map(|at| at.start)
    }

    /// The driver: `"cuda"` or `"simulated"`.
    #[getter]
    fn driver(&self) -> &str {
        &self.inner.driver
    }

    /// Returns all that is known, with the keys of `egmem ps --json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.inner)
    }

    fn __repr__(&self) -> String {
        let label = self.label().map(|label| format!(" {label:?}"));
        let site = self.site().map(|site| format!(", allocated at {site}"));
        format!(
            "<egmem.Allocation{} of {} on {}, {}{}>",
            label.unwrap_or_default(),
            Bytes(self.inner.bytes),
            self.inner.location,
            self.kind(),
            site.unwrap_or_default()
        )
    }
}

/// The memory at an address. Made by `locate`.
#[pyclass(frozen, get_all, module = "egmem")]
pub struct Located {
    /// The allocation, or `None`: another library has allocated the memory.
    allocation: Option<Py<Allocation>>,
    /// The bytes from the start of the mapping or of the other library's allocation to the address; `None` if the driver does
    /// not tell.
    offset: Option<u64>,
    /// Where the memory is, in words; `None` if the driver does not tell.
    location: Option<String>,
    /// The size of the allocation in bytes; `None` if the driver does not tell.
    nbytes: Option<u64>,
}

#[pymethods]
impl Located {
    fn __repr__(&self) -> String {
        let offset = self.offset.map(|offset| format!("offset {offset} of "));
        let what = match &self.allocation {
            Some(allocation) => allocation.get().__repr__(),
            None => format!(
                "memory of another library on {}",
                self.location.as_deref().unwrap_or("an unknown place")
            ),
        };
        format!("<egmem.Located {}{what}>", offset.unwrap_or_default())
    }
}

impl Located {
    fn own(py: Python<'_>, allocation: ledger::Allocation, offset: u64) -> PyResult<Self> {
        Ok(Self {
            offset: Some(offset),
            location: Some(allocation.location.to_string()),
            nbytes: Some(allocation.bytes),
            allocation: Some(Py::new(py, Allocation { inner: allocation })?),
        })
    }
}

/// Returns this process's live allocations, the oldest first: those of `driver`, or of all drivers.
#[pyfunction]
#[pyo3(signature = (driver=None))]
pub fn allocations(
    py: Python<'_>,
    driver: Option<&Bound<'_, Driver>>,
) -> PyResult<Vec<Allocation>> {
    let driver = given(driver)?;
    let all = py.detach(|| match &driver {
        Some(driver) => ledger::allocations(driver),
        None => ledger::all_allocations(),
    });
    Ok(all.into_iter().map(|inner| Allocation { inner }).collect())
}

/// Returns a table of this process's memory: sums by node and GPU, and the labels and lines that have most of it. `driver`
/// as for `allocations`.
#[pyfunction]
#[pyo3(signature = (driver=None))]
pub fn memory_summary(py: Python<'_>, driver: Option<&Bound<'_, Driver>>) -> PyResult<String> {
    let driver = given(driver)?;
    Ok(py.detach(|| {
        let ledger = match &driver {
            Some(driver) => Ledger::of(driver),
            None => Ledger::of_this_process(),
        };
        ledger.to_text()
    }))
}

/// Returns whose memory is at an address: the allocation of this process with the offset, or what the driver tells of memory
/// that another library has allocated. `None` for memory that is no driver's, such as a plain array.
///
/// `memory` is an address, memory or a view of this package, or an array: of NumPy, PyTorch, CuPy or with an array interface.
/// `driver` is the memory's driver; by default all drivers of this process are asked.
#[pyfunction]
#[pyo3(signature = (memory, driver=None))]
pub fn locate(
    py: Python<'_>,
    memory: &Bound<'_, PyAny>,
    driver: Option<&Bound<'_, Driver>>,
) -> PyResult<Option<Located>> {
    let (address, own) = address_of(memory)?;
    let driver = given(driver)?.or(own);
    if driver.is_none()
        && let Some((allocation, offset)) = py.detach(|| among_all(address))
    {
        return Located::own(py, allocation, offset).map(Some);
    }
    let driver = driver.map_or_else(|| given_or_default(py, None), Ok);
    let Ok(driver) = driver else {
        return Ok(None); // without a driver no address is a driver's
    };
    let found = py.detach(|| ledger::locate(&driver, DevicePtr(address)));
    match found.or_raise()? {
        ledger::Located::Allocation {
            allocation, offset, ..
        } => Located::own(py, *allocation, offset).map(Some),
        ledger::Located::Foreign(memory) => Ok(Some(Located {
            allocation: None,
            offset: memory.start.and_then(|start| address.checked_sub(start)),
            location: memory.location.map(|location| location.to_string()),
            nbytes: memory.bytes,
        })),
        _ => Ok(None),
    }
}

/// Finds the allocation with an address, of any driver.
fn among_all(address: u64) -> Option<(ledger::Allocation, u64)> {
    let mut all = ledger::all_allocations().into_iter();
    all.find_map(|allocation| {
        let mut ranges = allocation.mapped.iter();
        let offset = ranges.find_map(|range| range.offset_of(address))?;
        Some((allocation, offset))
    })
}

/// Returns the address of an object's bytes, and its driver if it is this package's.
///
/// # Errors
/// `TypeError` for an object without an address; `InvalidArgument` for a number that is none; `Closed`.
fn address_of(memory: &Bound<'_, PyAny>) -> PyResult<(u64, Option<egmem::Driver>)> {
    if let Ok(memory) = memory.cast::<Memory>() {
        let region = memory.get().region()?;
        return Ok((region.address, Some(region.driver.clone())));
    }
    if let Ok(view) = memory.cast::<View>() {
        let view = view.get();
        return Ok((view.address(), Some(view.region.driver.clone())));
    }
    if let Ok(tensor) = memory.call_method0("data_ptr") {
        return Ok((tensor.extract()?, None));
    }
    // An array of one number is a number too. NumPy's numbers, which are no arrays, have its interface.
    if memory.hasattr("__index__")? && !memory.hasattr("__setitem__")? {
        let wrong = |_| invalid(&format!("address is {memory}; valid: 0 to 2**64 - 1"));
        return Ok((memory.extract().map_err(wrong)?, None));
    }
    for interface in ["__array_interface__", "__cuda_array_interface__"] {
        if let Ok(found) = memory.getattr(interface) {
            return Ok((found.get_item("data")?.get_item(0)?.extract()?, None));
        }
    }
    let kind = memory.get_type().name()?;
    Err(PyTypeError::new_err(format!(
        "memory is of type {kind}, which has no address: pass an address, memory of egmem, or an array"
    )))
}

/// Calls `work`, whose allocations have the line of the program in the ledger: that of the first Python frame outside of
/// this package, with the stack if `EGMEM_BACKTRACES` asks for it. A heap's chunks have the line that made the heap.
///
/// A thread without such a frame, as other libraries start, has no line.
///
/// # Errors
/// The exception of a signal handler, which may run while Python looks for the line; those of `work`.
pub fn from_program<T>(py: Python<'_>, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    ledger::called_from(line(py)?, work)
}

/// Returns the line; `None` without a frame of the program, and late in the interpreter's shutdown, which has no modules.
fn line(py: Python<'_>) -> PyResult<Option<CallSite>> {
    type Line = (String, u32, String, Option<String>);
    let frames = match py.import("egmem._frames") {
        Ok(frames) => frames,
        Err(error) if error.is_instance_of::<PyImportError>(py) => return Ok(None),
        Err(error) => return Err(error),
    };
    let arguments = (ledger::captures_backtraces(),);
    let found = python(py, || frames.call_method1("caller", arguments))?;
    let Ok(Some((file, line, function, stack))) = found.extract::<Option<Line>>() else {
        return Ok(None);
    };
    let site = CallSite::new(file, line).function(function);
    Ok(Some(match stack {
        Some(stack) => site.backtrace(&stack),
        None => site,
    }))
}

/// Returns what the memory at an address is, and why. Memory without a decision is the driver's.
///
/// # Errors
/// The driver's.
pub fn backing_at(
    py: Python<'_>,
    driver: &egmem::Driver,
    address: DevicePtr,
) -> PyResult<(Backing, Why)> {
    let located = py.detach(|| ledger::locate(driver, address)).or_raise()?;
    let chosen = match located {
        ledger::Located::Allocation { allocation, .. } => allocation.backing,
        _ => None,
    };
    let asked = (Backing::Driver, Why::Asked);
    Ok(chosen.map_or(asked, |chosen| (chosen.backing, chosen.why)))
}
