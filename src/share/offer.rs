//! Memory received over a channel and not imported yet.

use super::{Credentials, Description, ImportOptions, ImportedBuffer, Origin, PartHandles};
use crate::Driver;
use crate::driver::{Access, ShareableHandle};
use egmem_core::Result;

/// Memory that another process offers: its description and its handles, not imported yet. Dropping it closes
/// the handles. Those of memory with many parts are received only when it is imported, a few at a time.
#[derive(Debug)]
pub struct Offer {
    pub(super) description: Description,
    pub(super) handles: PartHandles,
    pub(super) peer: Credentials,
}

impl Offer {
    /// Returns the description of the memory, as the other process claims.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the credentials of the sender.
    pub fn peer(&self) -> Credentials {
        self.peer
    }

    /// Imports the memory, by default with the other process's user as its origin: see [`Origin`].
    ///
    /// # Errors
    /// As [`ImportOptions::import`].
    #[track_caller]
    pub fn import(self, driver: &Driver, options: ImportOptions) -> Result<ImportedBuffer> {
        options
            .or_origin(Origin::User(self.peer.uid))
            .sender(self.peer.into())
            .import_from(driver, &self.description, self.handles)
    }

    /// Returns the offer with access to read alone: an import maps the memory so, and a write through the mapping is a fault.
    /// The handles would allow more: the kernel cannot limit them.
    pub fn read_only(mut self) -> Self {
        self.description.access = self.description.access.min(Access::Read);
        self
    }

    /// Returns the description and the handles, to import them by
    /// [`ImportOptions::import_from`]: of many parts, a few at a time.
    pub fn into_part_handles(self) -> (Description, PartHandles) {
        (self.description, self.handles)
    }

    /// Returns the description and the handles, to import them by other means. It receives the fds of memory with more
    /// than 32 parts, and all are open then. If the other process has ended before it sent them, or this one may open no
    /// more, there are no handles: the memory's import fails.
    pub fn into_parts(self) -> (Description, Vec<ShareableHandle>) {
        let handles = self.handles.all(self.description.parts.len());
        (self.description, handles.unwrap_or_default())
    }
}
