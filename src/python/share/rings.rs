//! Pickled sides of rings.

use std::sync::Arc;

use egmem::driver::Driver as Native;
use egmem::shapes::{Consumer, Producer};
use egmem::share::{Channel, Error, ImportOptions};
use pyo3::prelude::*;

use super::common::Refused;
use super::import::{self, Failed};
use super::pickle;
use super::tickets::{self, To};
use crate::driver::given_or_default;
use crate::error::raise;
use crate::ring::RingSide;
use crate::site::from_program;

/// Returns what `pickle` makes of a side.
#[pyfunction]
#[pyo3(name = "_reduce_ring")]
pub fn reduce<'py>(py: Python<'py>, side: &Bound<'py, RingSide>) -> PyResult<Bound<'py, PyAny>> {
    let (sides, is_producer) = side.get().sides();
    let to = To::Ring(Arc::downgrade(sides), is_producer);
    let receive = ["_unpickle_consumer", "_unpickle_producer"][usize::from(is_producer)];
    pickle::pickled(py, receive, (to, None), side.get().native())
}

/// Receives the producer's side of a ring that another process has pickled.
#[pyfunction]
#[pyo3(name = "_unpickle_producer")]
pub fn unpickle_producer(
    py: Python<'_>,
    name: &str,
    ticket: &str,
    process: u32,
    simulated: bool,
) -> PyResult<RingSide> {
    unpickle(py, (name, ticket), process, simulated, |driver, channel| {
        let side = Producer::receive_untyped(driver, channel, ImportOptions::new())?;
        Ok(RingSide::producer(driver, side))
    })
}

/// Receives the consumer's side of a ring that another process has pickled.
#[pyfunction]
#[pyo3(name = "_unpickle_consumer")]
pub fn unpickle_consumer(
    py: Python<'_>,
    name: &str,
    ticket: &str,
    process: u32,
    simulated: bool,
) -> PyResult<RingSide> {
    unpickle(py, (name, ticket), process, simulated, |driver, channel| {
        let side = Consumer::receive_untyped(driver, channel, ImportOptions::new())?;
        Ok(RingSide::consumer(driver, side))
    })
}

fn unpickle(
    py: Python<'_>,
    (name, ticket): (&str, &str),
    process: u32,
    simulated: bool,
    receive: fn(&Native, &mut Channel) -> Result<RingSide, Error>,
) -> PyResult<RingSide> {
    let driver = given_or_default(py, None)?;
    import::expect_kind(&driver, process, simulated)?;
    let found = from_program(py, || {
        import::waiting(py, |go_on| {
            let mut channel = tickets::redeem(name, ticket, go_on)?;
            receive(&driver, &mut channel).map_err(Refused::Lost)
        })
    });
    found.map_err(|failed| match failed {
        Failed::Refused(Refused::Failed(why)) => {
            let why = format!("process {process} did not hand over its side of a ring: {why}");
            let remedy = "keep one side in the process that pickles the other; pickle it again once the third process has ended";
            raise("Refused", &why, remedy, None)
        }
        failed => failed.into_exception(process),
    })
}
