//! Machines by name: presets, files and the environment.

use std::path::Path;

use super::Machine;
use crate::{Driver, Error, Result};

/// The environment variable that names a machine to simulate.
const VARIABLE: &str = "EGMEM_SIM";

impl Machine {
    /// Returns the preset called `name`, or else the machine that the JSON file of that name describes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is neither, or the file cannot be read or is not a correct description;
    /// [`Error::DriverTooOld`] if it describes a driver before 12.2.
    pub fn load(name: impl AsRef<Path>) -> Result<Self> {
        let path = name.as_ref();
        match Self::preset(&path.to_string_lossy()) {
            Err(_) if path.exists() || path.extension().is_some_and(|end| end == "json") => {}
            preset => return preset,
        }
        let fault = |why: String| {
            let why = format!("{}: {why}", path.display());
            Error::invalid("machine description", why)
        };
        let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
        let machine: Self =
            serde_json::from_str(&text).map_err(|error| fault(error.to_string()))?;
        machine.validate()?;
        Ok(machine)
    }

    /// Returns the machine that the environment variable `EGMEM_SIM` names, as for [`load`](Self::load); `None` if the
    /// variable is not set or empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the variable, if there is no such machine.
    pub fn from_env() -> Result<Option<Self>> {
        let name = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
        let load = |name| {
            Self::load(name).map_err(|error| match error {
                Error::InvalidArgument { why, .. } => Error::invalid(VARIABLE, why),
                other => Error::invalid(VARIABLE, other.to_string()),
            })
        };
        name.map(load).transpose()
    }
}

impl Driver {
    /// Opens the driver that the environment chooses: the simulated machine that `EGMEM_SIM` names
    /// ([`Machine::from_env`]), otherwise this machine's CUDA driver.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the variable, if there is no such machine; those of
    /// [`open`](Self::open) and [`simulated`](Self::simulated).
    pub fn from_env() -> Result<Self> {
        match Machine::from_env()? {
            Some(machine) => Self::simulated(machine),
            None => Self::open(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_a_preset_or_a_file() {
        assert_eq!(Machine::load("gb200").unwrap(), Machine::gb200());
        let folder = tempfile::tempdir().unwrap();
        let described = Machine {
            name: "mine".into(),
            ..Machine::gh200()
        };
        for name in ["mine.json", "mine"] {
            let path = folder.path().join(name);
            std::fs::write(&path, serde_json::to_vec(&described).unwrap()).unwrap();
            assert_eq!(Machine::load(&path).unwrap(), described);
        }
    }

    #[test]
    fn a_name_that_is_no_machine_is_an_error_that_says_why() {
        let error = |name: &Path| Machine::load(name).unwrap_err().to_string();
        let unknown = error(Path::new("gh300"));
        assert!(
            unknown.contains("'gh300'") && unknown.contains("gh200x4"),
            "{unknown}"
        );
        let missing = error(Path::new("/nonexistent/machine.json"));
        assert!(
            missing.contains("/nonexistent/machine.json: No such file"),
            "{missing}"
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.json");
        for (text, why) in [("{", "EOF"), (r#"{"nodes": []}"#, "no host NUMA node")] {
            std::fs::write(&path, text).unwrap();
            assert!(error(&path).contains(why), "{}", error(&path));
        }
    }
}
