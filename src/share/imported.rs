//! Memory of another process, mapped and granted in this one.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::cache::Cached;
use super::fd::posix;
use super::import::{MappedKey, PartKey};
use super::{Description, ImportOptions, Offer};
use crate::driver::{Access, AccessDesc, DevicePtr, Driver, HandleType, Location};
use crate::error::failed;
use crate::memory::{
    AccessChecks, CpuView, Engine, Memory, cpu_accessors, impl_cpu_memory, impl_memory,
};
use crate::vmm::{MappedRange, Mapping, PhysicalMemory};
use egmem_core::Result;

/// Imported memory at one range of addresses.
pub(super) type Mapped = MappedRange<Cached<PartKey, PhysicalMemory>>;

/// Memory that another process shared, mapped at one address for the CPU and the GPUs. Clones are the same
/// mapping; dropping the last one unmaps the memory and then releases it.
///
/// For a window on larger memory this is exactly the window. The whole memory is mapped, once for all windows
/// of one [`Origin`](super::Origin) that have the same access.
///
/// It stays valid, with its bytes, even if the exporter ends. Before the last clone is dropped, GPU work that
/// uses it must have finished.
///
/// [`ImportOptions::import`](super::ImportOptions::import) creates it, with an example, and so does
/// [`Offer`].
#[derive(Clone, Debug)]
pub struct ImportedBuffer(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) mapped: Cached<MappedKey, Mapped>,
    pub(super) description: Description,
    pub(super) via: HandleType,
}

impl ImportedBuffer {
    /// Returns the exporter's description of the memory.
    pub fn description(&self) -> &Description {
        &self.0.description
    }

    /// Returns the type of handle that it was imported through.
    pub fn via(&self) -> HandleType {
        self.0.via
    }

    /// Returns the access of `location`, as the driver reports it.
    ///
    /// # Errors
    /// As [`Mapping::access`].
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        self.0.mapped.first().access(location.into())
    }

    /// Returns the CPU's view of the memory.
    ///
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        let Description { len, .. } = self.0.description;
        self.all_cpu()?.slice(self.at(0), len)
    }

    /// Returns the CPU's view of everything mapped.
    fn all_cpu(&self) -> Result<CpuView<'_>> {
        let mapped = &self.0.mapped;
        mapped.cpu(mapped.padded())
    }

    /// Returns the CPU's view of the memory with its padding; a window has none.
    fn padded_cpu(&self) -> Result<CpuView<'_>> {
        if self.0.description.is_window() {
            return self.cpu();
        }
        self.all_cpu()
    }

    /// Returns where an offset lies in the mapping.
    fn at(&self, offset: u64) -> u64 {
        let start = self.0.description.offset.unwrap_or(0);
        start.saturating_add(offset)
    }

    cpu_accessors!();

    /// Reads the word at `offset` bytes with the CPU. It may lie in the padding beyond [`len`](Self::len); a
    /// window has none.
    ///
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible),
    /// [`OutOfRange`](crate::MemoryError::OutOfRange).
    pub fn word(&self, offset: u64) -> Result<u64> {
        self.padded_cpu()?.get(offset)
    }

    /// Writes a word where [`word`](Self::word) reads one.
    ///
    /// # Errors
    /// As [`word`](Self::word).
    pub fn put_word(&self, offset: u64, word: u64) -> Result<()> {
        self.padded_cpu()?.put(offset, word)
    }

    /// Returns the mappings of the parts, in the order of addresses. For a window they include the bytes
    /// around it: the window begins [`Description::offset`] bytes into the first.
    pub fn mappings(&self) -> &[Mapping] {
        self.0.mapped.mappings()
    }

    /// Returns the address, the same for every GPU and, on a host node, for the CPU. It is valid in this
    /// process: another process has other addresses for the same memory.
    pub fn device_ptr(&self) -> DevicePtr {
        Memory::device_ptr(self)
    }

    /// Returns the number of usable bytes.
    pub fn len(&self) -> u64 {
        self.0.description.len
    }

    /// Returns `false`: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl_cpu_memory!(ImportedBuffer);

// SAFETY: the mapping below it lives as long, and answers.
unsafe impl AccessChecks for ImportedBuffer {
    fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> Result<Access> {
        self.0.mapped.gpu_access(gpu, engine, self.at(offset), len)
    }

    fn may_be_on_host(&self, offset: u64, len: u64) -> bool {
        self.0.mapped.may_be_on_host(self.at(offset), len)
    }

    fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
        self.0.mapped.of_one_copy(self.at(offset), len)
    }

    fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
        self.0.mapped.of_one_mapping(self.at(offset), len)
    }

    fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
        self.0.mapped.is_read_only_for_cpu(self.at(offset), len)
    }
}

impl_memory! {
    /// Returns the location of the first part, as this machine's driver reports it.
    for ImportedBuffer, |this| this.0.mapped.first().driver(), this.0.mapped.start().add(this.at(0)),
    this.0.description.len, this.0.mapped.first().location()
}

/// Memory of another process that is imported, but not mapped. It keeps the fds, one for each part, so that it can be
/// [passed on](super::Channel::pass_on): a driver exports no imported memory.
#[derive(Debug)]
pub struct ImportedParts {
    parts: Vec<Cached<PartKey, PhysicalMemory>>,
    access: Vec<AccessDesc>,
    description: Description,
    pub(super) fds: Vec<OwnedFd>,
}

impl ImportedParts {
    /// Returns the memory of a part.
    ///
    /// # Panics
    /// If there are no more than `index` parts.
    pub fn part(&self, index: usize) -> &PhysicalMemory {
        self.parts[index].as_ref()
    }

    /// Returns the access that the options and the description allow together, the host's first.
    pub fn access(&self) -> &[AccessDesc] {
        &self.access
    }

    /// Returns the exporter's description of the memory.
    pub fn description(&self) -> &Description {
        &self.description
    }
}

impl Offer {
    /// Imports the memory without mapping it, by default with the other process's user as its origin: see [`Origin`](super::Origin).
    ///
    /// # Errors
    /// As [`ImportOptions::import`]; [`System`](crate::MemoryError::System) if this process may open no more file descriptors.
    #[track_caller]
    pub fn import_parts(self, driver: &Driver, options: ImportOptions) -> Result<ImportedParts> {
        let options = self.with_sender(options);
        let (description, handles) = self.into_parts();
        let fds = handles.iter().filter_map(posix);
        let fds: io::Result<_> = fds.map(|fd| fd.try_clone_to_owned()).collect();
        let fds = fds.map_err(failed("duplicating a file descriptor"))?;
        let (parts, _) = options.import_parts(driver, &description, handles.into())?;
        let (access, _) = options.resolve(driver, &description, &parts)?;
        Ok(ImportedParts {
            parts,
            access,
            description,
            fds,
        })
    }
}
