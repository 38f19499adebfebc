//! The options that all shapes share.

use crate::buffer::RequestedAccess;
use crate::driver::{AccessDesc, Location};
use crate::explain::name_missing;
use crate::ledger::{AllocPath, Label, Site};
use crate::vmm::{PhysicalMemory, PhysicalOptions};
use crate::{Driver, Result};

/// The location of a shape's memory, the access to it, and its name in the ledger.
#[derive(Clone, Debug)]
pub struct Placement {
    pub location: Location,
    pub access: RequestedAccess,
    pub label: Option<Label>,
}

impl Placement {
    pub fn at(location: Location) -> Self {
        Self {
            location,
            access: RequestedAccess::default(),
            label: None,
        }
    }

    /// Returns options for memory of a shape that the call `site` creates.
    pub fn memory(&self, site: Site) -> PhysicalOptions {
        let options = PhysicalMemory::options(self.location);
        options.recorded_as(AllocPath::ShapeChunk, self.label.clone(), site)
    }

    /// Returns the access of all locations to the memory.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`](crate::Error::NoSuchGpu); the driver's, when it is asked which GPUs reach the memory.
    pub fn grants(&self, driver: &Driver) -> Result<Vec<AccessDesc>> {
        let grants = self.access.grants(driver, self.location);
        grants.map_err(|error| name_missing(driver, error, self.location))
    }
}
