//! Finds out what works on this machine by trying it.
//!
//! An attribute says what a GPU's hardware can do. Whether memory can be allocated, shared and granted here
//! and now also depends on the driver, the container and the administrator. So a trial allocates memory in
//! the driver's smallest unit, writes and reads a word with the CPU, and frees the memory at once.

mod imex;

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::backing::Backing;
use crate::driver::{Access, AccessDesc, DeviceAttribute, HandleType, HandleTypes, Location};
use crate::guard::is_passing;
use crate::memory::CpuView;
use crate::per_driver::{PerDriver, lock};
use crate::vmm::PhysicalMemory;
use crate::{Driver, Error, Pool, Result, Stream};

pub use imex::{IMEX_CHANNELS, ImexChannel, imex_channels};

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

crate::driver::display_texts! {
    Path {
        Self::Vmm => "VMM",
        Self::Pool => "pool",
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
        let (path, location, types) = (self.path, self.location, self.handle_types);
        let gpu = self.gpu;
        write!(
            f,
            "{path} memory on {location} for GPU {gpu} (handle types: {types})"
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

/// An attribute that claims something about host-NUMA memory or sharing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Hint {
    /// CUDA's name without `CU_DEVICE_ATTRIBUTE_`.
    pub name: &'static str,
    /// The driver's answer; `None` if it does not know the attribute, which does not mean "no".
    pub value: Option<i32>,
}

/// Returns the claims of GPU `gpu`'s attributes.
pub fn hints(driver: &Driver, gpu: i32) -> Vec<Hint> {
    macro_rules! attributes {
        ($($name:ident)*) => {
            [$((stringify!($name), DeviceAttribute::$name),)*]
        };
    }
    attributes![
        HOST_NUMA_ID NUMA_ID HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED HOST_NUMA_MEMORY_POOLS_SUPPORTED
        HOST_NUMA_MULTINODE_IPC_SUPPORTED HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        HANDLE_TYPE_FABRIC_SUPPORTED MEMPOOL_SUPPORTED_HANDLE_TYPES PAGEABLE_MEMORY_ACCESS
        PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
    ]
    .into_iter()
    .map(|(name, attribute)| Hint {
        name,
        value: driver.device_attribute(gpu, attribute).ok(),
    })
    .collect()
}

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
        static CELLS: PerDriver<Cells> = PerDriver::new();
        Self {
            driver: driver.clone(),
            cells: CELLS.of(driver),
        }
    }

    /// Returns the result of one trial, which runs now unless it ran before. Another caller with the same trial waits
    /// meanwhile.
    pub fn trial(&self, trial: Trial) -> Support {
        let cell = self.cell(trial);
        let mut answer = lock(&cell);
        if let Some(known) = &*answer {
            return known.clone();
        }
        let support = Support::of(self.attempt(&trial));
        if !matches!(support, Support::Unknown(_)) {
            *answer = Some(support.clone());
        }
        support
    }

    /// Returns the place of a trial's answer.
    fn cell(&self, trial: Trial) -> Cell {
        let mut cells = lock(&self.cells);
        if let Some((_, known)) = cells.iter().find(|(known, _)| *known == trial) {
            return Arc::clone(known);
        }
        let cell = Cell::default();
        cells.push((trial, Arc::clone(&cell)));
        cell
    }

    /// Returns whether memory at `location` works on `path` for every GPU that should reach it: all GPUs for
    /// the CPU's memory, the owner for a GPU's. If not, returns the first reason.
    pub fn support(&self, location: Location, path: Path, handle_types: HandleTypes) -> Support {
        let tried = || {
            let gpus = match location {
                Location::Device(owner) => owner..=owner,
                _ => 0..=self.driver.device_count()? - 1,
            };
            if gpus.is_empty() {
                return Err(Error::NoSuchGpu { gpu: 0, count: 0 });
            }
            let trials = gpus.map(|gpu| Trial {
                location,
                gpu,
                path,
                handle_types,
            });
            trials
                .into_iter()
                .try_for_each(|trial| self.trial(trial).require())
        };
        Support::of(tried())
    }

    /// Runs a trial.
    fn attempt(&self, trial: &Trial) -> Result<()> {
        let driver = &self.driver;
        check_gpu(driver, trial)?;
        let tried = match trial.path {
            Path::Vmm => try_vmm(driver, trial),
            Path::Pool => {
                if trial.handle_types.contains(HandleTypes::FABRIC) {
                    // A fabric pool that the driver refuses to export corrupts the process's heap when it is
                    // destroyed, so this tries one only if plain fabric memory works.
                    let path = Path::Vmm;
                    self.trial(Trial { path, ..*trial }).require()?;
                }
                try_pool(driver, trial)
            }
        };
        tracing::debug!(%trial, ?tried, "tried");
        tried
    }

    /// Returns the driver under trial.
    pub const fn driver(&self) -> &Driver {
        &self.driver
    }
}

/// Checks that the GPU exists, and that it reaches the memory if that is another GPU's.
fn check_gpu(driver: &Driver, trial: &Trial) -> Result<()> {
    let count = driver.device_count()?;
    let owner = match trial.location {
        Location::Device(owner) => owner,
        _ => trial.gpu,
    };
    for gpu in [trial.gpu, owner] {
        Error::expect_gpu(gpu, count)?;
    }
    if owner != trial.gpu && !driver.device_can_access_peer(trial.gpu, owner)? {
        return Err(Error::unsupported("peer access between these GPUs", None));
    }
    Ok(())
}

fn exports(handle_types: HandleTypes) -> impl Iterator<Item = HandleType> {
    [HandleType::PosixFd, HandleType::Fabric]
        .into_iter()
        .filter(move |&kind| handle_types.contains(kind.into()))
}

fn expect_read_write(who: Location, have: Access) -> Result<()> {
    match have {
        Access::ReadWrite => Ok(()),
        have => Err(Error::not_accessible(who, have, Access::ReadWrite)),
    }
}

/// Writes a word with the CPU and reads it back.
fn touch(cpu: &CpuView<'_>, location: Location) -> Result<()> {
    const WORD: u64 = 0x6567_6d65_6d21_0a0d;
    cpu.put(0, WORD)?;
    match cpu.get::<u64>(0)? {
        WORD => Ok(()),
        found => Err(Error::WrongBytes {
            by: location,
            offset: 0,
            expected: WORD,
            found,
        }),
    }
}

/// One word, which the driver rounds up to a granule.
const BYTES: u64 = 8;

fn try_vmm(driver: &Driver, trial: &Trial) -> Result<()> {
    let physical = PhysicalMemory::options(trial.location)
        .handle_types(trial.handle_types)
        .create(driver, BYTES)?;
    for kind in exports(trial.handle_types) {
        physical.export(kind)?;
    }
    let mut mapping = physical.map()?;
    let host = trial.location.is_host().then_some(trial.location);
    let gpu = Location::Device(trial.gpu);
    let accessors: Vec<Location> = host.into_iter().chain([gpu]).collect();
    let access = accessors.iter().copied().map(AccessDesc::read_write);
    mapping.set_access(&access.collect::<Vec<_>>())?;
    for who in accessors {
        expect_read_write(who, mapping.access(who)?)?;
    }
    host.map_or(Ok(()), |host| touch(&mapping.cpu()?, host))
}

fn try_pool(driver: &Driver, trial: &Trial) -> Result<()> {
    let gpu = Location::Device(trial.gpu);
    let pool = Pool::options(trial.location)
        .handle_types(trial.handle_types)
        .access_by([gpu])
        .create(driver)?;
    for kind in exports(trial.handle_types) {
        let calls = driver.pools(pool.api())?;
        // SAFETY: `pool` keeps its handle alive. On machines where a refused export corrupts the heap,
        // creating the pool has failed already.
        unsafe { calls.pool_export(pool.handle(), kind)? };
    }
    let stream = Stream::new(driver, trial.gpu)?;
    let buffer = pool.allocate(BYTES, &stream)?;
    expect_read_write(gpu, pool.access(gpu)?)?;
    if trial.location.is_host() {
        touch(&buffer.cpu()?, trial.location)?;
    }
    buffer.free_on(&stream)?;
    stream.synchronize()
}

/// The answer to a trial, once there is one. Locked while it is tried.
type Cell = Arc<Mutex<Option<Support>>>;

/// A machine has few combinations.
type Cells = Arc<Mutex<Vec<(Trial, Cell)>>>;

/// Chooses the handle types for shareable memory.
pub mod shareable {
    pub use super::{Shareable, best_handle_types, handle_types_of};
}

/// How to make memory shareable on this machine: see [`best_handle_types`].
#[derive(Clone, Debug, PartialEq)]
pub struct Shareable {
    /// The handle types to create it with.
    pub handle_types: HandleTypes,
    /// The reason why fabric handles are not among them.
    pub no_fabric: Option<Error>,
}

/// Returns the handle types with which memory at `location` can be shared as widely as this machine allows:
/// fabric handle and POSIX fd, or one of them. Found out by trials, once per driver.
///
/// # Errors
/// The reason why POSIX fds do not work, if neither type does.
pub fn best_handle_types(driver: &Driver, location: Location) -> Result<Shareable> {
    let both = HandleTypes::FABRIC | HandleTypes::POSIX_FD;
    let capabilities = Capabilities::of(driver);
    let tried = |types| capabilities.support(location, Path::Vmm, types).require();
    let only = |handle_types, no_fabric| Shareable {
        handle_types,
        no_fabric,
    };
    let Err(no_fabric) = tried(both) else {
        return Ok(only(both, None));
    };
    match tried(HandleTypes::POSIX_FD) {
        Ok(()) => Ok(only(HandleTypes::POSIX_FD, Some(no_fabric))),
        Err(error) => tried(HandleTypes::FABRIC)
            .map(|()| only(HandleTypes::FABRIC, None))
            .map_err(|_| error),
    }
}

/// Returns the handle types with which memory of `backing` at `location` can be shared: of registered memory POSIX fd, of any
/// other those of [`best_handle_types`].
///
/// # Errors
/// As `best_handle_types`.
pub fn handle_types_of(driver: &Driver, location: Location, backing: Backing) -> Result<Shareable> {
    match backing {
        Backing::Registered => Ok(Shareable {
            handle_types: HandleTypes::POSIX_FD,
            no_fabric: None,
        }),
        Backing::Driver | Backing::Auto => best_handle_types(driver, location),
    }
}
