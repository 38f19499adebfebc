//! What came over a channel and is not imported yet.

use super::{Credentials, Description, ImportOptions, ImportedBuffer, Origin};
use crate::driver::ShareableHandle;
use crate::{Driver, Result};

/// Memory that another process offers: its description and its handles, not imported yet.
/// Dropped, the handles are closed.
#[derive(Debug)]
pub struct Offer {
    pub(super) description: Description,
    pub(super) handles: Vec<ShareableHandle>,
    pub(super) peer: Credentials,
}

impl Offer {
    /// What the memory is, on the other's word.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Who offers it.
    pub fn peer(&self) -> Credentials {
        self.peer
    }

    /// Imports it, by default as memory of the other process's user: see [`Origin`].
    ///
    /// # Errors
    /// As [`ImportOptions::import`].
    pub fn import(self, driver: &Driver, options: ImportOptions) -> Result<ImportedBuffer> {
        options.or_origin(Origin::User(self.peer.uid)).import(
            driver,
            &self.description,
            self.handles,
        )
    }

    /// The description and the handles, to import them by other means.
    pub fn into_parts(self) -> (Description, Vec<ShareableHandle>) {
        (self.description, self.handles)
    }
}
