//! `egmem doctor`: collects the report, with each trial in a child process (`egmem probe`), and shows it.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::Args;
use egmem::Result;
use egmem::capability::Path;
use egmem::doctor::{answer_trials, to_text};
use egmem::driver::HandleTypes;

use crate::output::{DONE, FAILED, complain, print_json, print_painted};
use crate::source::Source;
use crate::trials::{Fault, Trials, seconds};

/// `egmem doctor`
#[derive(Args, Debug)]
pub struct Doctor {
    #[command(flatten)]
    trials: Trials,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// List every node and GPU, not only differences
    #[arg(long, short)]
    all: bool,
    /// Seconds before a trial counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    timeout: f64,
}

impl Doctor {
    /// Shows the report. The exit status says whether Extended GPU Memory works. `program` starts this program.
    pub fn run(&self, program: &[OsString], verbose: u8) -> Result<u8> {
        let patience = Duration::from_secs_f64(self.timeout);
        let (report, _) = self.trials.report(program, verbose, patience)?;
        if self.json {
            print_json(&report)?;
        } else {
            let colours = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            print_painted(&to_text(&report, self.all, colours))?;
        }
        Ok(if report.works { DONE } else { FAILED })
    }
}

/// `egmem probe`
#[derive(Args, Debug)]
pub struct Probe {
    #[command(flatten)]
    source: Source,
    /// Die in this way, as a driver might
    #[arg(long, requires = "sim")]
    sim_probe_fault: Option<Fault>,
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
