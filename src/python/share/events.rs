//! Pickled events.

use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::common::{Refused, wait};
use super::tickets::{self, PATIENCE, To};
use super::{import, pickle};
use crate::driver::given_or_default;
use crate::event::Event;

/// Returns what `pickle` makes of an event.
#[pyfunction]
#[pyo3(name = "_reduce_event")]
pub fn reduce<'py>(py: Python<'py>, event: &Bound<'py, Event>) -> PyResult<Bound<'py, PyAny>> {
    let event = event.get().inner();
    if !event.is_interprocess() {
        return Err(PyTypeError::new_err(
            "this Event cannot be sent to another process: it was made without interprocess=True, or by another \
             process; what to do: make it with egmem.Event(interprocess=True)",
        ));
    }
    let to = To::Event(Arc::downgrade(event));
    pickle::pickled(py, "_unpickle_event", (to, None), event.driver())
}

/// Receives an event that another process has pickled.
#[pyfunction]
#[pyo3(name = "_unpickle_event")]
pub fn unpickle(
    py: Python<'_>,
    name: &str,
    ticket: &str,
    process: u32,
    simulated: bool,
) -> PyResult<Event> {
    let driver = given_or_default(py, None)?;
    import::expect_kind(&driver, process, simulated)?;
    let found = import::waiting(py, |go_on| {
        let mut channel = tickets::redeem(name, ticket, go_on)?;
        wait(&mut channel, PATIENCE, go_on)?;
        channel.receive_event(&driver).map_err(Refused::Lost)
    });
    let event = found.map_err(|failed| failed.into_exception(process))?;
    Ok(Event::of(event))
}
