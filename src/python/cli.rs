//! The command line, and its reports as Python functions.

use std::collections::BTreeMap;
use std::ffi::OsString;

use egmem::backing::Chosen;
use egmem::capability::Trial;
use egmem::doctor::{self, Answer, Children, Prober, Reason, to_text};
use egmem::driver::{HandleTypes, Location};
use egmem::host::Libraries;
use egmem::{Error, Machine, ledger};
use pyo3::prelude::*;

use crate::args::timeout_of;
use crate::driver::{Driver, given_or_default};
use crate::error::OrRaise;
use crate::interpreter::{signals, to_python};

/// What a report has, and its texts: of all pairs of nodes and GPUs or not, with colours or not.
type Report<'py> = (Bound<'py, PyAny>, BTreeMap<(bool, bool), String>);

/// Finds out what works on this machine, or on a simulated one. `probe` are the words of the command for a trial.
#[pyfunction]
pub fn _doctor<'py>(
    py: Python<'py>,
    probe: Vec<OsString>,
    sim: Option<&str>,
    timeout: f64,
) -> PyResult<Report<'py>> {
    let timeout = timeout_of(timeout)?;
    let described = match sim {
        Some(name) => Machine::load(name).map(Some),
        None => Machine::from_env(),
    };
    let described = described.or_raise()?;
    let mut prober = Interruptible {
        children: Children::new(probe, timeout),
        raised: Ok(()),
    };
    let report = py.detach(|| match described {
        None => doctor::Report::gather(&mut prober),
        Some(machine) => doctor::Report::gather_simulated(&mut prober, &machine),
    });
    prober.raised?;
    let kinds = [(false, false), (false, true), (true, false), (true, true)];
    let texts = kinds.map(|(all, colours)| ((all, colours), to_text(&report, all, colours)));
    Ok((to_python(py, &report)?, texts.into()))
}

/// Runs signal handlers before each question, and asks nothing more once one has raised.
struct Interruptible {
    children: Children,
    raised: PyResult<()>,
}

impl Interruptible {
    fn goes_on(&mut self) -> Result<&mut Children, Reason> {
        if self.raised.is_ok() {
            self.raised = signals();
        }
        match self.raised {
            Ok(()) => Ok(&mut self.children),
            Err(_) => Err(Error::failed("the doctor's questions", "Python broke them off").into()),
        }
    }
}

impl Prober for Interruptible {
    fn open(&mut self) -> Result<(), Reason> {
        self.goes_on()?.open()
    }

    fn libraries(&self) -> Libraries {
        self.children.libraries()
    }

    fn try_all(&mut self, trials: &[Trial]) -> Vec<Answer> {
        match self.goes_on() {
            Ok(children) => children.try_all(trials),
            Err(reason) => vec![Answer::Unknown { reason }; trials.len()],
        }
    }

    fn choose_all(&mut self, sites: &[(Location, HandleTypes)]) -> Vec<Result<Chosen, Reason>> {
        match self.goes_on() {
            Ok(children) => children.choose_all(sites),
            Err(reason) => vec![Err(reason); sites.len()],
        }
    }
}

/// Returns the words that start the command line again.
fn program(py: Python<'_>) -> PyResult<Vec<OsString>> {
    let interpreter: OsString = py.import("sys")?.getattr("executable")?.extract()?;
    Ok(vec![interpreter, "-m".into(), "egmem".into()])
}

/// Runs the command line `egmem` with these arguments, and returns the exit status.
#[pyfunction]
pub fn _run(py: Python<'_>, arguments: Vec<OsString>) -> PyResult<u8> {
    let program = program(py)?;
    Ok(py.detach(|| egmem_cli::run(&program, arguments)))
}

/// Memory by owner, for this process and all processes of this user that offer their ledgers (`EGMEM_PS=1`): the text of
/// `egmem ps`, or with `wide` that of `egmem ps --wide`.
#[pyfunction]
#[pyo3(signature = (driver=None, *, wide=false))]
pub fn ps(py: Python<'_>, driver: Option<&Bound<'_, Driver>>, wide: bool) -> PyResult<String> {
    // The ledgers can be shown even without a driver.
    let driver = given_or_default(py, driver).ok();
    let report = py.detach(|| ledger::Report::gather(driver.as_ref()));
    Ok(match wide {
        true => report.to_wide_text(),
        false => report.to_text(),
    })
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
