//! Memory received over a channel and not imported yet.

use super::{Credentials, Description, ImportOptions, ImportedBuffer, Origin};
use crate::Driver;
use crate::driver::ShareableHandle;
use egmem_core::Result;

/// Memory that another process offers: its description and its handles, not imported yet. Dropping it closes
/// the handles.
#[derive(Debug)]
pub struct Offer {
    pub(super) description: Description,
    pub(super) handles: Vec<ShareableHandle>,
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
            .import(driver, &self.description, self.handles)
    }

    /// Returns the description and the handles, to import them by other means.
    pub fn into_parts(self) -> (Description, Vec<ShareableHandle>) {
        (self.description, self.handles)
    }
}
