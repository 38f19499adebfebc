//! The answers for one driver.

use super::support::{Path, Support, Trial};
use super::trial;
use crate::driver::{HandleTypes, Location};
use crate::per_driver::{PerDriver, lock};
use crate::{Driver, Error};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The capabilities of a driver: each combination is tried when first asked for, and the answer is kept while the
/// driver lives.
///
/// ```
/// use egmem::capability::{Capabilities, Path};
/// use egmem::driver::sim::Machine;
/// use egmem::driver::{HandleTypes, Location};
/// use egmem::Driver;
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let capabilities = Capabilities::of(&driver);
/// let shareable = capabilities.support(Location::HostNuma(0), Path::Vmm, HandleTypes::POSIX_FD);
/// assert!(shareable.is_yes());
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Capabilities {
    driver: Driver,
    cells: Cells,
}

impl Capabilities {
    /// Returns the capabilities of `driver`. All callers in the process share the answers.
    pub fn of(driver: &Driver) -> Self {
        Self {
            driver: driver.clone(),
            cells: Cells::of(driver),
        }
    }

    /// Returns the result of one trial, which runs now unless it ran before.
    pub fn trial(&self, trial: Trial) -> Support {
        let attempt = || trial::attempt(&self.driver, &trial, |other| self.trial(other));
        self.cells.get_or_try(trial, || Support::of(attempt()))
    }

    /// Returns whether memory at `location` works on `path` for every GPU that should reach it: all GPUs for
    /// the CPU's memory, the owner for a GPU's. If not, returns the first reason.
    pub fn support(&self, location: Location, path: Path, handle_types: HandleTypes) -> Support {
        let gpus = match location {
            Location::Device(owner) => owner..=owner,
            _ => match self.driver.device_count() {
                Ok(..=0) => {
                    return Support::No(Error::NoSuchGpu { gpu: 0, count: 0 });
                }
                Ok(count) => 0..=count - 1,
                Err(error) => return Support::of(Err(error)),
            },
        };
        gpus.map(|gpu| {
            self.trial(Trial {
                location,
                gpu,
                path,
                handle_types,
            })
        })
        .find(|support| !support.is_yes())
        .unwrap_or(Support::Yes)
    }

    /// Returns the driver under trial.
    pub const fn driver(&self) -> &Driver {
        &self.driver
    }
}

type Cell = Arc<Mutex<Option<Support>>>;

/// The answers of one driver. Clones share them.
#[derive(Clone, Debug, Default)]
struct Cells(Arc<Mutex<HashMap<Trial, Cell>>>);

impl Cells {
    /// Returns the answers of `driver`.
    fn of(driver: &Driver) -> Self {
        static CELLS: PerDriver<Cells> = PerDriver::new();
        CELLS.of(driver)
    }

    /// Returns the answer to `trial`, from `attempt` if there is none yet. Another caller with the same trial
    /// waits meanwhile.
    fn get_or_try(&self, trial: Trial, attempt: impl FnOnce() -> Support) -> Support {
        let cell = Arc::clone(lock(&self.0).entry(trial).or_default());
        let mut answer = lock(&cell);
        match &*answer {
            Some(known) => known.clone(),
            None => {
                let support = attempt();
                if !matches!(support, Support::Unknown(_)) {
                    *answer = Some(support.clone());
                }
                support
            }
        }
    }
}
