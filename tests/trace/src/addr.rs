//! Slot numbers, and addresses as offsets into the memory of a slot.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use egmem::{Error, Result};

/// The number of a handle, range, pool, stream … of a sequence, counted per kind from 0.
pub type Slot = u16;

/// The memory that an [`Addr`] is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Memory {
    /// A reserved address range: `r`.
    Range(Slot),
    /// An allocation from a pool: `a`.
    Pooled(Slot),
    /// An allocation of [`Op::Alloc`](super::Op::Alloc) or [`Op::HostAlloc`](super::Op::HostAlloc): `m`.
    Plain(Slot),
    /// None: the offset is the address itself.
    Nowhere,
}

/// An address, as an offset in bytes into memory of the sequence: `r3+4096` in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Addr {
    /// The memory.
    pub of: Memory,
    /// Bytes from its start.
    pub offset: u64,
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.of {
            Memory::Range(slot) => write!(f, "r{slot}")?,
            Memory::Pooled(slot) => write!(f, "a{slot}")?,
            Memory::Plain(slot) => write!(f, "m{slot}")?,
            Memory::Nowhere => {}
        }
        write!(f, "+{}", self.offset)
    }
}

impl From<Addr> for String {
    fn from(addr: Addr) -> String {
        addr.to_string()
    }
}

impl TryFrom<String> for Addr {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl FromStr for Addr {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::invalid("address of a trace", format!("'{text}'"));
        let (of, offset) = text.split_once('+').ok_or_else(bad)?;
        let offset = offset.parse().map_err(|_| bad())?;
        let slot = |prefix| of.strip_prefix(prefix)?.parse::<Slot>().ok();
        let of = if of.is_empty() {
            Memory::Nowhere
        } else if let Some(slot) = slot('r') {
            Memory::Range(slot)
        } else if let Some(slot) = slot('a') {
            Memory::Pooled(slot)
        } else if let Some(slot) = slot('m') {
            Memory::Plain(slot)
        } else {
            return Err(bad());
        };
        Ok(Self { of, offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back_as_written() {
        for (text, of, offset) in [
            ("r3+4096", Memory::Range(3), 4096),
            ("a0+0", Memory::Pooled(0), 0),
            ("m65535+8", Memory::Plain(u16::MAX), 8),
            ("+18446744073709551615", Memory::Nowhere, u64::MAX),
        ] {
            let addr = Addr { of, offset };
            assert_eq!(addr.to_string(), text);
            assert_eq!(text.parse::<Addr>().unwrap(), addr);
        }
        for text in ["", "r3", "r+0", "x3+0", "r65536+0", "r3+-1", "r3+4 096"] {
            assert!(text.parse::<Addr>().is_err(), "{text}");
        }
    }
}
