//! The answers for one driver.

use super::cache::Cells;
use super::support::{Path, Support, Trial};
use super::trial;
use crate::driver::{HandleTypes, Location};
use crate::{Driver, Error};

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
