//! Why a heap has no room.

use std::fmt;

use crate::size::Bytes;

/// Why a heap has no room for what was asked of it: [`Error::HeapFull`](super::Error::HeapFull).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoRoom {
    /// It is more than what is free and what the limit leaves to be added.
    Limit,
    /// There is enough, but not in one piece. Blocks up to 2 KiB come in slabs, which are pieces of up to
    /// 64 KiB.
    Fragments,
    /// There is a piece that is large enough, but not at an address of that alignment.
    Alignment,
    /// No node has enough left of its [share](crate::Heap::spread) for what must lie in one chunk.
    Share {
        /// The largest share in bytes.
        most: u64,
    },
    /// The heap would grow beyond its [soft limit](crate::HeapOptions::soft_limit), and the callback said
    /// [`Relief::Refuse`](crate::heap::Relief::Refuse); of memory ahead of need nobody is asked.
    SoftLimit {
        /// The soft limit in bytes.
        bytes: u64,
    },
}

impl NoRoom {
    pub(super) const fn remedy(self) -> &'static str {
        match self {
            Self::Limit => {
                "free blocks, ask for less, or build the heap with a larger limit (HeapOptions::limit)"
            }
            Self::Fragments => {
                "ask for smaller blocks, free those that lie between, or build the heap with a larger limit \
                 (HeapOptions::limit): addresses cost no memory until it is used"
            }
            Self::Alignment => {
                "ask for a smaller alignment, or build the heap with a larger limit (HeapOptions::limit): \
                 addresses cost no memory until it is used"
            }
            Self::Share { .. } => {
                "give a node a larger share (Heap::spread), or ask for smaller blocks"
            }
            Self::SoftLimit { .. } => {
                "free blocks, have the callback of the soft limit free some and say Relief::Retry, or let it \
                 say Relief::Grow"
            }
        }
    }
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit => f.write_str("its limit does not allow so much"),
            Self::Fragments => f.write_str("enough is free, but not in one piece"),
            Self::Alignment => {
                f.write_str("enough is free in one piece, but at no address of that alignment")
            }
            Self::Share { most } => {
                let most = Bytes(*most);
                write!(f, "no node has so much left of its share, at most {most}")
            }
            Self::SoftLimit { bytes } => write!(
                f,
                "it would grow beyond its soft limit of {}, which was refused",
                Bytes(*bytes)
            ),
        }
    }
}

/// What was asked of a heap, for people.
pub(super) fn asked(requested: u64, align: u64, guards: u64) -> String {
    let mut text = Bytes(requested).to_string();
    // Up to this, every block is.
    if align > 256 {
        text += &format!(" aligned to {}", Bytes(align));
    }
    if guards > 0 {
        text += &format!(" and {} of guards", Bytes(guards));
    }
    text
}
