//! The exports and the CPU mapping of one shared physical memory: each is created once, however often the
//! memory is shared.

use std::fmt;
use std::sync::Mutex;

use crate::driver::{Access, AccessDesc, HandleType, Location, ShareableHandle};
use crate::memory::CpuView;
use crate::per_driver::lock;
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

/// The handles of one physical memory and the CPU's mapping of it, each created on first use.
#[derive(Debug, Default)]
pub struct Exports {
    // In this order: unmapped first, then closed.
    cpu: Mutex<Option<Mapping>>,
    fd: Mutex<Option<ShareableHandle>>,
    fabric: Mutex<Option<ShareableHandle>>,
}

impl Exports {
    /// Returns a handle of `memory`, which is the same memory in every call: a copy of the cached one.
    /// Drivers have been seen to refuse the CPU's access to memory with more than about 250 exports, imports
    /// and CPU mappings together.
    pub fn export(
        &self,
        memory: &PhysicalMemory,
        handle_type: HandleType,
    ) -> Result<ShareableHandle> {
        let mut kept = lock(match handle_type {
            HandleType::PosixFd => &self.fd,
            HandleType::Fabric => &self.fabric,
        });
        let handle = match &mut *kept {
            Some(handle) => handle,
            none => none.insert(memory.export(handle_type)?),
        };
        match handle {
            ShareableHandle::PosixFd(fd) => fd
                .try_clone()
                .map(ShareableHandle::PosixFd)
                .map_err(|error| Error::system("duplicating a file descriptor", &error)),
            ShareableHandle::Fabric(handle) => Ok(ShareableHandle::Fabric(handle.clone())),
        }
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
