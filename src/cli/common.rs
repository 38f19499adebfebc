//! The driver, standard output and standard error of this program and of `replay` (benches/replay), which includes this file.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use clap::Args;
use egmem::text::{escape, escape_json, escape_lines};
use egmem::{Driver, Error, Machine, Result};

/// The driver to use.
#[derive(Args, Clone, Debug, Default)]
pub struct Source {
    /// Simulate a machine: gh200, gh200x4, gb200, h200x8, or a description as a JSON file; or EGMEM_SIM
    #[arg(long, value_name = "PRESET|FILE.json")]
    pub sim: Option<PathBuf>,
}

impl Source {
    /// Returns the machine to simulate, if any.
    pub fn machine(&self) -> Result<Option<Machine>> {
        match &self.sim {
            Some(name) => Machine::load(name).map(Some),
            None => Machine::from_env(),
        }
    }

    /// Opens the driver.
    pub fn open(&self) -> Result<Driver> {
        self.find()?
    }

    /// Opens the driver; the inner error is that of a machine without a usable one.
    pub fn find(&self) -> Result<Result<Driver>> {
        match self.machine()? {
            Some(machine) => Driver::simulated(machine).map(Ok),
            None => Ok(Driver::open()),
        }
    }
}

/// Writes `text` to standard output, with control characters escaped except line feeds and tabs. A reader
/// that has closed the pipe (`egmem topo | head -1`) is not an error.
pub fn print(text: &str) -> Result<()> {
    print_painted(&escape_lines(text)).map(drop)
}

/// Writes `text` unchanged: its colours are this program's, and everything else in it is escaped already.
pub fn print_painted(text: &str) -> Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::system("cannot write to standard output", &error)),
    }
}

/// Writes `text` unchanged to standard error.
pub fn complain_painted(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Shows on a terminal the step that is under way, in place of the previous text; "" clears it.
pub fn progress(text: &str) {
    if io::stderr().is_terminal() {
        complain_painted(&in_place(text));
    }
}

/// Returns what shows `text` in place of the previous one.
pub fn in_place(text: &str) -> String {
    format!("\r\x1b[2K{}", escape(text))
}

/// Writes `value` to standard output as JSON.
pub fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::invalid("report", error.to_string()))?;
    print(&(escape_json(&text) + "\n"))
}
