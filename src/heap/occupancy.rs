//! Which parts of a heap's range are backed, used, cached or deferred, as data to draw and to count.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::driver::NodeId;

/// A snapshot of a heap's range. All numbers are offsets and sizes in bytes from the range's start.
///
/// It is plain data: ranges may come in any order, may touch and may overlap, and those that end before they
/// start count as empty. Where ranges overlap, used takes precedence over deferred, and deferred over cached.
///
/// With the feature `pictures`, `Occupancy::to_svg` draws it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Occupancy {
    /// The most bytes that the heap may have.
    pub limit: u64,
    /// The physical memory behind the range. Holes between chunks are not backed.
    pub chunks: Vec<Chunk>,
    /// Blocks in use.
    pub used: Vec<Range<u64>>,
    /// Freed blocks that threads cache for later allocations, and blocks in the [debug mode](super::debug)'s
    /// quarantine.
    #[serde(default)]
    pub cached: Vec<Range<u64>>,
    /// Freed blocks that wait for GPU work to finish.
    #[serde(default)]
    pub deferred: Vec<Range<u64>>,
}

/// Physical memory behind part of a heap's range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// The part of the range, in bytes from its start.
    pub range: Range<u64>,
    /// The memory's NUMA node; −1 for a GPU's memory and for host memory at no particular node.
    pub node: NodeId,
}

/// The bytes of an [`Occupancy`], each counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OccupancyTotals {
    /// Bytes with physical memory behind them.
    pub backed: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that wait for GPU work to finish.
    pub deferred: u64,
    /// Bytes in caches.
    pub cached: u64,
    /// Backed bytes that are none of these.
    pub free: u64,
    /// The longest run of free bytes.
    pub largest_free: u64,
}

impl OccupancyTotals {
    /// Returns the fragmentation of the free bytes: 1 − largest range / all. 0 if they are contiguous or
    /// there are none, near 1 if they are scattered over many small holes.
    pub fn fragmentation(&self) -> f64 {
        fragmentation(self.free, self.largest_free)
    }
}

/// Returns the fraction of the free bytes that is not in the largest free range; 0 if none are free.
pub(super) fn fragmentation(free: u64, largest: u64) -> f64 {
    match free {
        0 => 0.0,
        free => 1.0 - largest as f64 / free as f64,
    }
}

impl Occupancy {
    /// Counts the bytes of each kind.
    pub fn totals(&self) -> OccupancyTotals {
        Layers::of(self).totals()
    }
}

/// Sorted, disjoint ranges without empty ones. No byte is in two layers, except that `backed` overlaps the
/// others.
pub(super) struct Layers {
    pub backed: Vec<Range<u64>>,
    pub used: Vec<Range<u64>>,
    pub deferred: Vec<Range<u64>>,
    pub cached: Vec<Range<u64>>,
    pub free: Vec<Range<u64>>,
}

impl Layers {
    pub fn of(occupancy: &Occupancy) -> Self {
        let backed = in_order(occupancy.chunks.iter().map(|chunk| &chunk.range));
        let used = in_order(&occupancy.used);
        let deferred = without(&in_order(&occupancy.deferred), &used);
        let cached = without(&without(&in_order(&occupancy.cached), &used), &deferred);
        let free = [&used, &deferred, &cached]
            .into_iter()
            .fold(backed.clone(), |left, taken| without(&left, taken));
        Self {
            backed,
            used,
            deferred,
            cached,
            free,
        }
    }

    pub fn totals(&self) -> OccupancyTotals {
        let largest = self.free.iter().map(|range| range.end - range.start).max();
        OccupancyTotals {
            backed: total(&self.backed),
            used: total(&self.used),
            deferred: total(&self.deferred),
            cached: total(&self.cached),
            free: total(&self.free),
            largest_free: largest.unwrap_or(0),
        }
    }
}

/// Sorts the ranges and merges those that touch or overlap.
pub(super) fn in_order<'a>(ranges: impl IntoIterator<Item = &'a Range<u64>>) -> Vec<Range<u64>> {
    let mut all: Vec<Range<u64>> = ranges
        .into_iter()
        .filter(|range| range.start < range.end)
        .cloned()
        .collect();
    all.sort_unstable_by_key(|range| range.start);
    all.dedup_by(|next, last| {
        let joins = next.start <= last.end;
        if joins {
            last.end = last.end.max(next.end);
        }
        joins
    });
    all
}

/// Returns the parts of `from` outside `taken`; both are sorted.
pub(super) fn without(from: &[Range<u64>], taken: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = Vec::with_capacity(from.len());
    let mut next = 0;
    for range in from {
        let mut start = range.start;
        while next < taken.len() && taken[next].end <= start {
            next += 1;
        }
        // The last hole examined may reach into the next range, so `next` stays on it.
        for hole in taken[next..]
            .iter()
            .take_while(|hole| hole.start < range.end)
        {
            if start < hole.start {
                left.push(start..hole.start);
            }
            start = start.max(hole.end);
        }
        if start < range.end {
            left.push(start..range.end);
        }
    }
    left
}

fn total(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // the tests want lists of one range
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
        let one = (0_u64..90, 0_u64..12).prop_map(|(start, len)| start..start + len);
        proptest::collection::vec(one, 0..20)
    }

    fn has(ranges: &[Range<u64>], byte: u64) -> bool {
        ranges.iter().any(|range| range.contains(&byte))
    }

    proptest! {
        /// Compares with a count byte by byte, in a small range.
        #[test]
        fn every_byte_is_counted_once(
            backed in ranges(), used in ranges(), deferred in ranges(), cached in ranges(),
        ) {
            let occupancy = Occupancy {
                limit: 128,
                chunks: backed.iter().map(|range| Chunk { range: range.clone(), node: NodeId(0) }).collect(),
                used: used.clone(),
                cached: cached.clone(),
                deferred: deferred.clone(),
            };
            let mut want = OccupancyTotals::default();
            let mut run = 0;
            for byte in 0..128 {
                want.backed += u64::from(has(&backed, byte));
                run += 1;
                if has(&used, byte) {
                    want.used += 1;
                } else if has(&deferred, byte) {
                    want.deferred += 1;
                } else if has(&cached, byte) {
                    want.cached += 1;
                } else if has(&backed, byte) {
                    want.free += 1;
                    want.largest_free = want.largest_free.max(run);
                    continue;
                }
                run = 0;
            }
            prop_assert_eq!(occupancy.totals(), want);
        }
    }

    #[test]
    fn fragmentation_is_what_the_largest_hole_leaves_out() {
        let mut occupancy = Occupancy {
            limit: 100,
            chunks: vec![Chunk {
                range: 0..100,
                node: NodeId(0),
            }],
            ..Occupancy::default()
        };
        assert_eq!(occupancy.totals().fragmentation(), 0.0);
        occupancy.used = vec![20..40];
        assert_eq!(occupancy.totals().fragmentation(), 0.25);
        occupancy.used = vec![0..100];
        assert_eq!(occupancy.totals().fragmentation(), 0.0);
    }

    #[test]
    fn ranges_at_the_end_of_numbers_are_no_trouble() {
        let occupancy = Occupancy {
            limit: u64::MAX,
            chunks: vec![Chunk {
                range: 0..u64::MAX,
                node: NodeId(0),
            }],
            used: vec![u64::MAX - 1..u64::MAX, Range { start: 7, end: 3 }],
            ..Occupancy::default()
        };
        let totals = occupancy.totals();
        assert_eq!((totals.used, totals.free), (1, u64::MAX - 1));
    }

    #[test]
    fn it_goes_through_json_and_back() {
        let occupancy = Occupancy {
            limit: 1 << 30,
            chunks: vec![Chunk {
                range: 0..2 << 20,
                node: NodeId(3),
            }],
            used: vec![0..256, 512..1024],
            cached: vec![256..512],
            deferred: vec![],
        };
        let text = serde_json::to_string(&occupancy).unwrap();
        assert_eq!(serde_json::from_str::<Occupancy>(&text).unwrap(), occupancy);
        let short = r#"{"limit":1,"chunks":[],"used":[]}"#;
        assert!(serde_json::from_str::<Occupancy>(short).is_ok());
    }
}
