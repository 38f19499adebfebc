//! What the errors of a heap say: why it has no room, and what its debug mode has found.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::text::{self, Bytes};

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
            Self::SoftLimit { bytes } => {
                let bytes = Bytes(*bytes);
                write!(
                    f,
                    "it would grow beyond its soft limit of {bytes}, which was refused"
                )
            }
        }
    }
}

impl std::error::Error for NoRoom {}

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

/// Where in the program an operation happened, and in which thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Site {
    /// The call's file, line and column, as `src/main.rs:10:5`. Unknown for a drop, and if GPU work or the
    /// heap itself is the cause; for a collection, a place inside the collection's code.
    pub place: Option<String>,
    /// The thread's name, or its number if it has none.
    pub thread: String,
    /// Whether the block is a collection's memory: `place` then lies inside the collection's code, and only
    /// `backtrace` shows the caller.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_collection: bool,
    /// The call stack, if enabled (`DebugOptions::backtraces`), without the frames of this
    /// library and of the thread's start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backtrace: Option<String>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "at {place} ")?;
        }
        write!(f, "by thread {}", self.thread)?;
        match &self.backtrace {
            Some(backtrace) => write!(f, "\n{backtrace}"),
            None => Ok(()),
        }
    }
}

/// A block, and where in the program it was allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockInfo {
    /// The block's number, in the order of allocation from 0.
    pub number: u64,
    /// The block's start, in bytes from the heap's first address.
    pub offset: u64,
    /// The size requested.
    pub bytes: u64,
    /// The alignment requested, in bytes.
    pub align: u64,
    /// Where it was allocated.
    pub allocated: Site,
    /// Where it was freed; a block freed after GPU work waits for that work from then on.
    pub freed: Option<Site>,
}

impl fmt::Display for BlockInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, offset) = (bytes(self.bytes), self.offset);
        write!(f, "block of {bytes} at offset {offset:#x}, ")?;
        write!(f, "allocated {}", self.allocated)?;
        match &self.freed {
            Some(freed) => write!(f, ", freed {freed}"),
            None => Ok(()),
        }
    }
}

/// The kind of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DamageKind {
    /// Bytes before a block were overwritten.
    Underrun,
    /// Bytes after a block were overwritten.
    Overrun,
    /// A freed block was written to.
    UseAfterFree,
    /// A block was freed twice.
    DoubleFree,
    /// An address was freed where no block begins.
    InvalidFree,
    /// A block was freed with another layout than it was allocated with.
    WrongLayout,
}

display_texts! {
    DamageKind {
        Self::Underrun => "bytes before a block were overwritten",
        Self::Overrun => "bytes after a block were overwritten",
        Self::UseAfterFree => "a freed block was written to",
        Self::DoubleFree => "a block was freed twice",
        Self::InvalidFree => "an address was freed where no block begins",
        Self::WrongLayout => "a block was freed with a layout other than its own",
    }
}

/// When damage was found; it happened some time before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Seen {
    /// When the block was freed; for a block freed after GPU work, when it was collected.
    Freed,
    /// When the freed block left quarantine.
    LeftQuarantine,
    /// By `Heap::check`.
    Checked,
    /// When the heap ended.
    Ended,
}

display_texts! {
    Seen {
        Self::Freed => "when it was freed",
        Self::LeftQuarantine => "when it left quarantine",
        Self::Checked => "by a check",
        Self::Ended => "when the heap ended",
    }
}

/// Bytes that differ from the expected pattern.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrongBytes {
    /// The first wrong byte, counted from the block's first: negative before the block.
    pub first: i64,
    /// The last one.
    pub last: i64,
    /// How many bytes are wrong; others between the two may be right.
    pub count: u64,
    /// The expected value of each.
    pub expected: u8,
    /// The contents from the first wrong byte on: up to 32 bytes, not beyond the last.
    pub found: Vec<u8>,
}

impl fmt::Display for WrongBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last, .. } = self;
        match first == last {
            true => write!(f, "byte {first}")?,
            false => write!(f, "{} bytes from {first} to {last}", self.count)?,
        }
        write!(f, " should be {:#04x} but read", self.expected)?;
        self.found
            .iter()
            .try_for_each(|byte| write!(f, " {byte:02x}"))?;
        match (last - first) as u64 >= self.found.len() as u64 {
            true => f.write_str(" .."),
            false => Ok(()),
        }
    }
}

/// One finding of a heap's debug mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The kind of damage.
    pub kind: DamageKind,
    /// The address of the first wrong byte, or the address that was freed.
    pub address: u64,
    /// The block; for an invalid free, the one around the address, if any.
    pub block: Option<BlockInfo>,
    /// The wrong bytes, for damage of bytes.
    pub bytes: Option<WrongBytes>,
    /// When it was found.
    pub seen: Seen,
    /// Where the invalid free happened.
    pub by: Option<Site>,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        match (&self.bytes, &self.by) {
            (Some(bytes), _) => write!(f, ": {bytes} (address {:#x})", self.address)?,
            (None, Some(by)) => write!(f, ": address {:#x}, {by}", self.address)?,
            (None, None) => write!(f, ": address {:#x}", self.address)?,
        }
        if let Some(block) = &self.block {
            let around = match self.kind {
                DamageKind::InvalidFree => "within the ",
                _ => "",
            };
            write!(f, "; {around}{block}")?;
        }
        match self.bytes {
            Some(_) => write!(f, "; seen {}", self.seen),
            None => Ok(()),
        }
    }
}

/// All damage found by `Heap::check` and since the previous check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DamageReport {
    /// The findings in order, up to 1000.
    pub damage: Vec<Damage>,
    /// How many further findings there were.
    pub more: u64,
}

impl fmt::Display for DamageReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, damage) in self.damage.iter().enumerate() {
            let newline = if number == 0 { "" } else { "\n" };
            write!(f, "{newline}{damage}")?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(f, "\nand {more} more"),
        }
    }
}

/// Formats a count: "1 block", "2 blocks".
pub fn blocks(count: u64) -> String {
    text::count(count, "block")
}

/// Formats a count: "1 byte", "2 bytes".
pub fn bytes(count: u64) -> String {
    text::count(count, "byte")
}
