//! The exports and the CPU mapping of one shared physical memory: each is created on first use, for all that share
//! the memory. A process keeps only some fds open ([`MAX_KEPT`]).

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

use crate::Driver;
use crate::driver::{Access, AccessDesc, HandleType, Location, ShareableHandle};
use crate::memory::CpuView;
use crate::per_driver::{PerDriver, lock};
use crate::vmm::{Mapping, PhysicalMemory};
use egmem_core::{Error, Result};

/// Physical memory that another owner keeps alive, together with its exports: a chunk with many shared
/// blocks.
pub trait Holds: fmt::Debug + Send + Sync {
    /// Returns the memory, the same for the value's whole life.
    fn physical(&self) -> &PhysicalMemory;
    /// Returns the memory's exports.
    fn exports(&self) -> &Exports;
}

/// The handles of one physical memory and the CPU's mapping of it, each created on first use. An fd is closed when
/// others were exported since, and created again for the next export.
#[derive(Debug, Default)]
pub struct Exports {
    // In this order: unmapped first, then closed.
    cpu: Mutex<Option<Mapping>>,
    fd: Arc<Place>,
    fabric: Mutex<Option<ShareableHandle>>,
}

impl Exports {
    /// Returns a handle of `memory`, which is the same memory in every call: a copy of the one that is kept, if it is.
    /// Drivers have been seen to refuse the CPU's access to memory with more than about 250 exports, imports
    /// and CPU mappings together; an export whose copies are all closed no longer counts.
    pub fn export(
        &self,
        memory: &PhysicalMemory,
        handle_type: HandleType,
    ) -> Result<ShareableHandle> {
        let mut kept = lock(match handle_type {
            HandleType::PosixFd => &*self.fd,
            HandleType::Fabric => &self.fabric,
        });
        let is_new = kept.is_none();
        let handle = match &mut *kept {
            Some(handle) => handle,
            none => none.insert(memory.export(handle_type)?),
        };
        let copy = match handle {
            ShareableHandle::PosixFd(fd) => fd
                .try_clone()
                .map(ShareableHandle::PosixFd)
                .map_err(|error| Error::system("duplicating a file descriptor", &error)),
            ShareableHandle::Fabric(handle) => Ok(ShareableHandle::Fabric(handle.clone())),
        };
        drop(kept);
        if is_new && handle_type == HandleType::PosixFd {
            note(memory.driver(), &self.fd);
        }
        copy
    }

    /// Lends the CPU's view of all of `memory`, through a mapping that is created for it and kept.
    pub fn with_cpu<T>(
        &self,
        memory: &PhysicalMemory,
        with: impl FnOnce(CpuView<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut cpu = lock(&self.cpu);
        let mapping = match &mut *cpu {
            Some(mapping) => mapping,
            none => none.insert(map_for_cpu(memory)?),
        };
        with(mapping.padded_cpu()?)
    }
}

fn map_for_cpu(memory: &PhysicalMemory) -> Result<Mapping> {
    let mut mapping = memory.map()?;
    mapping.set_access(&[AccessDesc::new(Location::Host, Access::ReadWrite)])?;
    Ok(mapping)
}

/// The most exported fds that a process keeps open for later exports, over all memory of a driver. A memory has an fd
/// for each part, and a process has 1024 by default.
pub(super) const MAX_KEPT: usize = 16;

/// A place for a part's exported fd.
pub(super) type Place = Mutex<Option<ShareableHandle>>;

/// The places of one driver with an fd, the oldest first.
type Kept = Arc<Mutex<VecDeque<Weak<Place>>>>;

/// Records that `place` has an fd now, and closes the oldest ones beyond [`MAX_KEPT`]. The caller holds the lock of no
/// place.
pub(super) fn note(driver: &Driver, place: &Arc<Place>) {
    static KEPT: PerDriver<Kept> = PerDriver::new();
    let of_driver = KEPT.of(driver);
    let mut kept = lock(&of_driver);
    kept.retain(|other| other.strong_count() > 0);
    kept.push_back(Arc::downgrade(place));
    let beyond = kept.len().saturating_sub(MAX_KEPT);
    let oldest: Vec<_> = kept.drain(..beyond).collect();
    drop(kept);
    for place in oldest.iter().filter_map(Weak::upgrade) {
        let fd = lock(&place).take();
        // The last copy's close takes the driver's time.
        drop(fd);
    }
}
