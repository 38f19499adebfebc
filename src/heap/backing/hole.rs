//! Room for a block in a heap whose chunks do not join: which idle chunks go back so that one chunk fits in their place.

use std::ops::Range;
use std::sync::Arc;

use super::fit::Shape;
use super::{Backing, Chunk};
use crate::driver::{Location, NodeId};
use crate::topology::free_now;

/// The bytes that each site may still create, `None` if that is not known.
pub(crate) struct Rooms(Vec<Option<u64>>);

impl Backing {
    /// Returns how much memory there is for one chunk, as the nodes report it. Takes some 10 µs.
    pub(crate) fn rooms(&self) -> Rooms {
        let sites = self.settled.sites.iter().enumerate();
        let room = sites.map(|(turn, site)| match site.location {
            Location::HostNuma(id) => {
                let free = free_now(&self.driver, NodeId(id))?;
                Some(free.min(self.left(turn)))
            }
            _ => None,
        });
        Rooms(room.collect())
    }

    /// Iterates over the ranges of the chunks that no other code holds.
    pub(crate) fn own_chunks(&self) -> impl Iterator<Item = Range<u64>> {
        let own = self
            .chunks()
            .filter(|chunk| Arc::strong_count(chunk.memory()) == 1);
        own.map(Chunk::range)
    }

    /// Returns those of the `idle` chunks, by ascending offsets, that have to go back so that a chunk for `bytes` fits: in the
    /// addresses, on a node, and below `most` bytes of all memory. `None` if nothing has to go back, or all would not do.
    pub(crate) fn to_give_back(
        &self,
        (bytes, alignment, most): (u64, u64, u64),
        idle: &[Range<u64>],
        rooms: &Rooms,
    ) -> Option<Vec<Range<u64>>> {
        let shape = self.settled.shape;
        let bytes = bytes.checked_next_multiple_of(shape.unit)?;
        let hole = shape.hole(&self.gaps(), idle, bytes, alignment)?;
        let in_hole = |chunk: &Range<u64>| chunk.start < hole.end && chunk.end > hole.start;
        let (back, rest): (Vec<_>, Vec<_>) = idle.iter().cloned().partition(in_hole);
        let sites = rooms.0.iter().enumerate();
        let enough = sites.filter_map(|(turn, &room)| {
            let mut back = back.clone();
            let given = self.sum_at(turn, &back);
            let lack = match room {
                Some(room) => bytes.saturating_sub(room.saturating_add(given)),
                // The driver refused it, perhaps for lack of memory.
                None if back.is_empty() => bytes,
                None => 0,
            };
            let here = rest.iter().filter(|chunk| self.turn_at(chunk) == turn);
            take_enough(&mut back, here, lack)?;
            let lack = bytes
                .saturating_sub(self.room_below(most))
                .saturating_sub(sum(&back));
            let others: Vec<_> = rest.iter().filter(|chunk| !back.contains(chunk)).collect();
            take_enough(&mut back, others.into_iter(), lack)?;
            Some(back)
        });
        let mut least = enough.min_by_key(|back| sum(back))?;
        least.sort_unstable_by_key(|chunk| chunk.start);
        (!least.is_empty()).then_some(least)
    }

    fn turn_at(&self, chunk: &Range<u64>) -> usize {
        let found = self.chunks.get(&chunk.start);
        found.map_or(usize::MAX, |chunk| chunk.turn)
    }

    fn sum_at(&self, turn: usize, chunks: &[Range<u64>]) -> u64 {
        let there = chunks.iter().filter(|chunk| self.turn_at(chunk) == turn);
        there.map(|chunk| chunk.end - chunk.start).sum()
    }
}

fn sum(chunks: &[Range<u64>]) -> u64 {
    chunks.iter().map(|chunk| chunk.end - chunk.start).sum()
}

/// Adds the last ones of `from` until they are `lack` bytes; `None` if all are less.
fn take_enough<'a>(
    to: &mut Vec<Range<u64>>,
    from: impl DoubleEndedIterator<Item = &'a Range<u64>>,
    mut lack: u64,
) -> Option<()> {
    for chunk in from.rev() {
        if lack == 0 {
            break;
        }
        lack = lack.saturating_sub(chunk.end - chunk.start);
        to.push(chunk.clone());
    }
    (lack == 0).then_some(())
}

impl Shape {
    /// Returns the place for a chunk of `bytes` in the `gaps` and in `idle` chunks for which the fewest bytes of chunks go
    /// back: the lowest of several.
    fn hole(
        self,
        gaps: &[Range<u64>],
        idle: &[Range<u64>],
        bytes: u64,
        alignment: u64,
    ) -> Option<Range<u64>> {
        let alignment = alignment.max(self.unit);
        let chunks = idle.iter().map(|chunk| (chunk.clone(), true));
        let gaps = gaps.iter().map(|gap| (gap.clone(), false));
        let mut cells: Vec<(Range<u64>, bool)> = gaps.chain(chunks).collect();
        cells.sort_unstable_by_key(|(range, _)| range.start);
        let mut best: Option<(u64, Range<u64>)> = None;
        for run in cells.chunk_by(|(left, _), (right, _)| left.end == right.start) {
            let (Some((first, _)), Some((last, _))) = (run.first(), run.last()) else {
                continue;
            };
            // The bytes of chunks before each cell.
            let before: Vec<u64> = std::iter::once(0)
                .chain(run.iter().scan(0, |sum, (range, is_chunk)| {
                    *sum += u64::from(*is_chunk) * (range.end - range.start);
                    Some(*sum)
                }))
                .collect();
            for (range, _) in run {
                let up = self.lowest(&(range.start..last.end), bytes, alignment);
                let down = self.highest(&(first.start..range.end), bytes, alignment);
                for place in [up, down].into_iter().flatten() {
                    let from = run.partition_point(|(cell, _)| cell.end <= place.start);
                    let to = run.partition_point(|(cell, _)| cell.start < place.end);
                    let cost = before[to] - before[from];
                    if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                        best = Some((cost, place));
                    }
                }
            }
        }
        best.map(|(_, place)| place)
    }
}
