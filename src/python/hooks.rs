//! Functions for the tests (feature `test-hooks`): no wheel that is given away has them.

use std::ffi::c_void;
use std::time::Instant;

use egmem::driver::sim::Sim;
use egmem::driver::{Call, Code, StreamHandle};
use pyo3::prelude::*;

use crate::driver::Driver;
use crate::error::{invalid, not_supported};
use crate::torch_alloc::{FUNCTIONS, TorchSlot};

fn sim(driver: &Driver) -> PyResult<&Sim> {
    let sim = driver.inner.sim();
    sim.ok_or_else(|| invalid("the driver is not simulated"))
}

/// Begins a capture of a stream of a simulated driver into a graph.
#[pyfunction]
#[pyo3(signature = (driver, gpu, stream, *, blocking=false))]
pub fn _begin_capture(driver: &Driver, gpu: i32, stream: u64, blocking: bool) -> PyResult<()> {
    let (device, raw) = (gpu, stream);
    sim(driver)?.begin_capture(StreamHandle { device, raw }, blocking);
    Ok(())
}

/// Ends it; returns whether no call has made it invalid.
#[pyfunction]
pub fn _end_capture(driver: &Driver, gpu: i32, stream: u64) -> PyResult<bool> {
    let (device, raw) = (gpu, stream);
    Ok(sim(driver)?.end_capture(StreamHandle { device, raw }))
}

/// Has the next uses of a call of a simulated driver fail: by its name in CUDA, with a code.
#[pyfunction]
#[pyo3(signature = (driver, call, code, *, times=1))]
pub fn _fail(driver: &Driver, call: &str, code: i32, times: u64) -> PyResult<()> {
    let named = Call::ALL.iter().find(|known| known.name() == call);
    let call = *named.ok_or_else(|| invalid(&format!("{call:?} is no call of a driver")))?;
    for nth in 1..=times {
        sim(driver)?.fail(call, nth, Code(code));
    }
    Ok(())
}

/// Allocates and frees blocks of `size` bytes `count` times through the functions that PyTorch calls; returns the
/// nanoseconds.
#[pyfunction]
pub fn _measure(
    py: Python<'_>,
    slot: &TorchSlot,
    size: isize,
    gpu: i32,
    stream: usize,
    count: u64,
) -> PyResult<u64> {
    let (allocate, free) = FUNCTIONS[slot.slot].ordered;
    let nanoseconds = py.detach(|| {
        let start = Instant::now();
        for _ in 0..count {
            let stream = stream as *mut c_void;
            // SAFETY: as PyTorch calls them; the caller passes a live stream.
            unsafe {
                let memory = allocate(size, gpu, stream);
                if memory.is_null() {
                    return None;
                }
                free(memory, size, gpu, stream);
            }
        }
        Some(start.elapsed().as_nanos() as u64)
    });
    match (nanoseconds, slot.last_error()) {
        (Some(nanoseconds), _) => Ok(nanoseconds),
        (None, Some(error)) => Err(error),
        (None, None) => Err(not_supported("nothing was allocated", "pass a size")),
    }
}
