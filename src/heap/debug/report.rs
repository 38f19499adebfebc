//! Reports of findings, for programs and for people.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::BlockInfo;
use super::record::Record;
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

impl LeakReport {
    /// Returns the report on blocks in use, the oldest first.
    pub(super) fn of(live: &[&Record]) -> Self {
        let mut report = Self::default();
        let mut places: HashMap<_, Leaks> = HashMap::new();
        for record in live {
            report.blocks += 1;
            report.bytes += record.bytes;
            let place = places.entry(record.allocated.place);
            let place = place.or_insert_with(|| Leaks {
                first: record.info(),
                ..Leaks::default()
            });
            place.blocks += 1;
            place.bytes += record.bytes;
        }
        report.places = places.into_values().collect();
        // Most bytes first; the block numbers make the order deterministic.
        let order = |leaks: &Leaks| (Reverse(leaks.bytes), leaks.first.number);
        report.places.sort_unstable_by_key(order);
        report
    }
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
        if self.places.iter().any(unknown) {
            let advice =
                "For the code that filled these collections, set DebugOptions::backtraces(true).";
            write!(f, "\n{advice}")?;
        }
        Ok(())
    }
}
