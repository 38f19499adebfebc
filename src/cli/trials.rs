//! The trials of `egmem doctor` and `egmem report`, in child processes (`egmem probe`).

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, ValueEnum};
use egmem::Result;
use egmem::doctor::{Children, Report};

use crate::output::progress;
use crate::source::Source;

/// Which machine to try, and the program for it.
#[derive(Args, Debug)]
pub struct Trials {
    #[command(flatten)]
    source: Source,
    /// Make simulated trials die
    #[arg(long, hide = true, requires = "sim")]
    sim_probe_fault: Option<Fault>,
    /// The program for the trials, one word per option, instead of this one
    #[arg(long, hide = true, value_name = "WORD", allow_hyphen_values = true)]
    probe_command: Vec<OsString>,
}

impl Trials {
    /// Collects the doctor's report, and returns it with the children, which can try more. `program` starts this program;
    /// a trial without an answer for `patience` counts as hung.
    pub fn report(
        &self,
        program: &[OsString],
        verbose: u8,
        patience: Duration,
    ) -> Result<(Report, Children)> {
        // A description that cannot be read is the user's mistake, not the machine's state.
        let machine = self.source.machine()?;
        let mut children =
            Children::new(self.probe_command(program, verbose), patience).on_progress(progress);
        let report = match machine {
            Some(machine) => Report::gather_simulated(&mut children, &machine),
            None => Report::gather(&mut children),
        };
        Ok((report, children))
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

/// Parses a number of seconds, for a command's option.
pub fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds, 0.001 to 86400".into()),
    }
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
