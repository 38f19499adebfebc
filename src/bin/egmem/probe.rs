//! The child's side: opens the driver, runs the trials that it reads, and writes one answer per line.
//!
//! On standard input: the trials as one JSON array. On standard output: first whether the driver opens, then
//! an answer per trial, each as JSON on a line of its own that starts with [`MARK`].

use std::io::{self, Read, Write};
use std::time::Duration;

use clap::{Args, ValueEnum};
use egmem::capability::{Capabilities, Path, Trial};
use egmem::doctor::{Answer, Reason};
use egmem::driver::HandleTypes;
use egmem::{Error, Result};

use crate::output::complain;
use crate::source::Source;

/// The prefix of the child's own lines: libraries may print others.
pub const MARK: &str = "egmem-probe ";

/// `egmem probe`
#[derive(Args, Debug)]
pub struct Probe {
    #[command(flatten)]
    source: Source,
    /// Die in this way, as a driver might
    #[arg(long, requires = "sim")]
    sim_probe_fault: Option<Fault>,
}

/// How a simulated probe dies, to test what doctor makes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// By a signal, when it tries a fabric handle through VMM.
    Abort,
    /// Hang, likewise.
    Hang,
    /// With an exit status, likewise.
    Exit,
    /// By a signal, when the driver is opened.
    AbortAtOpen,
    /// By a signal, after the last answer.
    AbortAtEnd,
}

impl Probe {
    /// Runs the trials and writes the answers.
    pub fn run(&self) -> Result<()> {
        let fail = |error: io::Error| Error::system("the probe's pipe", &error);
        let mut text = String::new();
        io::stdin().read_to_string(&mut text).map_err(fail)?;
        let trials: Vec<Trial> = serde_json::from_str(&text)
            .map_err(|error| Error::invalid("trials", error.to_string()))?;

        if self.sim_probe_fault == Some(Fault::AbortAtOpen) {
            die(Fault::Abort);
        }
        let driver = match self.source.open() {
            Ok(driver) => driver,
            Err(error) => {
                let reason = Reason::from(error);
                return say(&Answer::No { reason }).map_err(fail);
            }
        };
        say(&Answer::Yes).map_err(fail)?;
        let capabilities = Capabilities::of(&driver);
        for &trial in &trials {
            if let Some(fault @ (Fault::Abort | Fault::Exit | Fault::Hang)) = self.sim_probe_fault
                && trial.path == Path::Vmm
                && trial.handle_types == HandleTypes::FABRIC
            {
                die(fault);
            }
            say(&capabilities.trial(trial).into()).map_err(fail)?;
        }
        if self.sim_probe_fault == Some(Fault::AbortAtEnd) && !trials.is_empty() {
            die(Fault::Abort);
        }
        Ok(())
    }
}

fn say(answer: &Answer) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let text = serde_json::to_string(answer)?;
    writeln!(out, "{MARK}{text}")?;
    out.flush()
}

fn die(fault: Fault) {
    match fault {
        Fault::Abort | Fault::AbortAtOpen | Fault::AbortAtEnd => {
            complain("simulated crash\n");
            std::process::abort()
        }
        Fault::Exit => std::process::exit(3),
        Fault::Hang => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
    }
}
