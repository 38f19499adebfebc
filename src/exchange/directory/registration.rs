//! An exporter's place in a directory.

use std::fmt;

#[cfg(feature = "etcd")]
use super::register::Active;
use crate::exchange::protocol::check_name;
use crate::{Error, Result};

/// How a registration stands.
#[derive(Clone, Debug, PartialEq)]
pub enum RegistrationState {
    /// All names that were added are in the directory.
    Registered,
    /// Some are on their way.
    Pending,
    /// The directory is away; it is tried again and again.
    Away(Error),
}

/// Keeps an exporter and its names in a directory; dropped, it takes them out in the background.
#[must_use = "dropped, it takes the exporter out of the directory"]
pub struct Registration {
    #[cfg(feature = "etcd")]
    active: Option<Active>,
}

impl Registration {
    /// In a directory that keeps no names.
    pub(super) const fn nowhere() -> Self {
        Self {
            #[cfg(feature = "etcd")]
            active: None,
        }
    }

    #[cfg(feature = "etcd")]
    pub(super) const fn active(active: Active) -> Self {
        Self {
            active: Some(active),
        }
    }

    /// Adds a name, soon.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what is no name.
    pub fn add(&self, name: &str) -> Result<()> {
        check_name(name)?;
        #[cfg(feature = "etcd")]
        if let Some(active) = &self.active {
            active.change(|names| names.insert(name.to_owned()));
        }
        Ok(())
    }

    /// Takes a name out, soon.
    pub fn remove(&self, name: &str) {
        #[cfg(feature = "etcd")]
        if let Some(active) = &self.active {
            active.change(|names| names.remove(name));
        }
        #[cfg(not(feature = "etcd"))]
        let _ = name;
    }

    /// How it stands now.
    pub fn state(&self) -> RegistrationState {
        #[cfg(feature = "etcd")]
        if let Some(active) = &self.active {
            return active.state();
        }
        RegistrationState::Registered
    }

    /// Waits until the state is another than `than`, and returns it.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn changed(&self, than: &RegistrationState) -> RegistrationState {
        #[cfg(feature = "etcd")]
        if let Some(active) = &self.active {
            return active.changed(than).await;
        }
        if *than == RegistrationState::Registered {
            std::future::pending::<()>().await;
        }
        RegistrationState::Registered
    }

    /// Takes the exporter and its names out of the directory, now.
    ///
    /// # Errors
    /// [`Error::Directory`] if the directory does not answer in time; its lease ends them then.
    pub async fn close(self) -> Result<()> {
        #[cfg(feature = "etcd")]
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
