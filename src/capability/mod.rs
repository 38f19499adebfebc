//! What works on this machine, found out by trying it.
//!
//! An attribute says what a GPU's hardware could do. Whether memory can be had, shared and granted
//! here and now depends on the driver, the container and the administrator too, so it is tried, in
//! the unit in which the driver gives memory, up to a word that the CPU writes and reads, and given
//! back at once.

mod cache;
mod hint;
mod imex;
#[cfg(feature = "share")]
pub(crate) mod shareable;
mod trial;

use serde::{Deserialize, Serialize};

pub use hint::{Hint, hints};
pub use imex::{IMEX_CHANNELS, ImexChannel};

use crate::driver::{Code, HandleTypes, Location};
use crate::{Driver, Error, Result};

/// A way to allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Path {
    /// Virtual memory management: `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`.
    Vmm,
    /// Stream-ordered: `cuMemPoolCreate`, `cuMemAllocFromPoolAsync`.
    Pool,
}

impl Path {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Vmm, Self::Pool];
}

impl std::fmt::Display for Path {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Vmm => "VMM",
            Self::Pool => "pool",
        })
    }
}

/// The sets of handle types that are worth a trial.
pub const HANDLE_TYPES: [HandleTypes; 4] = [
    HandleTypes::NONE,
    HandleTypes::POSIX_FD,
    HandleTypes::FABRIC,
    HandleTypes::from_bits(HandleTypes::FABRIC.bits() | HandleTypes::POSIX_FD.bits()),
];

/// One thing to try: memory at a location, for a GPU (and the CPU, where the memory is the CPU's),
/// on a path, shareable in some ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Trial {
    /// Where the memory lies.
    pub location: Location,
    /// The ordinal of the GPU that is to read and write it.
    pub gpu: i32,
    /// How it is allocated.
    pub path: Path,
    /// How it can be shared.
    pub handle_types: HandleTypes,
}

impl std::fmt::Display for Trial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            location,
            gpu,
            path,
            handle_types,
        } = self;
        write!(
            f,
            "{path} memory on {location} for GPU {gpu} (handle types: {handle_types})"
        )
    }
}

/// What came of a trial.
#[derive(Clone, Debug, PartialEq)]
pub enum Support {
    /// It worked.
    Yes,
    /// It does not work here, and why.
    No(Error),
    /// It could not be found out, and why: there was no memory for the trial, or the GPU's context
    /// is lost. It is tried again when asked again.
    Unknown(Error),
}

impl Support {
    /// Whether it worked.
    pub const fn is_yes(&self) -> bool {
        matches!(self, Self::Yes)
    }

    /// Why not, where it did not work.
    pub const fn error(&self) -> Option<&Error> {
        match self {
            Self::Yes => None,
            Self::No(error) | Self::Unknown(error) => Some(error),
        }
    }

    /// `Ok` where it worked, for `?`.
    ///
    /// # Errors
    /// The reason, where it did not.
    pub fn require(self) -> Result<()> {
        match self {
            Self::Yes => Ok(()),
            Self::No(error) | Self::Unknown(error) => Err(error),
        }
    }

    fn of(result: Result<()>) -> Self {
        match result {
            Ok(()) => Self::Yes,
            Err(error) if is_passing(&error) => Self::Unknown(error),
            Err(error) => Self::No(error),
        }
    }
}

/// Whether an error says nothing about what the machine can do.
fn is_passing(error: &Error) -> bool {
    match error {
        Error::OutOfMemory { .. } | Error::NodeTooFull { .. } | Error::ContextLost { .. } => true,
        other => other.code() == Some(Code::OUT_OF_MEMORY),
    }
}

/// What works, tried when first asked for and then remembered for as long as the driver lives.
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
    cells: cache::Cells,
}

impl Capabilities {
    /// Those of `driver`: the same, already tried ones for every caller in the process.
    pub fn of(driver: &Driver) -> Self {
        Self {
            driver: driver.clone(),
            cells: cache::Cells::of(driver),
        }
    }

    /// What comes of one trial: tried now, unless it was tried before.
    pub fn trial(&self, trial: Trial) -> Support {
        self.cells
            .get_or_try(trial, || Support::of(trial::attempt(self, &trial)))
    }

    /// Whether memory at `location` works on `path` for every GPU that can be expected to reach it:
    /// each GPU for the CPU's memory, the owner for a GPU's. The first reason against, if any.
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

    /// The driver that is tried.
    pub const fn driver(&self) -> &Driver {
        &self.driver
    }
}
