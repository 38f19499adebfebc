//! Which driver the commands use: the machine's, or a simulated one.

use std::ffi::OsString;
use std::path::Path;

use clap::Args;
use egmem::{Driver, Error, Machine, Result};

/// The driver to use.
#[derive(Args, Clone, Debug, Default)]
pub struct Source {
    /// Simulate a machine: gh200, gh200x4, gb200, h200x8, or a description as a JSON file
    #[arg(long, value_name = "PRESET|FILE.json")]
    pub sim: Option<OsString>,
}

impl Source {
    /// Returns the machine to simulate, if any.
    pub fn machine(&self) -> Result<Option<Machine>> {
        self.sim.as_deref().map(read_machine).transpose()
    }

    /// Opens the driver.
    pub fn open(&self) -> Result<Driver> {
        match self.machine()? {
            Some(machine) => Driver::simulated(machine),
            None => Driver::open(),
        }
    }
}

fn read_machine(name: &std::ffi::OsStr) -> Result<Machine> {
    let path = Path::new(name);
    if path.extension().is_none_or(|extension| extension != "json") {
        return Machine::preset(&name.to_string_lossy());
    }
    let text = std::fs::read_to_string(path).map_err(|error| {
        let why = format!("{} cannot be read: {error}", path.display());
        Error::invalid("machine description", why)
    })?;
    serde_json::from_str(&text).map_err(|error| {
        Error::invalid(
            "machine description",
            format!("{}: {error}", path.display()),
        )
    })
}
