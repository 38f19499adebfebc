//! Which parts of a heap's range are backed, used, cached or deferred, as data to draw and to count.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::inner::HeapInner;
use super::piece::Piece;
use crate::driver::{Location, NodeId};
use crate::per_driver::lock;

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
        let mut totals = OccupancyTotals {
            backed: (layers([&self.backed(), &[], &[], &[]]).iter())
                .map(|(range, _)| range.end - range.start)
                .sum(),
            ..OccupancyTotals::default()
        };
        for (range, kind) in self.layers() {
            let bytes = range.end - range.start;
            match kind {
                0 => totals.used += bytes,
                1 => totals.deferred += bytes,
                2 => totals.cached += bytes,
                _ => {
                    totals.free += bytes;
                    totals.largest_free = totals.largest_free.max(bytes);
                }
            }
        }
        totals
    }

    fn backed(&self) -> Vec<Range<u64>> {
        let chunks = self.chunks.iter();
        chunks.map(|chunk| chunk.range.clone()).collect()
    }

    /// Returns the ranges that are used (0), deferred (1), cached (2) and free (3).
    pub(super) fn layers(&self) -> Vec<(Range<u64>, usize)> {
        layers([&self.used, &self.deferred, &self.cached, &self.backed()])
    }
}

/// Returns all ranges with the number of the first list that has them, in order: a range for bytes side by side of the
/// same list.
fn layers(lists: [&[Range<u64>]; 4]) -> Vec<(Range<u64>, usize)> {
    let mut edges: Vec<(u64, usize, i64)> = Vec::new();
    for (list, ranges) in lists.into_iter().enumerate() {
        for range in ranges.iter().filter(|range| range.start < range.end) {
            edges.extend([(range.start, list, 1), (range.end, list, -1)]);
        }
    }
    edges.sort_unstable();
    let mut layers: Vec<(Range<u64>, usize)> = Vec::new();
    // How many ranges of each list have the byte at `at`.
    let (mut at, mut depths) = (0, [0; 4]);
    for (edge, list, step) in edges {
        if at < edge
            && let Some(first) = depths.iter().position(|&depth| depth > 0)
        {
            match layers.last_mut() {
                Some((last, list)) if last.end == at && *list == first => last.end = edge,
                _ => layers.push((at..edge, first)),
            }
        }
        depths[list] += step;
        at = edge;
    }
    layers
}

impl HeapInner {
    /// Returns which ranges are used, cached, deferred or backed.
    ///
    /// Holds all locks at once, in their order, so that every block is in exactly one place. `deferred` comes
    /// first: no other code takes a lock while it holds `deferred`.
    pub(super) fn occupancy(&self) -> Occupancy {
        let deferred = self.deferral.deferred();
        let backing = self.supply.backing();
        let members = lock(&self.front.members);
        let mut held = members.hold_all();
        let (waiting, quarantine) = match &self.watch {
            Some(watch) => watch.deferred_and_quarantined(),
            None => {
                let waiting = deferred.iter().flat_map(|deferred| deferred.payloads());
                (waiting.map(Piece::range_taken).collect(), Vec::new())
            }
        };
        // Blocks on their way to a shard, or from one to the core, arrive.
        held.iter_mut().for_each(|local| self.sort_leaving(local));
        held.iter_mut().for_each(|local| self.open_post(local));
        let mut core = self.core();
        self.open_posts(&mut core);
        let mut cached = quarantine;
        for local in &mut held {
            self.take_leaving(&mut core, &mut local.medium);
            local.each(|offset, bytes| cached.push(offset..offset + bytes));
        }
        let out: Vec<Range<u64>> = core.used_ranges().collect();
        let free: Vec<Range<u64>> = self.slabs.hold().free_ranges().collect();
        drop(core);
        // Free blocks of slabs lie in ranges that are out, and the others do, too.
        let layers = layers([&free, &cached, &waiting, &out]);
        let of = |list: usize| {
            let ranges = layers.iter().filter(|(_, of)| *of == list);
            ranges.map(|(range, _)| range.clone()).collect()
        };
        let chunks = backing.iter().flat_map(|backing| backing.chunks());
        Occupancy {
            limit: self.facts.limit,
            chunks: chunks
                .map(|chunk| Chunk {
                    range: chunk.range(),
                    node: match chunk.location() {
                        Location::HostNuma(node) => NodeId(node),
                        // Not a host node: a GPU's memory, or host memory at no particular node.
                        _ => NodeId(-1),
                    },
                })
                .collect(),
            used: of(3),
            cached: of(1),
            deferred: of(2),
        }
    }
}

#[allow(clippy::single_range_in_vec_init)] // the tests want lists of one range
#[cfg(test)]
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
