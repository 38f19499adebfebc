//! `egmem report`: the doctor's report with proofs and measurements, made to be posted in a public issue.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use egmem::doctor::Survey;
use egmem::{Error, Result};

use crate::output::{print, print_json};
use crate::trials::{Trials, seconds};

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
