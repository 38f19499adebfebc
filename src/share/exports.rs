//! The exports and the CPU mapping of one shared physical memory: each is created once, however often the
//! memory is shared.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use crate::driver::{Access, AccessDesc, FabricHandle, HandleType, Location, ShareableHandle};
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
    fd: Mutex<Option<OwnedFd>>,
    fabric: Mutex<Option<FabricHandle>>,
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
        match handle_type {
            HandleType::PosixFd => {
                let mut kept = lock(&self.fd);
                let fd = match &mut *kept {
                    Some(fd) => fd,
                    none => match memory.export(handle_type)? {
                        ShareableHandle::PosixFd(fd) => none.insert(fd),
                        ShareableHandle::Fabric(_) => return Err(another_type(handle_type)),
                    },
                };
                fd.try_clone()
                    .map(ShareableHandle::PosixFd)
                    .map_err(|error| Error::system("duplicating a file descriptor", &error))
            }
            HandleType::Fabric => {
                let mut kept = lock(&self.fabric);
                let handle = match &mut *kept {
                    Some(handle) => handle,
                    none => match memory.export(handle_type)? {
                        ShareableHandle::Fabric(handle) => none.insert(handle),
                        ShareableHandle::PosixFd(_) => return Err(another_type(handle_type)),
                    },
                };
                Ok(ShareableHandle::Fabric(handle.clone()))
            }
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

fn another_type(wanted: HandleType) -> Error {
    let why = format!("the driver exported a handle of a type other than {wanted}");
    Error::invalid("handle", why)
}
