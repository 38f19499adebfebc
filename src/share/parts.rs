//! Memory of another process that the importer maps by itself.

use std::os::fd::{AsFd, OwnedFd};

use super::cache::Cached;
use super::fd::posix;
use super::frame::Body;
use super::import::PartKey;
use super::{Channel, Description, ImportOptions, Offer, Origin};
use crate::driver::{AccessDesc, Driver};
use crate::vmm::PhysicalMemory;
use crate::{MemoryError, MemoryResult, Result};

/// Memory of another process that is imported, but not mapped. It keeps the fds, one for each part, so that it can be
/// [passed on](Channel::pass_on): a driver exports no imported memory.
#[derive(Debug)]
pub struct ImportedParts {
    parts: Vec<Cached<PartKey, PhysicalMemory>>,
    access: Vec<AccessDesc>,
    description: Description,
    fds: Vec<OwnedFd>,
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
    /// Imports the memory without mapping it, by default with the other process's user as its origin: see [`Origin`].
    ///
    /// # Errors
    /// As [`ImportOptions::import`]; [`System`](MemoryError::System) if this process may open no more file descriptors.
    #[track_caller]
    pub fn import_parts(
        self,
        driver: &Driver,
        options: ImportOptions,
    ) -> MemoryResult<ImportedParts> {
        let options = options.or_origin(Origin::User(self.peer.uid));
        let options = options.sender(self.peer.into());
        let (description, handles) = self.into_parts();
        let fds = handles.iter().filter_map(posix);
        let fds = fds.map(|fd| fd.try_clone_to_owned());
        let fds = fds.collect::<std::io::Result<_>>();
        let fds =
            fds.map_err(|error| MemoryError::system("duplicating a file descriptor", &error))?;
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

impl Channel {
    /// Sends imported memory on to another process, with the description and the access that came with it.
    ///
    /// # Errors
    /// [`InvalidArgument`](MemoryError::InvalidArgument) for memory that came by fabric handles; as [`send`](Self::send).
    pub fn pass_on(&mut self, memory: &ImportedParts) -> Result<()> {
        let fds: Vec<_> = memory.fds.iter().map(OwnedFd::as_fd).collect();
        if fds.len() != memory.description.parts.len() {
            let why = "it came by fabric handles";
            return Err(MemoryError::invalid("imported memory", why).into());
        }
        self.send_body(&Body::Memory(memory.description.clone()), &fds)
    }
}
