//! Reports of findings, for programs and for people.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::BlockInfo;
use crate::error::{blocks, bytes};

/// Blocks that are not freed, by where they were allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeakReport {
    /// The number of blocks that are not freed.
    pub blocks: u64,
    /// The bytes requested for them.
    pub bytes: u64,
    /// One entry for each place, those with most bytes first.
    pub places: Vec<Leaks>,
}

/// Blocks allocated at one place in the program and not freed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Leaks {
    /// The number of blocks.
    pub blocks: u64,
    /// The bytes requested for them.
    pub bytes: u64,
    /// The oldest of them.
    pub first: BlockInfo,
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let are = if self.blocks == 1 { "is" } else { "are" };
        let all = blocks(self.blocks);
        write!(f, "{all} with {} {are} not freed", bytes(self.bytes))?;
        for leaks in &self.places {
            let site = &leaks.first.allocated;
            let (blocks, bytes) = (blocks(leaks.blocks), bytes(leaks.bytes));
            write!(f, "\n{blocks}, {bytes}, allocated {site}")?;
        }
        let unknown = |leaks: &Leaks| {
            let site = &leaks.first.allocated;
            site.in_collection && site.backtrace.is_none()
        };
        match self.places.iter().any(unknown) {
            true => f.write_str(
                "\nFor the code that filled these collections, set DebugOptions::backtraces(true).",
            ),
            false => Ok(()),
        }
    }
}
