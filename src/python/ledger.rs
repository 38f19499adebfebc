//! This process's ledger for `egmem._ledger`, `egmem.memory_summary`, and the lines of the program that allocates.

use egmem::Backing;
use egmem::backing::Why;
use egmem::driver::DevicePtr;
use egmem::ledger::{self, CallSite, Ledger};
use egmem::size::Bytes;
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

use crate::driver::{Driver, given, given_or_default};
use crate::error::OrRaise;
use crate::interpreter::{python, to_python};
use crate::memory::Memory;
use crate::places::node_of;
use crate::view::View;

/// An allocation as `egmem._ledger` takes it: a text about it, its location in words, its node, how it was allocated, and all
/// that is known.
type Told = (
    String,
    String,
    Option<i32>,
    &'static str,
    ledger::Allocation,
);

fn told(allocation: ledger::Allocation) -> Told {
    let (location, kind) = (allocation.location, allocation.path.name());
    let label = allocation.label.iter();
    let label: String = label.map(|label| format!(" {label:?}")).collect();
    let site = allocation.site.iter();
    let site: String = site.map(|site| format!(", allocated at {site}")).collect();
    let bytes = Bytes(allocation.bytes);
    let text = format!("{label} of {bytes} on {location}, {kind}{site}");
    let node = node_of(location);
    (text, location.to_string(), node, kind, allocation)
}

/// Returns this process's live allocations, the oldest first: those of `driver`, or of all drivers.
#[pyfunction]
#[pyo3(name = "_allocations")]
pub fn allocations<'py>(
    py: Python<'py>,
    driver: Option<&Bound<'_, Driver>>,
) -> PyResult<Bound<'py, PyAny>> {
    let driver = given(driver)?;
    let all = py.detach(|| match &driver {
        Some(driver) => ledger::allocations(driver),
        None => ledger::all_allocations(),
    });
    to_python(py, &all.into_iter().map(told).collect::<Vec<_>>())
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

/// Memory at an address: the allocation, the offset in it, its location in words, and its size.
type Located = (Option<Told>, Option<u64>, Option<String>, Option<u64>);

/// Returns what is known of an address, or of memory or a view of this package, whose address is not given away here; `None`
/// for memory that is no driver's.
#[pyfunction]
#[pyo3(name = "_locate")]
pub fn locate<'py>(
    py: Python<'py>,
    memory: &Bound<'_, PyAny>,
    driver: Option<&Bound<'_, Driver>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (address, own) = if let Ok(memory) = memory.cast::<Memory>() {
        let region = memory.get().region()?;
        (region.address, Some(region.driver.clone()))
    } else if let Ok(view) = memory.cast::<View>() {
        let view = view.get();
        (view.address(), Some(view.region.driver.clone()))
    } else {
        (memory.extract()?, None)
    };
    let driver = given(driver)?.or(own);
    to_python(py, &located(py, address, driver)?)
}

fn located(
    py: Python<'_>,
    address: u64,
    driver: Option<egmem::Driver>,
) -> PyResult<Option<Located>> {
    let own = |allocation: ledger::Allocation, offset| {
        let (location, bytes) = (allocation.location.to_string(), allocation.bytes);
        (
            Some(told(allocation)),
            Some(offset),
            Some(location),
            Some(bytes),
        )
    };
    if driver.is_none()
        && let Some((allocation, offset)) = py.detach(|| among_all(address))
    {
        return Ok(Some(own(allocation, offset)));
    }
    let Ok(driver) = driver.map_or_else(|| given_or_default(py, None), Ok) else {
        return Ok(None); // without a driver no address is a driver's
    };
    let found = py.detach(|| ledger::locate(&driver, DevicePtr(address)));
    Ok(match found.or_raise()? {
        ledger::Located::Allocation {
            allocation, offset, ..
        } => Some(own(*allocation, offset)),
        ledger::Located::Foreign(memory) => {
            let offset = memory.start.and_then(|start| address.checked_sub(start));
            let location = memory.location.map(|location| location.to_string());
            Some((None, offset, location, memory.bytes))
        }
        _ => None,
    })
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
