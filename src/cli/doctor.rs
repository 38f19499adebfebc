//! `egmem doctor` and `egmem report`, and their trials in child processes (`egmem probe`).

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use egmem::capability::Path;
use egmem::doctor::{self, Children, Survey, answer_trials, to_text};
use egmem::driver::HandleTypes;
use egmem::{Error, Result};

use crate::common::Source;
use crate::output::{DONE, FAILED, complain, print, print_json, print_painted, progress};

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

/// The longest that a trial of the doctor may take: this share of the time, and no more than these seconds.
const PATIENCE: (f64, f64) = (0.125, 30.0);

/// `egmem report`
#[derive(Args, Debug)]
pub struct Report {
    #[command(flatten)]
    trials: Trials,
    /// Write it as JSON to this file too; - prints JSON in place of the text
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
    /// Prove and measure with these GPUs alone, by ordinal: 0,1
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    gpu: Vec<i32>,
    /// Seconds that it may take, trials of the doctor that hang not counted; unfinished parts are left out, and the report says so
    #[arg(long, value_name = "SECONDS", default_value_t = 120.0, value_parser = seconds)]
    seconds: f64,
}

impl Report {
    /// Makes and shows the report. `program` starts this program.
    pub fn run(&self, program: &[OsString], verbose: u8) -> Result<()> {
        let until = Instant::now() + Duration::from_secs_f64(self.seconds);
        let (share, most) = PATIENCE;
        let patience = Duration::from_secs_f64((self.seconds * share).min(most));
        let (report, mut children) = self.trials.report(program, verbose, patience)?;
        let survey = Survey::gather(&report, &mut children, &self.gpu, until)?;
        let Some(path) = &self.json else {
            return print(&survey.to_text());
        };
        if path.as_os_str() == "-" {
            return print_json(&survey);
        }
        // A file that cannot be written does not lose the text.
        print(&survey.to_text())?;
        let failed = |error| Error::system(format!("cannot write {}", path.display()), &error);
        let text = serde_json::to_string_pretty(&survey).map_err(std::io::Error::from);
        text.and_then(|text| std::fs::write(path, text + "\n"))
            .map_err(failed)
    }
}

/// Which machine to try, and the program for it.
#[derive(Args, Debug)]
struct Trials {
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
    fn report(
        &self,
        program: &[OsString],
        verbose: u8,
        patience: Duration,
    ) -> Result<(doctor::Report, Children)> {
        // A description that cannot be read is the user's mistake, not the machine's state.
        let machine = self.source.machine()?;
        let mut children =
            Children::new(self.probe_command(program, verbose), patience).on_progress(progress);
        let report = match machine {
            Some(machine) => doctor::Report::gather_simulated(&mut children, &machine),
            None => doctor::Report::gather(&mut children),
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
fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds, 0.001 to 86400".into()),
    }
}

/// How a simulated probe dies, to test the doctor's report of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Fault {
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
