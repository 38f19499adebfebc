//! An fd of pages for another process.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Release;

use super::{Addresses, GRANULARITY, Pages, PagesMapping, file};
use crate::driver::Driver;
use crate::{Error, Result};

impl Pages {
    /// Returns an fd of shareable pages for another process. All of them exist then.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for private pages; [`Error::System`].
    pub fn export(&self, driver: &Driver) -> Result<OwnedFd> {
        let Some(file) = &self.file else {
            return Err(Error::invalid("memory", "its pages are private"));
        };
        if !driver.is_simulated() && file::expect_whole(file).is_err() {
            self.create_missing(driver, file)?;
        }
        let fd = file.as_fd().try_clone_to_owned();
        fd.map_err(|error| Error::system("duplicating the fd of memory", &error))
    }

    /// Creates the pages of a file that do not exist, by a mapping of its own.
    fn create_missing(&self, driver: &Driver, file: &File) -> Result<()> {
        let metadata = file.metadata();
        let metadata = metadata.map_err(|error| Error::system("looking at memory", &error))?;
        let addresses = Addresses::reserve(metadata.len(), GRANULARITY.bytes(), 0)?;
        let range = addresses.start()..addresses.start() + metadata.len();
        self.placed.store(false, Release);
        let mapping = PagesMapping::new(driver, &addresses, self, range)?;
        // Waits for the pages.
        let created = mapping.grant(driver, &[]);
        mapping.unmap(driver, &addresses, self)?;
        created
    }
}
