//! Finds out which exporter holds a name, in etcd (feature `etcd`).
//!
//! Exporters register their addresses, instance and names under a lease that they keep alive. When one dies, its names go
//! with the lease. A directory says where to ask, and nothing else: it never contains a handle or a session.
//! Its answers may be out of date, so a fetch names the [instance](crate::FetchOptions::instance) that it expects, and a
//! restarted exporter is not mistaken for the old one. While etcd is away, open connections continue, and look-ups fail
//! with [`Error::Directory`] in time.
//!
//! Two exporters may claim one name, such as the old and the new during a move: both are found, in the order
//! in which they registered it.

#[cfg(feature = "etcd")]
mod etcd;
mod exporter;
// Fuzzed without etcd's client, whose build needs protoc.
#[cfg(any(feature = "etcd", fuzzing))]
#[cfg_attr(not(feature = "etcd"), allow(dead_code))]
mod keys;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::{Notify, oneshot, watch};

#[cfg(feature = "etcd")]
pub use etcd::EtcdOptions;
pub use exporter::{Exporter, MAX_ADDRESSES};

use super::protocol::check_name;
use crate::per_driver::lock;
use crate::{Error, Result};

/// The exporters that have registered in etcd, and their names. Clones are the same directory.
///
/// ```no_run
/// use egmem::exchange::Client;
/// use egmem::exchange::directory::{Directory, EtcdOptions};
/// use egmem::share::BootId;
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let driver = egmem::Driver::open()?;
/// let directory = Directory::etcd(EtcdOptions::new(["http://127.0.0.1:2379"]))?;
/// for exporter in directory.resolve("weights").await? {
///     let Some(address) = exporter.address(BootId::current()?) else { continue };
///     let client = Client::options(address.clone()).connect(&driver).await?;
///     let weights = client.fetch("weights").instance(exporter.instance).await?;
/// }
/// # Ok::<(), egmem::exchange::Error>(())
/// # }).unwrap();
/// ```
#[cfg(feature = "etcd")]
#[derive(Clone)]
pub struct Directory(Arc<etcd::Etcd>);

#[cfg(feature = "etcd")]
impl Directory {
    /// Returns a directory of the exporters that have registered in etcd. This sends no request: etcd may
    /// still be away.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for invalid options, [`Error::Tls`] for
    /// certificates that cannot be read.
    pub fn etcd(options: EtcdOptions) -> Result<Self> {
        Ok(Self(Arc::new(etcd::Etcd::new(options)?)))
    }

    /// Returns the exporters that claim to hold a name, in the order in which they registered it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an invalid name, [`Error::Directory`] if
    /// etcd does not answer in time.
    pub async fn resolve(&self, name: &str) -> Result<Vec<Exporter>> {
        check_name(name)?;
        self.0.resolve(name).await
    }

    /// Registers an exporter until the registration is dropped or closed. If etcd is away, registers it as
    /// soon as that is back, and again after each outage.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no address, more than [`MAX_ADDRESSES`], or
    /// outside of a tokio runtime.
    pub fn register(&self, exporter: Exporter) -> Result<Registration> {
        if exporter.addresses.is_empty() || exporter.addresses.len() > MAX_ADDRESSES {
            let why = format!("it has {} addresses", exporter.addresses.len());
            return Err(Error::invalid("exporter", why));
        }
        self.0.register(&exporter)
    }
}

/// Displays etcd's endpoints.
#[cfg(feature = "etcd")]
impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd at {}", self.0)
    }
}

#[cfg(feature = "etcd")]
impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Directory({self})")
    }
}

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
#[cfg_attr(not(feature = "etcd"), allow(dead_code))]
struct Wanted {
    names: Mutex<BTreeSet<String>>,
    changed: Notify,
    state: watch::Sender<RegistrationState>,
}

#[cfg_attr(not(feature = "etcd"), allow(dead_code))]
impl Wanted {
    fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        lock(&self.names)
    }
}

/// Ends a registration's task; with a sender in it, the task reports how the end went.
type Close = oneshot::Sender<oneshot::Sender<Result<()>>>;

/// Keeps an exporter and its names in a directory; dropping it removes them in the background.
#[must_use = "dropped, it takes the exporter out of the directory"]
pub struct Registration {
    wanted: Arc<Wanted>,
    /// Dropping it ends the task.
    close: Close,
}

impl Registration {
    #[cfg(feature = "etcd")]
    fn new(close: Close) -> Self {
        let wanted = Arc::new(Wanted {
            names: Mutex::default(),
            changed: Notify::new(),
            state: watch::Sender::new(RegistrationState::Pending),
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
        if change(&mut names) {
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
        let _ = self.close.send(sender);
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

/// For tests/fuzz only.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing {
    use super::keys::{Keys, read_value, value};

    /// Decodes an entry of etcd: the key, a line feed, the value. An accepted entry must encode to the same
    /// bytes.
    pub fn entry(bytes: &[u8]) {
        let line = bytes.iter().position(|&byte| byte == b'\n');
        let (key, json) = bytes.split_at(line.unwrap_or(bytes.len()));
        let keys = Keys::new("/egmem/v1/");
        let Some((name, instance)) = keys.read(key) else {
            return;
        };
        let own = keys.name(&name, instance);
        assert!(own.starts_with(&keys.holders(&name)));
        assert_eq!(keys.read(own.as_bytes()), Some((name, instance)));
        if let Some(exporter) = json.get(1..).and_then(|json| read_value(json, instance)) {
            assert_eq!(read_value(&value(&exporter), instance), Some(exporter));
        }
    }
}
