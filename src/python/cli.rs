//! Functions for `python -m egmem`: the reports of the command line, whose code formats them.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::time::Duration;

use egmem::{Machine, Topology};
use egmem::doctor::{Children, Reason, Report as Native, answer_trials, to_text};
use egmem::ledger;
use pyo3::prelude::*;

use crate::driver::{Driver, given_or_default};
use crate::error::OrRaise;
use crate::json::to_python;

/// A report of `doctor`: the capabilities of this machine, why the others are missing, and how to get them.
#[pyclass(frozen, module = "egmem", name = "Report")]
pub struct Report {
    inner: Native,
}

#[pymethods]
impl Report {
    /// Whether host-NUMA memory works, for the CPU and at least one GPU.
    #[getter]
    fn works(&self) -> bool {
        self.inner.works
    }

    /// The ordinals of the GPUs for which it does.
    #[getter]
    fn working_gpus(&self) -> Vec<i32> {
        self.inner.working_gpus.clone()
    }

    /// Settings that should change: the finding, and what to do.
    #[getter]
    fn advice(&self) -> Vec<(String, String)> {
        let advice = self.inner.advice.iter();
        advice
            .map(|advice| (advice.finding.clone(), advice.remedy.to_owned()))
            .collect()
    }

    /// Returns the text of `egmem doctor`; with `all`, that of `egmem doctor --all`.
    #[pyo3(signature = (all=false))]
    fn to_text(&self, all: bool) -> String {
        to_text(&self.inner, all, wants_colours())
    }

    /// Returns the output of `egmem doctor --json`, as a dictionary.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.inner)
    }

    fn __str__(&self) -> String {
        to_text(&self.inner, false, wants_colours())
    }

    fn __repr__(&self) -> String {
        let works = if self.inner.works {
            "works"
        } else {
            "does not work"
        };
        format!("<egmem.Report: Extended GPU Memory {works}>")
    }
}

/// Finds out what works on this machine, or on a simulated one: `"gh200"`, `"gh200x4"`, `"gb200"`, `"h200x8"` or a
/// JSON file.
///
/// Each trial runs in a process of its own (`python -m egmem probe`), because drivers have crashed inside such calls.
/// `timeout` is in seconds, for each step.
#[pyfunction]
#[pyo3(signature = (*, sim=None, timeout=30.0))]
pub fn doctor(py: Python<'_>, sim: Option<&str>, timeout: f64) -> PyResult<Report> {
    let described = match sim {
        Some(name) => Machine::load(name).map(Some),
        None => Machine::from_env(),
    };
    let described = described.or_raise()?;
    let mut children = Children::new(
        command(py, sim)?,
        Duration::try_from_secs_f64(timeout).unwrap_or(Duration::MAX),
    );
    let inner = py.detach(|| match described {
        None => Native::gather(&mut children),
        Some(machine) => Native::gather_simulated(&mut children, &machine),
    });
    Ok(Report { inner })
}

/// As the command line: on a terminal, unless `NO_COLOR` is set.
fn wants_colours() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

fn command(py: Python<'_>, sim: Option<&str>) -> PyResult<Vec<OsString>> {
    let interpreter: OsString = py.import("sys")?.getattr("executable")?.extract()?;
    let mut command: Vec<OsString> = vec![interpreter, "-m".into(), "egmem".into(), "probe".into()];
    if let Some(sim) = sim {
        command.extend(["--sim".into(), sim.into()]);
    }
    Ok(command)
}

/// Runs the trials of a parent's doctor, from standard input to standard output.
#[pyfunction]
#[pyo3(signature = (sim=None))]
pub fn _probe(py: Python<'_>, sim: Option<&str>) -> PyResult<()> {
    let open = || match sim {
        Some(sim) => Machine::load(sim).and_then(egmem::Driver::simulated),
        None => egmem::Driver::from_env(),
    };
    py.detach(|| answer_trials(open, |_| ())).or_raise()?;
    Ok(())
}

/// Returns the host's nodes without a driver, and why there is none: a message and what to do.
#[pyfunction]
pub fn _topology_or_why(
    py: Python<'_>,
) -> PyResult<(crate::topology::Topology, Option<(String, String)>)> {
    let told =
        py.detach(
            || match egmem::Driver::open().and_then(|driver| Topology::discover(&driver)) {
                Ok(topology) => (topology, None),
                Err(error) => (Topology::of_host(), Some(Reason::from(error))),
            },
        );
    let (topology, reason) = told;
    let why = reason.map(|reason| (reason.message, reason.remedy));
    Ok((crate::topology::Topology::wrap(topology), why))
}

/// Memory by owner, for all processes of this user that offer their ledgers (`EGMEM_PS=1`): the text of `egmem ps`.
#[pyfunction]
#[pyo3(signature = (driver=None))]
pub fn ps(py: Python<'_>, driver: Option<&Bound<'_, Driver>>) -> PyResult<String> {
    // The ledgers can be shown even without a driver.
    let driver = given_or_default(py, driver).ok();
    Ok(py.detach(|| ledger::Report::gather(driver.as_ref()).to_text()))
}

/// As `ps`, as a dictionary: the output of `egmem ps --json`.
#[pyfunction]
#[pyo3(signature = (driver=None))]
pub fn ps_dict<'py>(
    py: Python<'py>,
    driver: Option<&Bound<'_, Driver>>,
) -> PyResult<Bound<'py, PyAny>> {
    let driver = given_or_default(py, driver).ok();
    let report = py.detach(|| ledger::Report::gather(driver.as_ref()));
    to_python(py, &report)
}
