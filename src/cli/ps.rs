//! `egmem ps`: whose memory it is, over all processes of this user.

use std::path::PathBuf;

use clap::Args;
use egmem::ledger::Report;
use egmem::share::Result;

use crate::output::{complain, show};
use crate::source::Source;

/// `egmem ps`
#[derive(Args, Debug)]
pub struct Ps {
    #[command(flatten)]
    source: Source,
    /// Draw as SVG to this file; - is standard output
    #[arg(long, value_name = "FILE|-", conflicts_with = "json")]
    svg: Option<PathBuf>,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

impl Ps {
    /// Shows the report.
    pub fn run(&self) -> Result<()> {
        // The ledgers can be shown without a driver.
        let driver = self.source.find()?.inspect_err(|error| {
            complain(&format!(
                "warning: {error}; what to do: {}\nGPUs are not shown.\n",
                error.remedy()
            ));
        });
        let report = Report::gather(driver.as_ref().ok());
        let svg = self.svg.as_deref();
        Ok(show(
            &report,
            self.json,
            svg,
            Report::to_text,
            Report::to_svg,
        )?)
    }
}
