//! Which driver the commands use: the machine's, or a simulated one.

use std::path::PathBuf;

use clap::Args;
use egmem::{Driver, Machine, Result};

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
