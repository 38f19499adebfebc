//! An exporter's registration in a directory.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::{Notify, oneshot, watch};

use crate::per_driver::lock;
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

/// The entries that a directory should have, and whether it has them.
pub(super) struct Wanted {
    names: Mutex<BTreeSet<String>>,
    pub(super) changed: Notify,
    pub(super) state: watch::Sender<RegistrationState>,
}

impl Wanted {
    pub(super) fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        lock(&self.names)
    }
}

/// Ends a registration's task; with a sender in it, the task reports how the end went.
pub(super) type Close = oneshot::Sender<oneshot::Sender<Result<()>>>;

/// Keeps an exporter and its names in a directory; dropping it removes them in the background.
#[must_use = "dropped, it takes the exporter out of the directory"]
pub struct Registration {
    pub(super) wanted: Arc<Wanted>,
    /// Dropping it ends the task. `None` in a directory that stores no names.
    close: Option<Close>,
}

impl Registration {
    pub(super) fn new(state: RegistrationState, close: Option<Close>) -> Self {
        let wanted = Arc::new(Wanted {
            names: Mutex::default(),
            changed: Notify::new(),
            state: watch::Sender::new(state),
        });
        Self { wanted, close }
    }

    /// Adds a name, asynchronously.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an invalid name.
    pub fn add(&self, name: &str) -> Result<()> {
        check_name(name)?;
        self.change(|names| names.insert(name.to_owned()));
        Ok(())
    }

    /// Removes a name, asynchronously.
    pub fn remove(&self, name: &str) {
        self.change(|names| names.remove(name));
    }

    fn change(&self, change: impl FnOnce(&mut BTreeSet<String>) -> bool) {
        // Under the lock, so that the task cannot report names as registered that it has not seen.
        let mut names = self.wanted.names();
        if self.close.is_some() && change(&mut names) {
            self.wanted.state.send_if_modified(|state| {
                let done = *state == RegistrationState::Registered;
                if done {
                    *state = RegistrationState::Pending;
                }
                done
            });
            self.wanted.changed.notify_one();
        }
    }

    /// Returns the current state.
    pub fn state(&self) -> RegistrationState {
        self.wanted.state.borrow().clone()
    }

    /// Waits until the state differs from `than`, and returns it.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn changed(&self, than: &RegistrationState) -> RegistrationState {
        let mut state = self.wanted.state.subscribe();
        let new = state.wait_for(|state| state != than).await;
        // The sender lasts as long as this registration.
        new.map_or_else(|_| self.state(), |new| new.clone())
    }

    /// Removes the exporter and its names from the directory now.
    ///
    /// # Errors
    /// [`Error::Directory`] if the directory does not answer in time; its lease then removes them.
    pub async fn close(self) -> Result<()> {
        let (sender, done) = oneshot::channel();
        // A task that its runtime has dropped cannot revoke; the lease expires by itself.
        let _ = self.close.map(|close| close.send(sender));
        done.await.unwrap_or(Ok(()))
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
