//! The description that an importer of memory needs besides its handles.

use std::borrow::Cow;

use serde::{Deserialize, Serialize, Serializer};

use super::Identity;
use crate::driver::{Access, Location, refuse};
use crate::size::Granularity;
use egmem_core::{Error, Result};

/// The most parts of shared memory.
pub const MAX_PARTS: usize = 4096;

/// One physical memory of several that are mapped side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// The memory's identity.
    pub identity: Identity,
    /// Its size in bytes, as created: a multiple of 2 MiB.
    pub bytes: u64,
    /// Its location on its own machine.
    pub location: Location,
}

/// A description of shared memory without its handles: it contains no secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "Sent<'_>")]
pub struct Description {
    /// Usable bytes, from [`offset`](Self::offset) on.
    pub len: u64,
    /// The start of a window, in bytes from the first part's start, if other code uses the memory too. A
    /// window begins in the first part and ends in the last, and nothing around it is padding.
    ///
    /// `None`: the usable bytes begin where the first part does, and padding follows them.
    pub offset: Option<u64>,
    /// The access that an importer is asked to keep to; a handle itself allows everything.
    pub access: Access,
    /// The physical memories, in the order of addresses: 1 to [`MAX_PARTS`].
    pub parts: Vec<Part>,
}

/// The description as it is sent. A peer that does not know windows skips that field and would take the
/// memory's first bytes for the window. So `len` is 0 beside a window, and such a peer finds no bytes
/// instead.
#[derive(Serialize, Deserialize)]
struct Sent<'a> {
    len: u64,
    access: Access,
    parts: Cow<'a, [Part]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    window: Option<Window>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct Window {
    offset: u64,
    len: u64,
}

impl Serialize for Description {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let window = self.offset.map(|offset| Window {
            offset,
            len: self.len,
        });
        let sent = Sent {
            len: if window.is_some() { 0 } else { self.len },
            access: self.access,
            parts: Cow::Borrowed(&self.parts),
            window,
        };
        sent.serialize(serializer)
    }
}

impl TryFrom<Sent<'_>> for Description {
    type Error = &'static str;

    fn try_from(sent: Sent<'_>) -> Result<Self, Self::Error> {
        let (len, offset) = match sent.window {
            // Other versions would read it differently.
            Some(_) if sent.len != 0 => return Err("a length beside a window"),
            Some(window) => (window.len, Some(window.offset)),
            None => (sent.len, None),
        };
        Ok(Self {
            len,
            offset,
            access: sent.access,
            parts: sent.parts.into_owned(),
        })
    }
}

impl Description {
    /// Returns whether this is a window on memory that other code uses too.
    pub const fn is_window(&self) -> bool {
        self.offset.is_some()
    }

    /// Returns the size of all parts, in bytes.
    pub fn padded(&self) -> u64 {
        self.parts
            .iter()
            .fold(0, |sum, part| sum.saturating_add(part.bytes))
    }

    /// Returns where the parts are, each location once and in ascending order.
    pub fn locations(&self) -> Vec<Location> {
        let mut locations: Vec<_> = self.parts.iter().map(|part| part.location).collect();
        locations.sort_unstable();
        locations.dedup();
        locations
    }

    /// Checks a description from an untrusted source.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the first fault: no parts or too many, a size that is 0 or not a
    /// multiple of 2 MiB, more bytes than an address space has, a `len` of 0, beyond the parts or ending
    /// before the last one, a window that does not begin in the first part and end in the last, the same part
    /// twice, or no access.
    pub fn check(&self) -> Result<()> {
        let wrong = |why| Error::invalid("description", why);
        let count = self.parts.len();
        refuse! { wrong; !(1..=MAX_PARTS).contains(&count) => "{count} parts, not 1 to {MAX_PARTS}"; }
        let mut before = 0_u64;
        let mut sum = 0_u64;
        for Part { bytes, .. } in &self.parts {
            before = sum;
            sum = sum.saturating_add(*bytes);
            refuse! { wrong;
                *bytes == 0 || !Granularity::TWO_MIB.divides(*bytes) => "a part of {bytes} bytes";
                sum > isize::MAX as u64 => "more bytes than an address space";
            }
        }
        let right = match self.offset {
            // The last part may be padding only: room for a probe.
            None => self.len != 0 && (before..=sum).contains(&self.len),
            Some(offset) => {
                let end = offset.checked_add(self.len);
                let ends = end.is_some_and(|end| before < end && end <= sum);
                self.len != 0 && offset < self.parts[0].bytes && ends
            }
        };
        let Self { len, offset, .. } = self;
        let at = || offset.map_or(String::new(), |offset| format!(" at {offset}"));
        let mut identities: Vec<_> = self.parts.iter().map(|part| part.identity).collect();
        identities.sort_unstable();
        refuse! { wrong;
            !right => "{len} bytes{} in parts of {sum} bytes together", at();
            identities.windows(2).any(|pair| pair[0] == pair[1]) => "the same memory twice";
            self.access == Access::None => "no access";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BootId, InstanceId};
    use super::*;

    fn description(len: u64, parts: &[u64]) -> Description {
        let part = |(allocation, &bytes): (usize, &u64)| Part {
            identity: Identity {
                boot: BootId::from_bytes([1; 16]),
                instance: InstanceId::from_bytes([2; 16]),
                allocation: allocation as u64,
                generation: 0,
            },
            bytes,
            location: Location::HostNuma(0),
        };
        Description {
            len,
            offset: None,
            access: Access::ReadWrite,
            parts: parts.iter().enumerate().map(part).collect(),
        }
    }

    const GRANULE: u64 = 2 << 20;

    #[test]
    fn what_can_be_is_accepted() {
        for (len, parts) in [
            (1, &[GRANULE][..]),
            (GRANULE, &[GRANULE]),
            (GRANULE + 1, &[GRANULE, 4 * GRANULE]),
            (GRANULE, &[GRANULE, GRANULE]),
        ] {
            description(len, parts).check().unwrap();
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (len, parts) in [
            (0, &[GRANULE][..]),
            (1, &[]),
            (GRANULE + 1, &[GRANULE]),
            (GRANULE - 1, &[GRANULE, GRANULE]),
            (2 * GRANULE + 1, &[GRANULE, GRANULE]),
            (GRANULE, &[GRANULE, GRANULE, GRANULE]),
            (1, &[0]),
            (1, &[4096]),
            (1 << 62, &[1 << 62, 1 << 62]),
        ] {
            assert!(description(len, parts).check().is_err(), "{len} {parts:?}");
        }
        let mut twice = description(GRANULE + 1, &[GRANULE, GRANULE]);
        twice.parts[1].identity = twice.parts[0].identity;
        assert!(twice.check().is_err());
        let mut none = description(1, &[GRANULE]);
        none.access = Access::None;
        assert!(none.check().is_err());
    }

    fn window(offset: u64, len: u64, parts: &[u64]) -> Description {
        Description {
            offset: Some(offset),
            ..description(len, parts)
        }
    }

    #[test]
    fn a_window_begins_in_the_first_part_and_ends_in_the_last() {
        for (offset, len, parts) in [
            (0, 1, &[GRANULE][..]),
            (0, GRANULE, &[GRANULE]),
            (GRANULE - 1, 1, &[GRANULE]),
            (GRANULE - 1, 2, &[GRANULE, GRANULE]),
            (GRANULE - 1, GRANULE + 2, &[GRANULE, GRANULE, GRANULE]),
            (1, 3 * GRANULE - 1, &[GRANULE, GRANULE, GRANULE]),
        ] {
            window(offset, len, parts).check().unwrap();
        }
        for (offset, len, parts) in [
            (0, 0, &[GRANULE][..]),
            (1, GRANULE, &[GRANULE]),
            (GRANULE, 1, &[GRANULE]),
            (GRANULE, 1, &[GRANULE, GRANULE]),
            (0, GRANULE, &[GRANULE, GRANULE]),
            (1, 2 * GRANULE, &[GRANULE, GRANULE]),
            (1, u64::MAX, &[GRANULE]),
            (u64::MAX, 2, &[GRANULE]),
            (0, 1, &[]),
        ] {
            let window = window(offset, len, parts);
            assert!(window.check().is_err(), "{offset} {len} {parts:?}");
        }
    }

    /// How a peer that does not know windows reads it.
    #[derive(Deserialize)]
    struct Old {
        len: u64,
        access: Access,
        parts: Vec<Part>,
    }

    #[test]
    fn who_does_not_know_windows_finds_no_bytes() {
        let sent = window(4096, 77, &[GRANULE]);
        let mut bytes = Vec::new();
        ciborium::into_writer(&sent, &mut bytes).unwrap();
        let old: Old = ciborium::from_reader(&bytes[..]).unwrap();
        assert_eq!((old.len, &old.parts), (0, &sent.parts));
        let old = Description {
            len: old.len,
            offset: None,
            access: old.access,
            parts: old.parts,
        };
        old.check().unwrap_err();
        let now: Description = ciborium::from_reader(&bytes[..]).unwrap();
        assert_eq!(now, sent);
        let json = serde_json::to_string(&sent).unwrap();
        assert_eq!(serde_json::from_str::<Description>(&json).unwrap(), sent);
        // Two lengths contradict each other.
        let both = json.replace("\"len\":0", "\"len\":77");
        assert_ne!(both, json);
        serde_json::from_str::<Description>(&both).unwrap_err();
    }

    #[test]
    fn all_of_a_memory_is_described_as_before_there_were_windows() {
        let whole = description(GRANULE, &[GRANULE]);
        let json = serde_json::to_value(&whole).unwrap();
        let keys: Vec<_> = json.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["access", "len", "parts"]);
        assert_eq!(serde_json::from_value::<Description>(json).unwrap(), whole);
    }
}
