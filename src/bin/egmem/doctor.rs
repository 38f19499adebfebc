//! `egmem doctor`: collects the report, with each trial in a child process, and shows it.

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use egmem::doctor::{Children, Report, to_text};
use egmem::{Error, Result};

use crate::output::{print_json, print_painted, progress};
use crate::probe::Fault;
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
    /// Shows the report. The exit status says whether Extended GPU Memory works.
    pub fn run(&self, verbose: u8) -> Result<ExitCode> {
        // A description that cannot be read is the user's mistake, not the machine's state.
        let machine = self.source.machine()?;
        let patience = Duration::from_secs_f64(self.timeout);
        let mut children =
            Children::new(self.probe_command(verbose)?, patience).on_progress(progress);
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
        Ok(ExitCode::from(if report.works { 0 } else { 1 }))
    }

    fn probe_command(&self, verbose: u8) -> Result<Vec<OsString>> {
        let mut command = self.probe_command.clone();
        if command.is_empty() {
            let program = std::env::current_exe()
                .map_err(|error| Error::system("cannot find this program", &error))?;
            command.push(program.into());
        }
        command.push("probe".into());
        command.extend((0..verbose).map(|_| "-v".into()));
        if let Some(sim) = &self.source.sim {
            command.extend(["--sim".into(), sim.clone()]);
        }
        if let Some(fault) = self
            .sim_probe_fault
            .and_then(|fault| fault.to_possible_value())
        {
            command.extend(["--sim-probe-fault".into(), fault.get_name().into()]);
        }
        Ok(command)
    }
}

fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds, 0.001 to 86400".into()),
    }
}
