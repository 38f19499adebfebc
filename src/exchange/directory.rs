//! Finds out which exporter holds a name, in etcd (feature `etcd`).
//!
//! Exporters register their addresses, instance and names under a lease that they keep alive. When one dies, its names go
//! with the lease. A directory says where to ask, and nothing else: it never contains a handle or a session.
//! Its answers may be out of date, so a fetch names the [instance](crate::FetchOptions::instance) that it expects, and a
//! restarted exporter is not mistaken for the old one. While etcd is away, open connections continue, and look-ups fail
//! with [`Error::Directory`](crate::Error::Directory) in time.
//!
//! Two exporters may claim one name, such as the old and the new during a move: both are found, in the order
//! in which they registered it.
//!
//! The keys in etcd and their values, which are JSON and readable with `etcdctl`:
//!
//! ```text
//! {prefix}exporters/{instance}         {"addresses": [...], "instance": "…", "boot": "…"}
//! {prefix}names/{name}@{instance}      the same
//! ```

#[cfg(feature = "etcd")]
mod etcd;

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

#[cfg(feature = "etcd")]
pub use etcd::{Directory, EtcdOptions};

use super::protocol::check_name;
use crate::share::{BootId, InstanceId};
use crate::{Address, Result};

/// The most addresses of one exporter.
pub const MAX_ADDRESSES: usize = 4096;

/// An exporter, as a directory knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Exporter {
    /// Its addresses, as other machines reach it; Unix sockets are for its own machine.
    pub addresses: Vec<Address>,
    /// Its instance.
    pub instance: InstanceId,
    /// Its machine.
    pub boot: BootId,
}

impl Exporter {
    /// Returns the address to connect to from a process on the machine `here`: a Unix socket if the exporter
    /// is on the same machine, otherwise its first TCP address.
    pub fn address(&self, here: BootId) -> Option<&Address> {
        let mut unix = self.addresses.iter().filter(|address| address.is_unix());
        let mut tcp = self.addresses.iter().filter(|address| !address.is_unix());
        if self.boot == here {
            unix.next().or_else(|| tcp.next())
        } else {
            tcp.next()
        }
    }
}

/// Keeps an exporter and its names in a directory; dropping it removes them in the background.
#[derive(Debug)]
#[must_use = "dropped, it takes the exporter out of the directory"]
pub struct Registration {
    /// The names that the directory should have.
    names: watch::Sender<BTreeSet<String>>,
    /// Whether the directory has all of them.
    registered: Arc<watch::Sender<bool>>,
    /// Dropping it ends the task.
    open: oneshot::Sender<()>,
    /// How the end went.
    task: JoinHandle<Result<()>>,
}

impl Registration {
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
        self.names.send_if_modified(|names| {
            let changed = change(names);
            if changed {
                // Under the lock of the names, so that the task cannot report names as registered that it has not seen.
                self.registered.send_replace(false);
            }
            changed
        });
    }

    /// Returns whether the directory has all names that were added. The log says why it has not, if it is away; the task retries.
    pub fn is_registered(&self) -> bool {
        *self.registered.borrow()
    }

    /// Waits until [`is_registered`](Self::is_registered) returns this value.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn wait_for(&self, registered: bool) {
        let mut state = self.registered.subscribe();
        // The sender lasts as long as this registration.
        let _ = state.wait_for(|now| *now == registered).await;
    }

    /// Removes the exporter and its names from the directory now.
    ///
    /// # Errors
    /// [`Error::Directory`](crate::Error::Directory) if the directory does not answer in time; its lease then removes them.
    pub async fn close(self) -> Result<()> {
        drop(self.open);
        // A task that its runtime has dropped cannot revoke; the lease expires by itself.
        self.task.await.unwrap_or(Ok(()))
    }
}

/// The longest value that is parsed, in bytes.
#[cfg(any(feature = "etcd", fuzzing, test))]
const MAX_VALUE: usize = 1 << 20;

/// The keys below a prefix, which ends with a slash. Names contain no `@`, so one name's keys are never a longer name's.
// Fuzzed without etcd's client, whose build needs protoc.
#[cfg(any(feature = "etcd", fuzzing, test))]
#[cfg_attr(not(feature = "etcd"), allow(dead_code))]
struct Keys(String);

#[cfg(any(feature = "etcd", fuzzing, test))]
#[cfg_attr(not(feature = "etcd"), allow(dead_code))]
impl Keys {
    /// Returns an exporter's own key.
    fn exporter(&self, instance: InstanceId) -> String {
        format!("{}exporters/{instance}", self.0)
    }

    /// Returns the key that says that an exporter holds a name.
    fn name(&self, name: &str, instance: InstanceId) -> String {
        format!("{}{instance}", self.holders(name))
    }

    /// Returns the prefix of a name's keys.
    fn holders(&self, name: &str) -> String {
        format!("{}names/{name}@", self.0)
    }

    /// Parses the key of a name into the name and the instance; `None` for a key that this crate did not write.
    fn read(&self, key: &[u8]) -> Option<(String, InstanceId)> {
        let key = std::str::from_utf8(key).ok()?;
        let rest = key.strip_prefix(&self.0)?.strip_prefix("names/")?;
        let (name, instance) = rest.rsplit_once('@')?;
        check_name(name).ok()?;
        Some((name.to_owned(), instance.parse().ok()?))
    }
}

#[cfg(any(feature = "etcd", fuzzing, test))]
#[cfg_attr(not(feature = "etcd"), allow(dead_code))]
impl Exporter {
    /// Encodes it as a value in etcd.
    fn to_value(&self) -> Vec<u8> {
        // A list of texts and two texts: JSON can represent all of them.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Decodes a value, if it is of this instance; any client with write access to etcd may have written it.
    fn from_value(value: &[u8], instance: InstanceId) -> Option<Self> {
        let value = Some(value).filter(|value| value.len() <= MAX_VALUE)?;
        let exporter: Self = serde_json::from_slice(value).ok()?;
        let addresses = 1..=MAX_ADDRESSES;
        let good = exporter.instance == instance && addresses.contains(&exporter.addresses.len());
        good.then_some(exporter)
    }
}

/// For tests/fuzz only.
#[cfg(fuzzing)]
#[doc(hidden)]
#[path = "directory/tests/fuzzing.rs"]
pub mod fuzzing;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys() -> Keys {
        Keys("/egmem/v1/".into())
    }

    #[test]
    fn unix_sockets_are_for_the_own_machine() {
        let here = BootId::from_bytes([1; 16]);
        let (tcp, unix) = ("tcp://a:1", "unix:/run/x");
        for (addresses, boot, expected) in [
            (&[tcp, unix][..], 1, Some(unix)),
            (&[tcp], 1, Some(tcp)),
            (&[tcp, unix], 2, Some(tcp)),
            (&[unix], 2, None),
        ] {
            let exporter = Exporter {
                addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
                instance: InstanceId::from_bytes([1; 16]),
                boot: BootId::from_bytes([boot; 16]),
            };
            let address = exporter.address(here).map(Address::to_string);
            assert_eq!(address.as_deref(), expected);
        }
    }

    fn exporter() -> Exporter {
        Exporter {
            addresses: vec!["a:1".parse().unwrap(), "unix:/run/x".parse().unwrap()],
            instance: InstanceId::from_bytes([0xab; 16]),
            boot: BootId::from_bytes([1; 16]),
        }
    }

    #[test]
    fn values_read_back() {
        let exporter = exporter();
        let bytes = exporter.to_value();
        let instance = exporter.instance;
        assert_eq!(Exporter::from_value(&bytes, instance), Some(exporter));
        let other = InstanceId::from_bytes([0; 16]);
        assert_eq!(Exporter::from_value(&bytes, other), None, "another's key");
        assert_eq!(Exporter::from_value(b"{}", instance), None);
        assert_eq!(Exporter::from_value(b"\xff", instance), None);
    }

    #[test]
    fn one_name_is_not_a_longer_one() {
        let keys = keys();
        let instance = InstanceId::from_bytes([0xab; 16]);
        assert!(!keys.name("ab", instance).starts_with(&keys.holders("a")));
        assert_eq!(keys.read(keys.exporter(instance).as_bytes()), None);
    }

    proptest! {
        #[test]
        fn keys_read_back(name in "[A-Za-z0-9._/:-]{1,255}", bytes in any::<[u8; 16]>()) {
            let keys = keys();
            let instance = InstanceId::from_bytes(bytes);
            let key = keys.name(&name, instance);
            prop_assert!(key.starts_with(&keys.holders(&name)));
            prop_assert_eq!(keys.read(key.as_bytes()), Some((name, instance)));
        }

        #[test]
        fn any_bytes_are_read_or_not(key in any::<Vec<u8>>(), value in any::<Vec<u8>>()) {
            let mut whole = b"/egmem/v1/names/".to_vec();
            whole.extend(key);
            keys().read(&whole);
            Exporter::from_value(&value, InstanceId::from_bytes([0; 16]));
        }
    }
}
