//! The keys and values in etcd. Values are JSON, readable with `etcdctl`.
//!
//! ```text
//! {prefix}exporters/{instance}         {"addresses": [...], "instance": "…", "boot": "…"}
//! {prefix}names/{name}@{instance}      the same
//! ```
//!
//! Names contain no `@`, so one name's keys are never a longer name's.

use super::exporter::{Exporter, MAX_ADDRESSES};
use crate::protocol::check_name;
use crate::share::InstanceId;

/// The longest value that is parsed, in bytes.
const MAX_VALUE: usize = 1 << 20;

/// The keys below a prefix.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: String,
}

impl Keys {
    /// Returns the keys below `prefix`, which ends with a slash.
    pub fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
        }
    }

    /// Returns an exporter's own key.
    pub fn exporter(&self, instance: InstanceId) -> String {
        format!("{}exporters/{instance}", self.prefix)
    }

    /// Returns the key that says that an exporter holds a name.
    pub fn name(&self, name: &str, instance: InstanceId) -> String {
        format!("{}names/{name}@{instance}", self.prefix)
    }

    /// Returns the prefix of a name's keys.
    pub fn holders(&self, name: &str) -> String {
        format!("{}names/{name}@", self.prefix)
    }

    /// Parses a key into its name and instance; `None` for a key that this crate did not write.
    pub fn read(&self, key: &[u8]) -> Option<(String, InstanceId)> {
        let key = std::str::from_utf8(key).ok()?;
        let rest = key.strip_prefix(&self.prefix)?.strip_prefix("names/")?;
        let (name, instance) = rest.rsplit_once('@')?;
        check_name(name).ok()?;
        Some((name.to_owned(), instance.parse().ok()?))
    }
}

/// Encodes an exporter as a value.
pub(super) fn value(exporter: &Exporter) -> Vec<u8> {
    // A list of texts and two texts: JSON can represent all of them.
    serde_json::to_vec(exporter).unwrap_or_default()
}

/// Decodes a value into its exporter, if that has this instance; any client with write access to etcd may
/// have written it.
pub(super) fn read_value(value: &[u8], instance: InstanceId) -> Option<Exporter> {
    if value.len() > MAX_VALUE {
        return None;
    }
    let exporter: Exporter = serde_json::from_slice(value).ok()?;
    let good =
        exporter.instance == instance && (1..=MAX_ADDRESSES).contains(&exporter.addresses.len());
    good.then_some(exporter)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::share::BootId;

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
        let bytes = value(&exporter);
        let instance = exporter.instance;
        assert_eq!(read_value(&bytes, instance), Some(exporter));
        let other = InstanceId::from_bytes([0; 16]);
        assert_eq!(read_value(&bytes, other), None, "another's key");
        assert_eq!(read_value(b"{}", instance), None);
        assert_eq!(read_value(b"\xff", instance), None);
    }

    #[test]
    fn one_name_is_not_a_longer_one() {
        let keys = Keys::new("/egmem/v1/");
        let instance = InstanceId::from_bytes([0xab; 16]);
        assert!(!keys.name("ab", instance).starts_with(&keys.holders("a")));
        assert_eq!(keys.read(keys.exporter(instance).as_bytes()), None);
    }

    proptest! {
        #[test]
        fn keys_read_back(name in "[A-Za-z0-9._/:-]{1,255}", bytes in any::<[u8; 16]>()) {
            let keys = Keys::new("/egmem/v1/");
            let instance = InstanceId::from_bytes(bytes);
            let key = keys.name(&name, instance);
            prop_assert!(key.starts_with(&keys.holders(&name)));
            prop_assert_eq!(keys.read(key.as_bytes()), Some((name, instance)));
        }

        #[test]
        fn any_bytes_are_read_or_not(key in any::<Vec<u8>>(), value in any::<Vec<u8>>()) {
            let mut whole = b"/egmem/v1/names/".to_vec();
            whole.extend(key);
            Keys::new("/egmem/v1/").read(&whole);
            read_value(&value, InstanceId::from_bytes([0; 16]));
        }
    }
}
