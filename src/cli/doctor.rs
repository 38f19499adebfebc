//! `egmem doctor`: collects the report, with each trial in a child process (`egmem probe`), and shows it.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::{Args, ValueEnum};
use egmem::Result;
use egmem::capability::Path;
use egmem::doctor::{Children, Report, answer_trials, to_text};
use egmem::driver::HandleTypes;

use crate::output::{DONE, FAILED, complain, print_json, print_painted, progress};
use crate::source::Source;

/// `egmem doctor`
#[derive(Args, Debug)]
pub struct Doctor {
    #[command(flatten)]
    source: Source,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// List every node and GPU, not only differences
    #[arg(long, short)]
    all: bool,
    /// Seconds before a trial counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    timeout: f64,
    /// Make simulated trials die
    #[arg(long, hide = true, requires = "sim")]
    sim_probe_fault: Option<Fault>,
    /// The program for the trials, one word per option, instead of this one
    #[arg(long, hide = true, value_name = "WORD", allow_hyphen_values = true)]
    probe_command: Vec<OsString>,
}

impl Doctor {
    /// Shows the report. The exit status says whether Extended GPU Memory works. `program` starts this program.
    pub fn run(&self, program: &[OsString], verbose: u8) -> Result<u8> {
        // A description that cannot be read is the user's mistake, not the machine's state.
        let machine = self.source.machine()?;
        let patience = Duration::from_secs_f64(self.timeout);
        let mut children =
            Children::new(self.probe_command(program, verbose), patience).on_progress(progress);
        let report = match machine {
            Some(machine) => Report::gather_simulated(&mut children, &machine),
            None => Report::gather(&mut children),
        };
        if self.json {
            print_json(&report)?;
        } else {
            let colours = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            print_painted(&to_text(&report, self.all, colours))?;
        }
        Ok(if report.works { DONE } else { FAILED })
    }

    fn probe_command(&self, program: &[OsString], verbose: u8) -> Vec<OsString> {
        let own = self.probe_command.is_empty();
        let mut command = if own { program } else { &self.probe_command }.to_vec();
        command.push("probe".into());
        command.extend((0..verbose).map(|_| "-v".into()));
        if let Some(sim) = &self.source.sim {
            command.extend(["--sim".into(), sim.into()]);
        }
        let fault = self.sim_probe_fault;
        if let Some(fault) = fault.and_then(|fault| fault.to_possible_value()) {
            command.extend(["--sim-probe-fault".into(), fault.get_name().into()]);
        }
        command
    }
}

fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds, 0.001 to 86400".into()),
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
