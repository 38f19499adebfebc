//! What a heap's debug mode finds.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where in the program something was done, and by which thread.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Site {
    /// The call's file, line and column, as `src/main.rs:10:5`. Not known of a drop, nor where GPU work
    /// or the heap itself is the reason; a collection's is within the collection.
    pub place: Option<String>,
    /// The thread's name, or its number where it has none.
    pub thread: String,
    /// Whether it is a collection's memory: `place` is within the collection, and only `backtrace` tells
    /// whose that is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_collection: bool,
    /// How the program came there, if [that was wanted](crate::heap::debug::DebugOptions::backtraces), without what this
    /// library and the thread's begin add to it.
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
#[non_exhaustive]
pub struct BlockInfo {
    /// Which of the heap's blocks it is, counted from 0 by when they were allocated.
    pub number: u64,
    /// Where it begins, in bytes from the heap's first address.
    pub offset: u64,
    /// The bytes asked for.
    pub bytes: u64,
    /// The alignment asked for, in bytes.
    pub align: u64,
    /// Where it was allocated.
    pub allocated: Site,
    /// Where it was freed; a block freed after GPU work is one that waits for it from then on.
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

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DamageKind {
    /// Somebody wrote before a block.
    Underrun,
    /// Somebody wrote after a block.
    Overrun,
    /// Somebody wrote to a block that was freed.
    UseAfterFree,
    /// A block was freed that had been freed.
    DoubleFree,
    /// An address was freed where no block begins.
    InvalidFree,
    /// A block was freed by another layout than it was allocated by.
    WrongLayout,
}

impl fmt::Display for DamageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Underrun => "bytes before a block were overwritten",
            Self::Overrun => "bytes after a block were overwritten",
            Self::UseAfterFree => "a freed block was written to",
            Self::DoubleFree => "a block was freed twice",
            Self::InvalidFree => "an address was freed where no block begins",
            Self::WrongLayout => "a block was freed by another layout than it was allocated by",
        })
    }
}

/// When damage was seen: it was done some time before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Seen {
    /// When the block was freed; of one freed after GPU work, when it was taken back.
    Freed,
    /// When the freed block left quarantine.
    LeftQuarantine,
    /// By [`Heap::check`](crate::Heap::check).
    Checked,
    /// When the heap ended.
    Ended,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Freed => "when it was freed",
            Self::LeftQuarantine => "when it left quarantine",
            Self::Checked => "by a check",
            Self::Ended => "when the heap ended",
        })
    }
}

/// Bytes that are not what they should be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WrongBytes {
    /// The first wrong byte, counted from the block's first: negative before the block.
    pub first: i64,
    /// The last one.
    pub last: i64,
    /// How many are wrong; others between the two may be right.
    pub count: u64,
    /// What each should be.
    pub expected: u8,
    /// What is there from the first wrong byte on: up to 32 bytes, not beyond the last.
    pub found: Vec<u8>,
}

impl fmt::Display for WrongBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { first, last, .. } = self;
        match first == last {
            true => write!(f, "byte {first}")?,
            false => write!(f, "{} bytes from {first} to {last}", self.count)?,
        }
        write!(f, " not {:#04x} but", self.expected)?;
        self.found
            .iter()
            .try_for_each(|byte| write!(f, " {byte:02x}"))?;
        match (last - first) as u64 >= self.found.len() as u64 {
            true => f.write_str(" .."),
            false => Ok(()),
        }
    }
}

/// One finding of a heap's [debug mode](crate::heap::debug).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Damage {
    /// What is wrong.
    pub kind: DamageKind,
    /// The address of the first wrong byte, or the one that was freed.
    pub address: u64,
    /// The block; of an invalid free, the one around the address, if any.
    pub block: Option<BlockInfo>,
    /// The wrong bytes, where it is about bytes.
    pub bytes: Option<WrongBytes>,
    /// When it was seen.
    pub seen: Seen,
    /// Who freed what should not have been freed so.
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

/// All that was found, by [`Heap::check`](crate::Heap::check) and since the one before.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DamageReport {
    /// The findings in the order in which they were made, up to 1000.
    pub damage: Vec<Damage>,
    /// How many more there were.
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

/// "1 block", "2 blocks".
pub(crate) fn blocks(count: u64) -> String {
    counted(count, "block")
}

pub(crate) fn bytes(count: u64) -> String {
    counted(count, "byte")
}

fn counted(count: u64, what: &str) -> String {
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {what}{s}")
}
