//! Growth step by step: the caller may release the lock between the chunks of one request.

use std::ops::Range;

use super::make::is_shortage;
use super::shape::{Fill, Want};
use super::{Backing, Chunk};
use crate::error::NoRoom;
use crate::guard::WORTH_ASKING;
use crate::{Error, Result};

/// Growth that was begun. Its chunks are not memory of the heap before they are [delivered](Backing::deliver); other
/// requests take no addresses of it meanwhile. Either they are delivered or a [step](Backing::step) fails.
pub(crate) struct Order<'a> {
    want: Want<'a>,
    /// What to fill, if there is no room without growth.
    fill: Option<Fill>,
    made: Vec<Chunk>,
    /// How far it is filled.
    at: u64,
    /// The size of the next chunk.
    size: u64,
    halved: bool,
    /// Whether the bytes needed must be one chunk.
    single: bool,
}

impl Order<'_> {
    /// Returns whether no chunk is left to make, as far as that is known before memory is short.
    pub(crate) fn is_made(&self) -> bool {
        self.fill.is_none_or(|fill| self.at >= fill.end)
    }
}

impl Backing {
    /// Returns how many bytes may be backed before more than `most` are, with those of growth that was begun.
    pub(crate) fn room_below(&self, most: u64) -> u64 {
        let claimed = self.claims.iter().map(|claim| claim.end - claim.start);
        let taken = self.backed + claimed.sum::<u64>();
        let unit = self.settled.shape.unit;
        most.saturating_sub(taken) / unit * unit
    }

    /// Returns the ranges without memory that no growth has begun to fill, by ascending offsets.
    pub(super) fn gaps(&self) -> Vec<Range<u64>> {
        self.gaps_without(&[])
    }

    /// Returns the gaps that there would be without some chunks, which are in ascending order.
    pub(super) fn gaps_without(&self, gone: &[Range<u64>]) -> Vec<Range<u64>> {
        let stays = |chunk: &Range<u64>| {
            let found = gone.binary_search_by_key(&chunk.start, |gone| gone.start);
            found.is_err()
        };
        let chunks = self.chunks().map(Chunk::range).filter(stays);
        let chunks = chunks.chain(self.dead.iter().map(Chunk::range));
        let mut taken: Vec<Range<u64>> = chunks.chain(self.claims.iter().cloned()).collect();
        taken.sort_unstable_by_key(|range| range.start);
        let mut gaps = Vec::new();
        let mut at = 0;
        for range in taken {
            if at < range.start {
                gaps.push(at..range.start);
            }
            at = at.max(range.end);
        }
        if at < self.limit() {
            gaps.push(at..self.limit());
        }
        gaps
    }

    /// Begins growth, so that `want` fits, by at most `most` bytes of all memory; the last chunk is smaller if it
    /// would exceed that. Returns `None` if `want` would exceed it, even if something else prevents growth too.
    ///
    /// A block goes to the place where it fits, together with the free bytes beside it, with the least new memory. Chunks are
    /// whole while memory is plentiful and no node's share is used up. If memory is short, the heap tries the next node, then
    /// half the size, down to the bytes that the request needs.
    ///
    /// # Errors
    /// [`Error::HeapFull`], without the caller's numbers, if the remaining addresses have no such range;
    /// [`Error::NodeTooFull`], [`Error::NodesTooFull`].
    pub(crate) fn order<'a>(&mut self, want: Want<'a>, most: u64) -> Result<Option<Order<'a>>> {
        self.sweep();
        let room = self.room_below(most);
        let mut order = Order {
            want,
            fill: None,
            made: Vec::new(),
            at: 0,
            size: self.step, // as large as the last success: if memory is short, each refusal costs time
            halved: false,
            single: !self.settled.shape.joins && matches!(want, Want::Block { .. }),
        };
        let place = self.settled.shape.place(&self.gaps(), want);
        let mut fill = match place {
            Ok(Some(fill)) => fill,
            Ok(None) => return Ok(Some(order)),
            Err(_) if want.bytes() > room => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(spare) = room.checked_sub(fill.needed()) else {
            return Ok(None);
        };
        // Before any memory is created: creating gigabytes takes seconds.
        if fill.needed() >= WORTH_ASKING {
            self.check_nodes(fill.needed())?;
        }
        fill.end = fill.end.min(fill.need.saturating_add(spare));
        self.claims.push(fill.start..fill.end);
        order.at = fill.start;
        if order.single {
            order.size = fill.end - fill.start;
        }
        order.fill = Some(fill);
        Ok(Some(order))
    }

    fn unclaim(&mut self, order: &Order<'_>) {
        let claimed = order.fill.map(|fill| fill.start..fill.end);
        self.claims.retain(|claim| Some(claim) != claimed.as_ref());
    }

    /// Checks that the limit and the nodes have `bytes` more, in as many pieces as necessary. Creates
    /// nothing.
    ///
    /// # Errors
    /// As [`order`](Self::order).
    pub(crate) fn check_more(&self, bytes: u64) -> Result<()> {
        let unit = self.settled.shape.unit;
        let gaps = self.gaps().into_iter().map(|gap| gap.end - gap.start);
        match bytes.checked_next_multiple_of(unit) {
            Some(needed) if needed <= gaps.sum() => self.check_nodes(needed),
            _ => Err(Want::More { bytes }.refused(NoRoom::Limit, self.limit())),
        }
    }

    /// Creates, maps and grants the next chunk. Returns `false` if there was none left to make.
    ///
    /// # Errors
    /// All or nothing: after a failure, everything created is given back. Memory on a full node is needed
    /// elsewhere, and a caller that frees some and retries creates it again.
    ///
    /// As [`order`](Self::order); [`Error::HeapFull`] if no node's share is large enough for bytes that must be one
    /// chunk; [`Error::OutOfMemory`]; the driver's errors.
    pub(crate) fn step(&mut self, order: &mut Order<'_>) -> Result<bool> {
        let shape = self.settled.shape;
        let Some(fill) = order.fill else {
            return Ok(false);
        };
        let least = if order.single {
            fill.needed()
        } else {
            shape.unit
        };
        loop {
            let is_small = order.single || order.size < shape.chunk;
            if order.at >= fill.end || (order.at >= fill.need && is_small) {
                return Ok(false);
            }
            let bytes = shape.before_range_limit(order.at, order.size.min(fill.end - order.at));
            match self.make(order.at, bytes, least.min(bytes)) {
                Ok(chunk) => {
                    order.at = chunk.range().end;
                    order.made.push(chunk);
                    return Ok(true);
                }
                // Beyond the bytes needed, a shortage ends the growth without an error.
                Err(error) if is_shortage(&error) && order.at >= fill.need => return Ok(false),
                Err(error) if is_shortage(&error) && bytes > least => {
                    order.size = (bytes / 2).next_multiple_of(shape.unit).max(least);
                    self.counts.halvings += 1;
                    order.halved = true;
                }
                Err(error) => return Err(self.failed(order, error)),
            }
        }
    }

    /// Makes the chunks memory of the heap, and returns the new ranges, which are free, zero and granted, by
    /// ascending offsets; none if `want` fitted already, by the caller's account of free bytes.
    pub(crate) fn deliver(&mut self, order: Order<'_>) -> Vec<Range<u64>> {
        self.unclaim(&order);
        if order.fill.is_some() && !order.single {
            let doubled = order.size.saturating_mul(2);
            let next = if order.halved { order.size } else { doubled };
            self.step = next.min(self.settled.shape.chunk);
        }
        let mut grown: Vec<Range<u64>> = Vec::new();
        for chunk in order.made {
            let range = chunk.range();
            match grown.last_mut() {
                Some(last) if self.settled.shape.joins && last.end == range.start => {
                    last.end = range.end;
                }
                _ => grown.push(range.clone()),
            }
            self.backed += chunk.bytes();
            let at = self.count_before(range.start);
            self.chunks.insert(at, chunk);
        }
        grown
    }

    /// Returns whether other growth that was begun may end, so that a request that was refused may succeed then.
    pub(crate) fn is_growing(&self) -> bool {
        !self.claims.is_empty()
    }

    /// Gives back the chunks of growth and the claim on its addresses.
    pub(super) fn cancel(&mut self, order: &mut Order<'_>) {
        for chunk in std::mem::take(&mut order.made).into_iter().rev() {
            self.undo(chunk);
        }
        self.unclaim(order);
    }

    /// Gives everything back, and returns the error with the bytes that were needed.
    fn failed(&mut self, order: &mut Order<'_>, error: Error) -> Error {
        self.cancel(order);
        let needed = order.fill.as_ref().map_or(0, Fill::needed);
        match self.explain(error, needed) {
            Error::HeapFull { why, .. } => order.want.refused(why, self.limit()),
            other => other,
        }
    }
}

#[cfg(test)]
impl Backing {
    /// Grows at once, without a limit: [`order`](Self::order), all steps, and [`deliver`](Self::deliver).
    pub(crate) fn grow(&mut self, want: Want<'_>) -> Result<Vec<Range<u64>>> {
        let grown = self.grow_within(want, u64::MAX)?;
        Ok(grown.unwrap_or_default())
    }

    pub(crate) fn grow_within(
        &mut self,
        want: Want<'_>,
        most: u64,
    ) -> Result<Option<Vec<Range<u64>>>> {
        let Some(mut order) = self.order(want, most)? else {
            return Ok(None);
        };
        while self.step(&mut order)? {}
        Ok(Some(self.deliver(order)))
    }
}
