//! Differences between a name and the caller's expectation.

use std::fmt;

use crate::driver::{Location, NodeId};
use egmem_core::size::Bytes;

/// How memory under a name differs from the caller's request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mismatch {
    /// Another peer owns the name.
    Owner {
        /// The expected owner, as `exchange::Owner` writes it.
        expected: String,
        /// The actual owner.
        found: String,
    },
    /// The memory has another size.
    Size {
        /// The expected bytes.
        expected: u64,
        /// Usable bytes.
        found: u64,
    },
    /// The memory lies on another node.
    Node {
        /// The expected host node.
        expected: NodeId,
        /// The locations of its parts, each once.
        found: Vec<Location>,
    },
}

impl Mismatch {
    pub(super) const fn remedy(&self) -> &'static str {
        match self {
            Self::Owner { .. } => {
                "do not use the memory: ask the administrator why another peer has the name, or choose \
                 another name"
            }
            Self::Size { .. } | Self::Node { .. } => {
                "delete the name and create it again, or change the expectation"
            }
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owner { expected, found } => {
                write!(f, "its owner is {found}, expected {expected}")
            }
            Self::Size { expected, found } => write!(
                f,
                "its size is {} ({found} bytes), expected {} ({expected} bytes)",
                Bytes(*found),
                Bytes(*expected)
            ),
            Self::Node { expected, found } => {
                let found: Vec<_> = found.iter().map(Location::to_string).collect();
                write!(
                    f,
                    "it lies on {}, expected {}",
                    found.join(", "),
                    Location::HostNuma(expected.0)
                )
            }
        }
    }
}
