//! `Memory.copy_to`: by the CPU, or in the order of a stream; and parts of memory.
//!
//! **Lifetime.** A copy on a stream has a ticket, which owns both memories until the copy has run. The tickets are in a
//! list of the process. Those whose copies have run are dropped when a copy begins, when memory is closed, freed or taken by a tier, and
//! when memory is allocated.

use std::sync::{Arc, Mutex};

use egmem::driver::{Access, DevicePtr, Driver, Location, StreamHandle};
use egmem::memory::{AccessChecks, Engine, GrantUse};
use egmem::{Error, Stream, Transfer};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::args::{GpuArg, expect_gpu};
use crate::error::{OrRaise, ToPy, invalid};
use crate::frees::{keep_while_running, sweep};
use crate::interpreter::{PerProcess, lock};
use crate::memory::{Memory, make};
use crate::region::{CpuBytes, Owner, Reached, Region};

// SAFETY: each answer is that of the memory that the region owns, which lives as long as the region, at the part's
// place in it. A page, which has no answer for a GPU, allows it nothing.
unsafe impl AccessChecks for Region {
    fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> egmem::Result<Access> {
        let (memory, start) = self.reach()?;
        memory.gpu_access(gpu, engine, start + offset, len)
    }
    fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
        let of = |(memory, start): Reached<'_>| memory.is_read_only_for_cpu(start + offset, len);
        self.reach().map_or(true, of)
    }
    fn may_be_on_host(&self, offset: u64, len: u64) -> bool {
        let of = |(memory, start): Reached<'_>| memory.may_be_on_host(start + offset, len);
        self.reach().map_or(true, of)
    }
    fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
        let of = |(memory, start): Reached<'_>| memory.of_one_copy(start + offset, len);
        self.reach().map_or(len, of)
    }
    fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
        let (memory, start) = self.reach().ok()?;
        memory.of_one_mapping(start + offset, len)
    }
    fn hold_grants(&self) -> Option<GrantUse> {
        self.reach().ok()?.0.hold_grants()
    }
    unsafe fn ready_on(&self, stream: StreamHandle) -> egmem::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.reach()?.0.ready_on(stream) }
    }
}

impl egmem::Memory for Region {
    fn driver(&self) -> &Driver {
        &self.driver
    }
    fn device_ptr(&self) -> DevicePtr {
        DevicePtr(self.address)
    }
    fn len(&self) -> u64 {
        self.len
    }
    fn location(&self) -> Location {
        self.location
    }
}

/// Streams of this module on which no copy runs: another stream may end at any time, so it has no ticket.
static SPARE: PerProcess<Mutex<Vec<Stream>>> = PerProcess::new();

fn spare() -> &'static Mutex<Vec<Stream>> {
    SPARE.get(|_| Mutex::default())
}

/// Returns a stream on which no copy runs.
fn own_stream(driver: &Driver, gpu: i32) -> egmem::Result<Stream> {
    let fits = |stream: &Stream| stream.driver().same(driver) && stream.device() == gpu;
    let found = {
        let mut spare = lock(spare());
        spare.iter().position(fits).map(|at| spare.swap_remove(at))
    };
    found.map_or_else(|| Stream::new(driver, gpu), Ok)
}

/// Keeps a ticket until its copy has run.
fn keep(ticket: Transfer<(Arc<Region>, Arc<Region>)>) {
    keep_while_running(move || {
        let is_over = match ticket.is_done() {
            Ok(done) => done,
            Err(error) => matches!(error, Error::ContextLost { .. }),
        };
        if is_over {
            lock(spare()).push(ticket.stream().clone());
        }
        is_over
    });
}

/// Copies all bytes of `from` to `to`, which has as many.
///
/// # Errors
/// `InvalidArgument` for other sizes, other drivers, parts that overlap, and a stream that is being captured;
/// `NotAccessible`; the driver's errors.
pub fn copy(
    py: Python<'_>,
    from: &Arc<Region>,
    to: &Arc<Region>,
    stream: Option<&Bound<'_, PyAny>>,
    gpu: Option<GpuArg>,
) -> PyResult<()> {
    from.expect_here()?;
    to.expect_here()?;
    if !from.driver.same(&to.driver) {
        return Err(invalid(
            "source and destination belong to two drivers; valid: memory of one driver",
        ));
    }
    if from.len != to.len {
        return Err(invalid(&format!(
            "the destination has {} bytes and the source {}; slices, memory[a:b], make them equal",
            to.len, from.len
        )));
    }
    sweep(py);
    if let Some(gpu) = gpu {
        expect_gpu(gpu.0, &from.driver)?;
    }
    let usual = match (from.location, to.location) {
        (Location::Device(gpu), _) | (_, Location::Device(gpu)) => gpu,
        _ => from.stream().or(to.stream()).map_or(0, Stream::device),
    };
    let Some(stream) = stream else {
        if let (Ok(source), Ok(target)) = (from.cpu(py), to.cpu(py))
            && target.writable
        {
            py.detach(move || by_cpu(source, target));
            return Ok(());
        }
        return by_gpu(py, from, to, gpu.map_or(usual, |gpu| gpu.0));
    };
    let theirs = crate::stream::given(&from.driver, stream, gpu, usual)?;
    on_stream(py, from, to, &theirs)
}

/// Copies, also between parts that overlap.
fn by_cpu(from: CpuBytes, to: CpuBytes) {
    // SAFETY: the CPU may read the one range and write the other, which have one length; the caller keeps both regions.
    // Other threads may use the bytes meanwhile, as through any view in Python: the program orders such uses.
    unsafe { std::ptr::copy(from.ptr(), to.ptr(), from.len as usize) };
}

fn expect_apart(from: &Arc<Region>, to: &Arc<Region>) -> PyResult<()> {
    let (a, b, len) = (from.address, to.address, from.len);
    if len > 0 && a < b.saturating_add(len) && b < a.saturating_add(len) {
        return Err(invalid(
            "source and destination overlap, and a GPU copies in no order; without stream= the CPU copies them",
        ));
    }
    Ok(())
}

/// Copies with a GPU, and waits.
fn by_gpu(py: Python<'_>, from: &Arc<Region>, to: &Arc<Region>, gpu: i32) -> PyResult<()> {
    expect_apart(from, to)?;
    py.detach(|| {
        let stream = own_stream(&from.driver, gpu)?;
        let done = stream.copy(&**to, 0, &**from, 0, from.len);
        lock(spare()).push(stream);
        done
    })
    .or_raise()
}

/// Has a stream of this module copy after all work of `theirs` so far, and `theirs` go on after the copy.
fn on_stream(
    py: Python<'_>,
    from: &Arc<Region>,
    to: &Arc<Region>,
    theirs: &Stream,
) -> PyResult<()> {
    expect_apart(from, to)?;
    let sides = ((Arc::clone(to), 0), (Arc::clone(from), 0));
    py.detach(|| {
        if theirs.is_capturing()? {
            let why = "it is being captured into a graph: copy before or after the capture";
            return Err(Error::invalid("stream", why));
        }
        let own = own_stream(&from.driver, theirs.device())?;
        own.wait_for(theirs)?;
        let ticket = own
            .start_copy(sides.0, sides.1, from.len)
            .map_err(|failed| *failed.error)?;
        let ordered = theirs.wait_for(&own);
        keep(ticket);
        ordered
    })
    .map_err(ToPy::to_py)
}

/// A part of memory, made by `memory[a:b]`. It keeps the memory, which cannot be closed meanwhile, and is used in the
/// same ways.
#[pyclass(extends = Memory, subclass, frozen, module = "egmem")]
pub struct Slice {
    /// Where it begins in the memory that it is a part of, in bytes.
    #[pyo3(get)]
    offset: u64,
}

/// Returns the slice `memory[index]`.
///
/// # Errors
/// `TypeError` for an index that is no slice, `InvalidArgument` for a step other than 1.
pub fn slice_of<'py>(
    region: &Arc<Region>,
    index: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let Ok(slice) = index.cast::<PySlice>() else {
        return Err(PyTypeError::new_err(format!(
            "memory is indexed by slices of bytes, not by {}; what to do: use memory[a:b], or memoryview(memory)[i] for one byte",
            index.get_type().name()?
        )));
    };
    let found = slice.indices(region.len as isize)?;
    if found.step != 1 {
        return Err(invalid(&format!(
            "a slice of memory has step 1, not {}; numpy.asarray(memory)[a:b:step] has others",
            found.step
        )));
    }
    let (whole, start) = region.whole();
    let offset = start + found.start as u64;
    let owner = Owner::Part {
        whole: Arc::clone(whole),
        offset,
        len: found.slicelength as u64,
    };
    make(index.py(), Slice { offset }, owner)
}
