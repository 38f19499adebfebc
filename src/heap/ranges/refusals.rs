//! Remembered refusals: a repeated request that cannot succeed skips the search.

use std::ops::Range;

use super::extents;
use super::nodes::{Node, NodeState};
use super::{Class, Core, GRANULE, HeldSlabs, Owner, PAGE, RangeId};

/// Searching this many ranges takes about a millisecond.
const MOST_RANGES: usize = 1 << 17;
/// A search of so many ranges takes as long as a refusal without it, roughly.
const RANGES_PER_USE: usize = 256;
/// The most slabs that are looked at one by one.
const MOST_SLABS: usize = 1024;

/// A request for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// More than 0.
    pub(crate) bytes: u64,
    /// A power of two.
    pub(crate) align: u64,
    /// The class of a small block.
    pub(crate) class: Option<Class>,
}

impl Request {
    pub(crate) fn new(bytes: u64, align: u64) -> Self {
        let class = Class::of(bytes, align);
        Self {
            bytes,
            align,
            class,
        }
    }

    /// Returns the bytes of the range that it takes: for a small block the page of a new slab, or of a range in its place.
    pub(crate) fn size(&self) -> u64 {
        match self.class {
            Some(_) => PAGE,
            None => Core::range_bytes(self.bytes).unwrap_or(u64::MAX),
        }
    }

    /// Returns that range's alignment.
    fn range_align(&self) -> u64 {
        match self.class {
            Some(class) if !class.may_be_range(self.align) => PAGE,
            _ => self.align.max(GRANULE),
        }
    }

    /// Returns whether any memory that satisfies this request satisfies `other` too.
    fn is_harder_than(&self, other: &Self) -> bool {
        self.size() >= other.size() && self.range_align() >= other.range_align()
    }
}

/// An upper bound of the blocks outside the core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CachedBound {
    pub(crate) bytes: u64,
    /// Whether they may include blocks above the small ones.
    pub(crate) larger: bool,
    /// Whether they may include blocks of the class requested.
    pub(crate) of_class: bool,
}

/// The last refusal after a search of everything.
pub(super) struct Refusals {
    last: Option<Refusal>,
    /// How many requests were refused since, with its help or not: so many pay for the next search.
    since: usize,
}

/// A request that nothing free satisfied, while no blocks were outside the core.
struct Refusal {
    request: Request,
    /// The value of [`Core::given`] then.
    given: u64,
    /// The bytes in use then that have to be freed before anything can satisfy it.
    lacks: u64,
}

impl Refusals {
    /// Nothing is remembered, and the next search needs no reason.
    pub(super) const NONE: Self = Self {
        last: None,
        since: usize::MAX,
    };
}

impl Core {
    /// Returns whether a request that the core has just refused would still fail if all blocks kept `outside`
    /// returned to it.
    ///
    /// It would need a range of its size. Every byte of that range is free here or kept outside. Bytes that
    /// were in use at the last full search have each been freed to the core since, or are kept outside. Where memory does not
    /// join, a range may take the place of several, and of addresses without memory.
    pub(crate) fn rules_out(
        &mut self,
        request: &Request,
        outside: CachedBound,
        slabs: &HeldSlabs<'_>,
    ) -> bool {
        if outside.of_class {
            return false;
        }
        let (free, ends) = slabs.bytes();
        let idle =
            self.ranges.free_bytes() + free + ends + outside.bytes + self.replaceable(request);
        if request.size() > idle {
            return true;
        }
        let given = self.given(slabs);
        let Some(refusal) = &self.refusals.last else {
            return false;
        };
        let freed = given
            .wrapping_sub(refusal.given)
            .saturating_add(outside.bytes);
        let holds = request.is_harder_than(&refusal.request) && freed < refusal.lacks;
        self.refusals.since = self.refusals.since.saturating_add(holds.into());
        holds
    }

    /// Returns whether a request for a range, which the core has just refused [after a search of all
    /// ranges](Self::exhaustively), would still fail if all small blocks kept outside returned, and only such blocks are:
    /// they can free whole slabs alone.
    pub(crate) fn slabs_cannot_serve(
        &self,
        request: &Request,
        outside: CachedBound,
        slabs: &HeldSlabs<'_>,
    ) -> bool {
        if outside.larger || request.class.is_some() || self.may_replace(request) {
            return false;
        }
        let nodes = slabs.nodes_with_at_most(outside.bytes, MOST_SLABS);
        let size = request.size();
        let free = |node| self.free_around(node, outside.bytes, size, slabs);
        nodes.is_some_and(|mut nodes| nodes.all(|node| free(node) < size))
    }

    /// Returns the bytes around a range, up to `enough`, that are free or in slabs with at most `in_use` bytes in
    /// use.
    fn free_around(&self, node: RangeId, in_use: u64, enough: u64, slabs: &HeldSlabs<'_>) -> u64 {
        let nodes = &self.ranges.nodes;
        let bytes = |node: RangeId| u64::from(nodes.get(node).size) << extents::LOG_GRANULE;
        let may_be_free = |&node: &RangeId| match nodes.get(node).state {
            NodeState::Free => true,
            _ => {
                let start = nodes.get(node).start << extents::LOG_GRANULE;
                match self.slabs.pages.get(start) {
                    Some(Owner::Slab(slab)) => {
                        let used = slabs.in_use(slab, node);
                        used.is_some_and(|used| used <= in_use)
                    }
                    _ => false,
                }
            }
        };
        let mut sum = bytes(node);
        let side = |step: fn(&Node) -> RangeId| {
            let beside =
                std::iter::successors(Some(node), move |&node| Some(step(nodes.get(node))));
            beside.skip(1).take_while(may_be_free)
        };
        for node in side(|node| node.previous).chain(side(|node| node.next)) {
            sum += bytes(node);
            if sum >= enough {
                break;
            }
        }
        sum
    }

    /// Remembers a request that nothing satisfies, found by an [exhaustive](Self::exhaustively) search with nothing
    /// kept outside.
    pub(crate) fn remember_refusal(&mut self, request: &Request) {
        let ranges = self.ranges.nodes.count;
        if ranges > MOST_RANGES || self.refusals.since < ranges / RANGES_PER_USE {
            self.refusals.since = self.refusals.since.saturating_add(1);
            return;
        }
        let slabs = self.slabs.hold();
        let lacks = if self.may_replace(request) {
            self.lacks_in(std::iter::once(self.with_holes()), request, &slabs)
        } else {
            self.lacks_in(self.ranges.each_span(), request, &slabs)
        };
        let given = self.given(&slabs);
        drop(slabs);
        let last = Some(Refusal {
            request: *request,
            given,
            lacks,
        });
        self.refusals = Refusals { last, since: 0 };
    }

    /// Forgets the refusals after memory was added or removed, or a block shrank: the bounds count whole
    /// blocks, in the memory that there was.
    pub(super) fn forget_refusals(&mut self) {
        self.refusals = Refusals::NONE;
    }

    /// Returns whether idle memory may make place for this request: each piece, all idle, would have room for an easier one.
    fn may_replace(&self, request: &Request) -> bool {
        request.size().saturating_add(request.range_align()) > self.least_apart
    }

    /// Returns the bytes of addresses without memory, where those can be part of a new range with idle memory beside them.
    fn replaceable(&self, request: &Request) -> u64 {
        if self.may_replace(request) {
            self.limit.saturating_sub(self.ranges.total())
        } else {
            0
        }
    }

    /// Iterates over all ranges, and those of addresses without memory as if they were free.
    fn with_holes(&self) -> impl Iterator<Item = (Range<u64>, Option<RangeId>)> + Clone {
        let end = (self.limit..self.limit, None);
        let all = self.ranges.each_span().flatten().chain([end]);
        let mut at = 0;
        all.flat_map(move |(range, node)| {
            let hole = (at..range.start, None);
            at = range.end;
            [hole, (range, node)]
        })
        .filter(|(range, _)| range.start < range.end)
    }

    /// Returns the fewest bytes in use within adjacent ranges of a span that the request could lie in: as many must be freed,
    /// as whole blocks, before it can succeed.
    fn lacks_in<S>(
        &self,
        spans: impl Iterator<Item = S>,
        request: &Request,
        slabs: &HeldSlabs<'_>,
    ) -> u64
    where
        S: Iterator<Item = (Range<u64>, Option<RangeId>)> + Clone,
    {
        let (size, align) = (request.size(), request.range_align());
        let mut least = u64::MAX;
        let in_use = |(range, node): &(Range<u64>, Option<RangeId>)| match (
            node,
            self.slabs.pages.get(range.start),
        ) {
            (None, _) => 0,
            (Some(node), Some(Owner::Slab(slab))) => {
                slabs.in_use(slab, *node).unwrap_or(len(range))
            }
            (Some(_), _) => len(range),
        };
        for span in spans {
            // The ranges from the current one to the last one before `end`: how many of their bytes are in use.
            let (mut end, mut used) = (0, 0);
            let mut ahead = span.clone();
            for current in span {
                let range = &current.0;
                // The first aligned start in this range, because the block then reaches into the fewest later ranges.
                let start = self.ranges.aligned(range.start, align);
                let begins = start < range.end;
                let needed = if begins {
                    start.saturating_add(size)
                } else {
                    range.end
                };
                while end < needed
                    && let Some(next) = ahead.next()
                {
                    end = next.0.end;
                    used += in_use(&next);
                }
                if begins && end >= needed {
                    least = least.min(used);
                }
                used -= in_use(&current);
            }
        }
        least
    }
}

fn len(range: &Range<u64>) -> u64 {
    range.end - range.start
}
