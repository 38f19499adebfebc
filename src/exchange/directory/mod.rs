//! Finds out which exporter holds a name.
//!
//! A [`Directory`] says where to ask, and nothing else: it never contains a handle, a ticket or a session.
//! Its answers may be out of date, so a fetch names the instance that it expects, and a restarted exporter is
//! not mistaken for the old one.
//! - [`Directory::fixed`]: the given addresses; each may hold any name.
//! - `Directory::etcd` (feature `etcd`): exporters register their addresses, instance and names in etcd
//!   under a lease that they keep alive. When one dies, its names go with the lease. While etcd is away, open
//!   connections continue, and look-ups fail with [`Error::Directory`] in time.
//!
//! Two exporters may claim one name, such as the old and the new during a move: both are found, in the order
//! in which they registered it.

#[cfg(feature = "etcd")]
mod etcd;
mod exporter;
mod finder;
// Fuzzed without etcd's client, whose build needs protoc.
#[cfg(any(feature = "etcd", fuzzing))]
#[cfg_attr(not(feature = "etcd"), allow(dead_code))]
mod keys;
mod registration;
mod watch;

use std::fmt;
use std::sync::Arc;

#[cfg(feature = "etcd")]
pub use etcd::EtcdOptions;
pub use exporter::{Exporter, MAX_ADDRESSES};
pub use finder::Finder;
pub use registration::{Registration, RegistrationState};
pub use watch::{DirectoryEvent, DirectoryWatch};

use super::protocol::{check_name, check_prefix};
use crate::{Address, Error, Result};

/// Returns which exporters hold a name. Clones are the same directory.
#[derive(Clone)]
pub struct Directory(DirectoryKind);

#[derive(Clone)]
enum DirectoryKind {
    Fixed(Arc<[Address]>),
    #[cfg(feature = "etcd")]
    Etcd(Arc<etcd::Etcd>),
}

impl Directory {
    /// Returns a directory of the exporters at these addresses, each of which may hold any name.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no address or more than [`MAX_ADDRESSES`].
    pub fn fixed(addresses: impl IntoIterator<Item = Address>) -> Result<Self> {
        let mut list: Vec<_> = Vec::new();
        for address in addresses {
            if !list.contains(&address) {
                list.push(address);
            }
            if list.len() > MAX_ADDRESSES {
                let why = format!("more than {MAX_ADDRESSES}");
                return Err(Error::invalid("addresses", why));
            }
        }
        if list.is_empty() {
            return Err(Error::invalid("addresses", "the list is empty"));
        }
        Ok(Self(DirectoryKind::Fixed(list.into())))
    }

    /// Returns the exporters that claim to hold a name, in the order in which they registered it; for a fixed
    /// directory all exporters, because only they know.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an invalid name, [`Error::Directory`] if
    /// the directory does not answer in time.
    pub async fn resolve(&self, name: &str) -> Result<Vec<Exporter>> {
        check_name(name)?;
        match &self.0 {
            DirectoryKind::Fixed(addresses) => Ok(addresses.iter().map(Exporter::at).collect()),
            #[cfg(feature = "etcd")]
            DirectoryKind::Etcd(etcd) => etcd.resolve(name).await,
        }
    }

    /// Returns whether its exporters have claimed the name themselves.
    pub(crate) const fn knows_names(&self) -> bool {
        !matches!(self.0, DirectoryKind::Fixed(_))
    }

    /// Watches the names that begin with `prefix`: existing names are reported first.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an invalid prefix, outside of a tokio
    /// runtime, and for a fixed directory, which does not know names: watch the exporters themselves.
    pub fn watch(&self, prefix: &str) -> Result<DirectoryWatch> {
        check_prefix(prefix)?;
        match &self.0 {
            DirectoryKind::Fixed(_) => Err(Error::invalid(
                "directory",
                "a directory of fixed addresses has no names to watch",
            )),
            #[cfg(feature = "etcd")]
            DirectoryKind::Etcd(etcd) => etcd.watch(prefix),
        }
    }

    /// Registers an exporter until the registration is dropped or closed. If the directory is away, registers
    /// it as soon as that is back, and again after each outage. A fixed directory stores nothing: its
    /// registration does nothing.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no address, no instance, no boot id, or
    /// outside of a tokio runtime.
    pub fn register(&self, exporter: Exporter) -> Result<Registration> {
        if exporter.addresses.is_empty() || exporter.addresses.len() > MAX_ADDRESSES {
            let why = format!("it has {} addresses", exporter.addresses.len());
            return Err(Error::invalid("exporter", why));
        }
        if exporter.instance.is_none() || exporter.boot.is_none() {
            return Err(Error::invalid("exporter", "no instance or no boot id"));
        }
        match &self.0 {
            DirectoryKind::Fixed(_) => Ok(Registration::new(RegistrationState::Registered, None)),
            #[cfg(feature = "etcd")]
            DirectoryKind::Etcd(etcd) => etcd.register(&exporter),
        }
    }
}

#[cfg(feature = "etcd")]
impl Directory {
    /// Returns a directory of the exporters that have registered in etcd. This sends no request: etcd may
    /// still be away.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for invalid options, [`Error::Tls`] for
    /// certificates that cannot be read.
    pub fn etcd(options: EtcdOptions) -> Result<Self> {
        let etcd = Arc::new(etcd::Etcd::new(options)?);
        Ok(Self(DirectoryKind::Etcd(etcd)))
    }
}

/// Displays the given addresses, or etcd's.
impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            DirectoryKind::Fixed(addresses) => {
                let texts: Vec<_> = addresses.iter().map(Address::to_string).collect();
                f.write_str(&texts.join(", "))
            }
            #[cfg(feature = "etcd")]
            DirectoryKind::Etcd(etcd) => write!(f, "etcd at {etcd}"),
        }
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Directory({self})")
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::{BootId, InstanceId};

    fn exporter(addresses: &[&str], boot: Option<u8>) -> Exporter {
        Exporter {
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
            instance: Some(InstanceId::from_bytes([1; 16])),
            boot: boot.map(|boot| BootId::from_bytes([boot; 16])),
        }
    }

    #[test]
    fn unix_sockets_are_for_the_own_machine() {
        let here = BootId::from_bytes([1; 16]);
        let (tcp, unix) = ("tcp://a:1", "unix:/run/x");
        for (addresses, boot, expected) in [
            (&[tcp, unix][..], Some(1), Some(unix)),
            (&[tcp, unix], Some(2), Some(tcp)),
            (&[unix], Some(2), None),
            (&[tcp], Some(1), Some(tcp)),
            (&[tcp, unix], None, Some(tcp)),
        ] {
            let address = exporter(addresses, boot)
                .address(here)
                .map(Address::to_string);
            assert_eq!(address.as_deref(), expected);
        }
    }

    #[tokio::test]
    async fn a_fixed_directory_names_all_once() {
        let address = Address::loopback(1);
        let directory = Directory::fixed([address.clone(), address.clone()]).unwrap();
        let found = directory.resolve("a").await.unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].addresses, [address]);
        assert!(directory.resolve("a b").await.is_err());
        assert!(Directory::fixed([]).is_err());
        assert!(directory.watch("").is_err());
        assert!(directory.register(exporter(&[], Some(1))).is_err());
        assert!(directory.register(exporter(&["a:1"], None)).is_err());
        let registration = directory.register(exporter(&["a:1"], Some(1))).unwrap();
        registration.add("a").unwrap();
        assert_eq!(registration.state(), RegistrationState::Registered);
        registration.close().await.unwrap();
    }
}
