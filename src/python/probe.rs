//! The child's side of the doctor's trials: the protocol of the command line's `egmem probe`.

use std::io::{Read, Write};

use egmem::capability::{Capabilities, Trial};
use egmem::doctor::{Answer, Reason};
use egmem::{Driver, Error, Result};

use crate::driver::machine;

/// The prefix of the child's own lines: libraries may print others.
pub const MARK: &str = "egmem-probe ";

/// Reads trials as one JSON array, opens the driver, and writes one answer per line: first whether it opens.
///
/// # Errors
/// Those of the pipes and of the array.
pub fn run(sim: Option<&str>) -> Result<()> {
    let fail = |error: std::io::Error| Error::system("the probe's pipe", &error);
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(fail)?;
    let trials: Vec<Trial> =
        serde_json::from_str(&text).map_err(|error| Error::invalid("trials", error.to_string()))?;
    let opened = match sim {
        Some(sim) => machine(sim).and_then(Driver::simulated),
        None => Driver::open(),
    };
    let driver = match opened {
        Ok(driver) => driver,
        Err(error) => {
            let reason = Reason::from(error);
            return say(&Answer::No { reason }).map_err(fail);
        }
    };
    say(&Answer::Yes).map_err(fail)?;
    let capabilities = Capabilities::of(&driver);
    for trial in trials {
        say(&capabilities.trial(trial).into()).map_err(fail)?;
    }
    Ok(())
}

fn say(answer: &Answer) -> std::io::Result<()> {
    let text = serde_json::to_string(answer)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{text}")?;
    out.flush()
}
