//! Growth step by step: the caller may release the lock between the chunks of one request.

use std::ops::Range;

use super::Backing;
use super::chunk::Chunk;
use super::fit::{Fill, Want};
use super::grow::is_shortage;
use crate::{Error, Result};

/// Growth that was begun. Its chunks are not memory of the heap before they are [delivered](Backing::deliver); other
/// requests take no addresses of it meanwhile. Either they are delivered or a [step](Backing::step) fails.
pub(crate) struct Order<'a> {
    want: Want<'a>,
    /// The gaps to fill, the next one last.
    fills: Vec<Fill>,
    /// Where to try instead if memory is short.
    leanest: Option<Fill>,
    needed: u64,
    made: Vec<Chunk>,
    /// How far the present gap is filled.
    at: u64,
    /// The size of the next chunk.
    size: u64,
    halved: bool,
    /// Whether the bytes needed must be one chunk.
    single: bool,
    claims: Vec<Range<u64>>,
}

impl Order<'_> {
    /// Returns whether no chunk is left to make, as far as that is known before memory is short.
    pub(crate) fn is_made(&self) -> bool {
        match self.fills[..] {
            [] => true,
            [fill] => self.at >= fill.end,
            _ => false,
        }
    }
}

impl Backing {
    /// Begins growth, so that `want` fits, by at most `most` bytes of all memory; the last chunk is smaller if it
    /// would exceed that. Returns `None` if `want` would exceed it, even if something else prevents growth too.
    ///
    /// A block goes to the lowest place where it fits, together with the free bytes beside it; if memory is
    /// too short for that, to the place that needs the least. Chunks are whole while memory is plentiful and
    /// no node's share is used up. If memory is short, the heap tries the next node, then half the size, down
    /// to the bytes that the request needs.
    ///
    /// # Errors
    /// [`Error::HeapFull`], without the caller's numbers, if the remaining addresses have no such range;
    /// [`Error::NodeTooFull`], [`Error::NodesTooFull`].
    pub(crate) fn order<'a>(&mut self, want: Want<'a>, most: u64) -> Result<Option<Order<'a>>> {
        self.sweep();
        let room = self.room_below(most);
        let places = match self.settled.shape.places(&self.gaps(), want) {
            Err(Error::HeapFull { .. }) if want.bytes() > room => return Ok(None),
            places => places?,
        };
        let Some(places) = places.within(room) else {
            return Ok(None);
        };
        let both = places.first.iter().chain(&places.leanest);
        let mut order = Order {
            want,
            needed: places.first.iter().map(Fill::needed).sum(),
            claims: both.map(|fill| fill.start..fill.end).collect(),
            fills: places.first,
            leanest: places.leanest,
            made: Vec::new(),
            at: 0,
            size: 0,
            halved: false,
            single: !self.settled.shape.joins && matches!(want, Want::Block { .. }),
        };
        order.fills.reverse();
        self.begin_fill(&mut order);
        self.claims.extend(order.claims.iter().cloned());
        if let Err(error) = self.check_room(order.needed) {
            self.fall_back(&mut order, error)?;
        }
        Ok(Some(order))
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
        match self.next_chunk(order) {
            Ok(Some(chunk)) => {
                order.made.push(chunk);
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(error) => self.fall_back(order, error).map(|()| true),
        }
    }

    /// Makes the chunks memory of the heap, and returns the new ranges, which are free, zero and granted, by
    /// ascending offsets; none if `want` fitted already, by the caller's account of free bytes.
    pub(crate) fn deliver(&mut self, order: Order<'_>) -> Vec<Range<u64>> {
        self.unclaim(&order);
        self.keep(order.made)
    }

    /// Returns whether other growth that was begun may end, so that a request that was refused may succeed then.
    pub(crate) fn is_growing(&self) -> bool {
        !self.claims.is_empty()
    }

    fn unclaim(&mut self, order: &Order<'_>) {
        self.claims.retain(|claim| !order.claims.contains(claim));
    }

    /// Gives everything back, and begins again at the place that needs the least, or ends the growth.
    fn fall_back(&mut self, order: &mut Order<'_>, error: Error) -> Result<()> {
        for chunk in std::mem::take(&mut order.made).into_iter().rev() {
            self.undo(chunk);
        }
        let mut error = self.explain(error, order.needed);
        if is_shortage(&error)
            && let Some(leanest) = order.leanest.take()
        {
            order.needed = leanest.needed();
            order.fills = vec![leanest];
            self.begin_fill(order);
            match self.check_room(order.needed) {
                Ok(()) => return Ok(()),
                Err(again) => error = again,
            }
        }
        self.unclaim(order);
        Err(match error {
            Error::HeapFull { why, .. } => order.want.refused(why, self.limit()),
            other => other,
        })
    }

    fn begin_fill(&self, order: &mut Order<'_>) {
        if let Some(fill) = order.fills.last() {
            order.at = fill.start;
            order.halved = false;
            // As large as the last success: if memory is short, each refusal costs time.
            order.size = match order.single {
                true => fill.end - fill.start,
                false => self.step,
            };
        }
    }

    fn next_chunk(&mut self, order: &mut Order<'_>) -> Result<Option<Chunk>> {
        let (unit, shape) = (self.settled.shape.unit, self.settled.shape);
        while let Some(&fill) = order.fills.last() {
            let is_lean = order.single || order.size < self.settled.shape.chunk;
            if order.at >= fill.end || (order.at >= fill.need && is_lean) {
                if !order.single {
                    let next = match order.halved {
                        true => order.size,
                        false => order.size.saturating_mul(2),
                    };
                    self.step = next.min(self.settled.shape.chunk);
                }
                order.fills.pop();
                self.begin_fill(order);
                continue;
            }
            let least = if order.single { fill.needed() } else { unit };
            let bytes = shape.before_range_limit(order.at, order.size.min(fill.end - order.at));
            match self.make(order.at, bytes, least.min(bytes)) {
                Ok(chunk) => {
                    order.at = chunk.range().end;
                    return Ok(Some(chunk));
                }
                // Beyond the bytes needed, a shortage ends the growth without an error.
                Err(error) if is_shortage(&error) && order.at >= fill.need => order.at = fill.end,
                Err(error) if is_shortage(&error) && bytes > least => {
                    order.size = (bytes / 2).next_multiple_of(unit).max(least);
                    self.counts.halvings += 1;
                    order.halved = true;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }
}
