//! Finds out what works on this machine by trying it.
//!
//! An attribute says what a GPU's hardware can do. Whether memory can be allocated, shared and granted here
//! and now also depends on the driver, the container and the administrator. So a trial allocates memory in
//! the driver's smallest unit, writes and reads a word with the CPU, and frees the memory at once.

mod cache;
mod hint;
mod imex;
pub mod shareable;
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

/// The sets of handle types to try.
pub const HANDLE_TYPES: [HandleTypes; 4] = [
    HandleTypes::NONE,
    HandleTypes::POSIX_FD,
    HandleTypes::FABRIC,
    HandleTypes::from_bits(HandleTypes::FABRIC.bits() | HandleTypes::POSIX_FD.bits()),
];

/// One combination to try: memory at a location, for a GPU (and the CPU, for the CPU's memory), on a path,
/// with handle types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Trial {
    /// Where the memory lies.
    pub location: Location,
    /// The ordinal of the GPU that reads and writes it.
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

/// The result of a trial.
#[derive(Clone, Debug, PartialEq)]
pub enum Support {
    /// It worked.
    Yes,
    /// It does not work here, with the reason.
    No(Error),
    /// The trial was inconclusive, with the reason: there was no memory for it, or the GPU's context is lost.
    /// The next request tries again.
    Unknown(Error),
}

impl Support {
    /// Returns whether it worked.
    pub const fn is_yes(&self) -> bool {
        matches!(self, Self::Yes)
    }

    /// Returns the reason, if it did not work.
    pub const fn error(&self) -> Option<&Error> {
        match self {
            Self::Yes => None,
            Self::No(error) | Self::Unknown(error) => Some(error),
        }
    }

    /// Returns `Ok` if it worked, for use with `?`.
    ///
    /// # Errors
    /// The reason, if it did not.
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

/// Returns whether an error says nothing about the machine's abilities.
fn is_passing(error: &Error) -> bool {
    match error {
        Error::OutOfMemory { .. } | Error::NodeTooFull { .. } | Error::ContextLost { .. } => true,
        other => other.code() == Some(Code::OUT_OF_MEMORY),
    }
}

/// What works on a driver: each combination is tried when first asked for, and the answer is kept while the
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
    cells: cache::Cells,
}

impl Capabilities {
    /// Returns the capabilities of `driver`. All callers in the process share the answers.
    pub fn of(driver: &Driver) -> Self {
        Self {
            driver: driver.clone(),
            cells: cache::Cells::of(driver),
        }
    }

    /// Returns the result of one trial, which runs now unless it ran before.
    pub fn trial(&self, trial: Trial) -> Support {
        self.cells
            .get_or_try(trial, || Support::of(trial::attempt(self, &trial)))
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
