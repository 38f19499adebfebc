//! The command line, and its reports as Python functions.

use std::ffi::OsString;
use std::io::{self, IsTerminal};

use egmem::backing::Chosen;
use egmem::capability::Trial;
use egmem::doctor::{Answer, Children, Prober, Reason, Report as Native, to_text};
use egmem::driver::{HandleTypes, Location};
use egmem::host::Libraries;
use egmem::{Error, Machine, ledger};
use pyo3::prelude::*;

use crate::args::timeout_of;
use crate::driver::{Driver, given_or_default};
use crate::error::OrRaise;
use crate::interpreter::{signals, to_python};

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
/// JSON file; by default the one that `EGMEM_SIM` names.
///
/// Each trial runs in a process of its own (`python -m egmem probe`), because drivers have crashed inside such calls.
/// `timeout` is in seconds, for each step. Signal handlers run between the steps.
#[pyfunction]
#[pyo3(signature = (*, sim=None, timeout=30.0))]
pub fn doctor(py: Python<'_>, sim: Option<&str>, timeout: f64) -> PyResult<Report> {
    let timeout = timeout_of(timeout)?;
    let described = match sim {
        Some(name) => Machine::load(name).map(Some),
        None => Machine::from_env(),
    };
    let described = described.or_raise()?;
    let mut command = program(py)?;
    command.push("probe".into());
    if let Some(sim) = sim {
        command.extend(["--sim".into(), sim.into()]);
    }
    let mut prober = Interruptible {
        children: Children::new(command, timeout),
        raised: Ok(()),
    };
    let inner = py.detach(|| match described {
        None => Native::gather(&mut prober),
        Some(machine) => Native::gather_simulated(&mut prober, &machine),
    });
    prober.raised.map(|()| Report { inner })
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

/// As the command line: on a terminal, unless `NO_COLOR` is set.
fn wants_colours() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
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
