//! What an importer must know about memory beside its handles.

use serde::{Deserialize, Serialize};

use super::Identity;
use crate::driver::{Access, Location};
use crate::size::Granularity;
use crate::{Error, Result};

/// The most parts that shared memory may have.
pub const MAX_PARTS: usize = 4096;

/// One physical memory of several that are mapped side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// Which memory it is.
    pub identity: Identity,
    /// Its size in bytes, as created: a multiple of 2 MiB.
    pub bytes: u64,
    /// Where it lies, on its own machine.
    pub location: Location,
}

/// Shared memory without its handles: nothing secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Description {
    /// Usable bytes, from the first part's start.
    pub len: u64,
    /// What an importer is asked to keep to; a handle itself allows everything.
    pub access: Access,
    /// The physical memories, in the order of addresses: 1 to [`MAX_PARTS`].
    pub parts: Vec<Part>,
}

impl Description {
    /// All parts together, in bytes.
    pub fn padded(&self) -> u64 {
        self.parts
            .iter()
            .fold(0, |sum, part| sum.saturating_add(part.bytes))
    }

    /// Checks what came from elsewhere.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names what cannot be: no parts or too many, a size that is 0
    /// or no multiple of 2 MiB, more bytes than an address space has, `len` of 0, beyond the parts or
    /// ending before the last one, the same part twice, or no access.
    pub fn check(&self) -> Result<()> {
        let wrong = |why: String| Err(Error::invalid("description", why));
        if self.parts.is_empty() || self.parts.len() > MAX_PARTS {
            return wrong(format!("{} parts, not 1 to {MAX_PARTS}", self.parts.len()));
        }
        let mut before = 0_u64;
        let mut sum = 0_u64;
        for part in &self.parts {
            if part.bytes == 0 || !Granularity::TWO_MIB.divides(part.bytes) {
                return wrong(format!("a part of {} bytes", part.bytes));
            }
            before = sum;
            sum = match sum.checked_add(part.bytes) {
                Some(sum) if sum <= isize::MAX as u64 => sum,
                _ => return wrong("more bytes than an address space".into()),
            };
        }
        // The last part may be padding alone: room for a probe.
        if self.len == 0 || self.len < before || self.len > sum {
            return wrong(format!(
                "{} bytes in parts of {sum} bytes together",
                self.len
            ));
        }
        let mut identities: Vec<_> = self.parts.iter().map(|part| part.identity).collect();
        identities.sort_unstable();
        if identities.windows(2).any(|pair| pair[0] == pair[1]) {
            return wrong("the same memory twice".into());
        }
        if self.access == Access::None {
            return wrong("no access".into());
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
}
