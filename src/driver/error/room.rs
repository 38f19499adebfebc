//! Why a heap has no room.

use std::fmt;

use crate::size::Bytes;

/// Why a heap has no room for a request: [`Error::HeapFull`](super::Error::HeapFull).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoRoom {
    /// The request exceeds the free bytes plus the bytes that the limit allows to add.
    Limit,
    /// There are enough free bytes, but not in one range. Blocks up to 2 KiB come from slabs, which are
    /// ranges of up to 64 KiB.
    Fragments,
    /// There is a free range that is large enough, but not at an address with that alignment.
    Alignment,
    /// No node has enough left of its share (`Heap::spread`) for a chunk of the size needed.
    Share {
        /// The largest share in bytes.
        most: u64,
    },
    /// The heap would grow beyond its soft limit, and the callback answered
    /// `Relief::Refuse`; background growth never calls the callback.
    SoftLimit {
        /// The soft limit in bytes.
        bytes: u64,
    },
}

remedies! {
    NoRoom {
        Self::Limit =>
            "free blocks, ask for less, or build the heap with a larger limit",
        Self::Fragments =>
            "ask for smaller blocks, free those in between, or build the heap with a larger limit: \
             unused addresses take no memory",
        Self::Alignment =>
            "ask for a smaller alignment, or build the heap with a larger limit: \
             unused addresses take no memory",
        Self::Share { .. } =>
            "give a node a larger share when the heap is built, or ask for smaller blocks",
        Self::SoftLimit { .. } =>
            "free blocks, raise the soft limit, or have its callback free some blocks or allow the growth",
    }
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit => f.write_str("its limit does not allow that much"),
            Self::Fragments => f.write_str("enough is free, but it is fragmented"),
            Self::Alignment => {
                f.write_str("a free range is large enough, but has no address with that alignment")
            }
            Self::Share { most } => {
                let most = Bytes(*most);
                write!(
                    f,
                    "no node has that much left of its share, which is at most {most}"
                )
            }
            Self::SoftLimit { bytes } => write!(
                f,
                "it would grow beyond its soft limit of {}, which was refused",
                Bytes(*bytes)
            ),
        }
    }
}

/// Describes the request to a heap, for a message.
pub(super) fn asked(requested: u64, align: u64, guards: u64) -> String {
    let mut text = Bytes(requested).to_string();
    // Every block has this alignment or less.
    if align > 256 {
        text += &format!(" aligned to {}", Bytes(align));
    }
    if guards > 0 {
        text += &format!(" and {} of guards", Bytes(guards));
    }
    text
}
