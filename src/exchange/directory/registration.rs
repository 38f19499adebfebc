//! An exporter's registration in a directory.

use std::fmt;

use super::etcd::Active;
use crate::protocol::check_name;
use crate::{Error, Result};

/// The state of a registration.
#[derive(Clone, Debug, PartialEq)]
pub enum RegistrationState {
    /// The directory has all names that were added.
    Registered,
    /// Some names are not in the directory yet.
    Pending,
    /// The directory is away; the task retries.
    Away(Error),
}

/// Keeps an exporter and its names in a directory; dropping it removes them in the background.
#[must_use = "dropped, it takes the exporter out of the directory"]
pub struct Registration {
    /// None in a directory that stores no names.
    pub(super) active: Option<Active>,
}

impl Registration {
    /// Adds a name, asynchronously.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an invalid name.
    pub fn add(&self, name: &str) -> Result<()> {
        check_name(name)?;
        if let Some(active) = &self.active {
            active.change(|names| names.insert(name.to_owned()));
        }
        Ok(())
    }

    /// Removes a name, asynchronously.
    pub fn remove(&self, name: &str) {
        if let Some(active) = &self.active {
            active.change(|names| names.remove(name));
        }
    }

    /// Returns the current state.
    pub fn state(&self) -> RegistrationState {
        if let Some(active) = &self.active {
            return active.state();
        }
        RegistrationState::Registered
    }

    /// Waits until the state differs from `than`, and returns it.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn changed(&self, than: &RegistrationState) -> RegistrationState {
        if let Some(active) = &self.active {
            return active.changed(than).await;
        }
        if *than == RegistrationState::Registered {
            std::future::pending::<()>().await;
        }
        RegistrationState::Registered
    }

    /// Removes the exporter and its names from the directory now.
    ///
    /// # Errors
    /// [`Error::Directory`] if the directory does not answer in time; its lease then removes them.
    pub async fn close(self) -> Result<()> {
        if let Some(active) = self.active {
            return active.close().await;
        }
        Ok(())
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
