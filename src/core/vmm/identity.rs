//! Identities of memory, independent of mappings: never an address, never a process id.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::driver::random;
use crate::fork::PerProcess;
use crate::{Error, Result};

/// Implements a 16-byte id: displayed as 32 hex digits, in binary formats a string of 16 bytes.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; 16]);

        impl $name {
            /// Returns the id with these bytes.
            pub const fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(bytes)
            }

            /// Returns the id's bytes.
            pub const fn as_bytes(&self) -> &[u8; 16] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", u128::from_be_bytes(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = Error;
            /// Parses 32 hex digits; ignores dashes.
            fn from_str(text: &str) -> Result<Self> {
                let id = crate::text::hex_id(text.trim()).map(Self);
                id.ok_or_else(|| Error::invalid("id", "32 hex digits are expected"))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                if serializer.is_human_readable() {
                    serializer.collect_str(self)
                } else {
                    serializer.serialize_bytes(&self.0)
                }
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Visitor;
                impl de::Visitor<'_> for Visitor {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str("an id of 16 bytes")
                    }
                    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<$name, E> {
                        bytes.try_into().map($name).map_err(|_| E::invalid_length(bytes.len(), &self))
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(|_| E::invalid_value(de::Unexpected::Str(text), &self))
                    }
                }
                if deserializer.is_human_readable() {
                    deserializer.deserialize_str(Visitor)
                } else {
                    deserializer.deserialize_bytes(Visitor)
                }
            }
        }
    };
}

id! {
    /// One boot of one machine: processes with the same id can pass each other fds.
    ///
    /// Source: `/proc/sys/kernel/random/boot_id`, the same in every container of the machine.
    BootId
}

id! {
    /// One run of a process that exports memory, or of an exchange server: random, new at every start.
    InstanceId
}

impl BootId {
    /// Returns this machine's id.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel does not report it.
    pub fn current() -> Result<Self> {
        static CURRENT: PerProcess<OnceLock<BootId>> = PerProcess::new();
        let current = CURRENT.get(|_| OnceLock::new());
        if let Some(known) = current.get() {
            return Ok(*known);
        }
        let path = "/proc/sys/kernel/random/boot_id";
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::system(format!("reading {path}"), &error))?;
        let id = text.parse()?;
        Ok(*current.get_or_init(|| id))
    }
}

impl InstanceId {
    /// Creates a new random id.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel has no random bytes.
    pub fn random() -> Result<Self> {
        random()
            .map(Self)
            .map_err(|error| Error::system("reading random bytes", &error))
    }

    /// Returns this process's id, the same until it ends. A forked process has an id of its own, because its
    /// allocation numbers continue from its parent's.
    ///
    /// # Errors
    /// As [`random`](Self::random).
    pub fn current() -> Result<Self> {
        static CURRENT: PerProcess<OnceLock<InstanceId>> = PerProcess::new();
        let current = CURRENT.get(|_| OnceLock::new());
        match current.get() {
            Some(id) => Ok(*id),
            None => Self::random().map(|id| *current.get_or_init(|| id)),
        }
    }
}

/// Identifies one physical memory among all machines, processes and times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// The machine's boot.
    pub boot: BootId,
    /// The process that created it.
    pub instance: InstanceId,
    /// The memory's number in that process, which does not reveal how many there are.
    pub allocation: u64,
    /// How often it has changed owners: each time it counts as other memory.
    pub generation: u64,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            boot,
            instance,
            allocation,
            generation,
        } = self;
        write!(f, "{boot}/{instance}/{allocation}/{generation}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_read_back_from_text_and_json() {
        let id = InstanceId::random().unwrap();
        assert_eq!(id.to_string().parse::<InstanceId>().unwrap(), id);
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(serde_json::from_str::<InstanceId>(&json).unwrap(), id);
        for wrong in ["", "12", "+0000000000000000000000000000000", "zz"] {
            assert!(wrong.parse::<InstanceId>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn in_binary_they_are_bytes() {
        let id = BootId::from_bytes(*b"0123456789abcdef");
        let mut bytes = Vec::new();
        ciborium::into_writer(&id, &mut bytes).unwrap();
        assert_eq!(bytes[0], 0x50, "a CBOR byte string of 16");
        assert_eq!(ciborium::from_reader::<BootId, _>(&bytes[..]).unwrap(), id);
        assert!(ciborium::from_reader::<BootId, _>(&b"\x41a"[..]).is_err());
    }

    #[test]
    fn a_process_has_one_instance_and_a_machine_one_boot() {
        assert_eq!(InstanceId::current(), InstanceId::current());
        assert_ne!(InstanceId::current(), InstanceId::random());
        assert_eq!(BootId::current(), BootId::current());
    }
}
