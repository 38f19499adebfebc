//! `egmem probe`: the trials of a parent `egmem doctor`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use egmem::Result;
use egmem::capability::Path;
use egmem::doctor::answer_trials;
use egmem::driver::HandleTypes;

use crate::output::complain;
use crate::source::Source;

/// `egmem probe`
#[derive(Args, Debug)]
pub struct Probe {
    #[command(flatten)]
    source: Source,
    /// Die in this way, as a driver might
    #[arg(long, requires = "sim")]
    sim_probe_fault: Option<Fault>,
}

/// How a simulated probe dies, to test the doctor's report of it.
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
        let fault = self.sim_probe_fault;
        let open = || {
            if fault == Some(Fault::AbortAtOpen) {
                die(Fault::Abort);
            }
            self.source.open()
        };
        let trials = answer_trials(open, |trial| {
            if let Some(fault @ (Fault::Abort | Fault::Exit | Fault::Hang)) = fault
                && trial.path == Path::Vmm
                && trial.handle_types == HandleTypes::FABRIC
            {
                die(fault);
            }
        })?;
        if fault == Some(Fault::AbortAtEnd) && trials > 0 {
            die(Fault::Abort);
        }
        Ok(())
    }
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
