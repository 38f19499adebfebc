//! Remembered refusals: a repeated request that cannot succeed skips the search.

use std::ops::Range;

use super::{Core, Owner, RangeId};
use crate::classes::{Class, GRANULE, PAGE};

/// A search of so many ranges takes as long as a refusal without it, roughly.
const RANGES_PER_REFUSAL: usize = 256;
/// More ranges are never searched: these take about a millisecond.
const MOST_RANGES: usize = 1 << 17;

/// A request to the core: for a small block, the page that a new slab or a range takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The class of a small block.
    class: Option<Class>,
    /// In bytes.
    pub(super) size: u64,
    pub(super) align: u64,
}

impl Request {
    /// Returns the request for `bytes`, more than 0, at a multiple of `align`.
    pub(crate) fn new(bytes: u64, align: u64) -> Self {
        match Class::of(bytes, align) {
            Some(class) => Self {
                class: Some(class),
                size: PAGE,
                align: if class.may_be_range(align) {
                    GRANULE
                } else {
                    PAGE
                },
            },
            None => Self {
                class: None,
                size: Core::range_bytes(bytes).unwrap_or(u64::MAX),
                align: align.max(GRANULE),
            },
        }
    }

    pub(crate) fn class(&self) -> Option<Class> {
        self.class
    }

    /// Returns whether any memory that satisfies this request satisfies `other` too.
    fn is_harder_than(&self, other: &Self) -> bool {
        self.size >= other.size && self.align >= other.align
    }
}

/// An upper bound of the blocks outside the core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CachedBound {
    pub(crate) bytes: u64,
    /// Whether they may include blocks of the class requested.
    pub(crate) of_class: bool,
}

/// The last refusal after a search of everything.
pub(super) struct Refusals {
    last: Option<Refusal>,
    /// How many ranges the refusals since the last search pay to search.
    credit: usize,
}

impl Refusals {
    /// The first search costs nothing.
    pub(super) const NONE: Self = Self {
        last: None,
        credit: MOST_RANGES,
    };
}

/// A request that nothing free satisfied, while no blocks were outside the core.
struct Refusal {
    request: Request,
    /// The value of [`Core::given`] then.
    given: u64,
    /// The bytes in use then that have to be freed before anything can satisfy it.
    lacks: u64,
}

impl Core {
    /// Returns whether a request that the core has just refused would still fail if all blocks kept `outside`
    /// returned to it.
    ///
    /// It would need a range of its size. Every byte of that range is free here or kept outside. Bytes that
    /// were in use at the last full search have each been freed to the core since, or are kept outside. Where memory does not
    /// join, a range may take the place of several, and of addresses without memory.
    pub(crate) fn rules_out(&mut self, request: &Request, outside: CachedBound) -> bool {
        if outside.of_class {
            return false;
        }
        if request.size > self.most_free(outside.bytes) {
            return true;
        }
        let given = self.given();
        let Refusals { last, credit } = &mut self.refusals;
        *credit = (*credit + RANGES_PER_REFUSAL).min(MOST_RANGES);
        last.as_ref().is_some_and(|last| {
            let freed = given.wrapping_sub(last.given).saturating_add(outside.bytes);
            request.is_harder_than(&last.request) && freed < last.lacks
        })
    }

    /// Returns the bytes that could be free if the core had `outside` more bytes of blocks that are kept outside.
    pub(crate) fn most_free(&self, outside: u64) -> u64 {
        let idle = self.free_bytes() + self.slabs.free + self.slabs.ends;
        idle + outside + self.replaceable()
    }

    /// Remembers a request that nothing satisfies, found by an [exhaustive](Self::exhaustively) search with nothing
    /// kept outside.
    pub(crate) fn remember_refusal(&mut self, request: Request) {
        if self.refusals.credit < self.ranges.nodes.count {
            return;
        }
        let lacks = if self.replaces {
            self.lacks_in(std::iter::once(self.with_holes()), &request)
        } else {
            self.lacks_in(self.ranges.each_span(), &request)
        };
        let given = self.given();
        self.refusals = Refusals {
            last: Some(Refusal {
                request,
                given,
                lacks,
            }),
            credit: 0,
        };
    }

    /// Forgets the refusals after memory was added or removed, or a block shrank: the bounds count whole
    /// blocks, in the memory that there was.
    pub(super) fn forget_refusals(&mut self) {
        self.refusals.last = None;
    }

    /// Returns the bytes of addresses without memory, where those can be part of a new range with idle memory beside them.
    fn replaceable(&self) -> u64 {
        if self.replaces {
            self.limit.saturating_sub(self.total())
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
    fn lacks_in<S>(&self, spans: impl Iterator<Item = S>, request: &Request) -> u64
    where
        S: Iterator<Item = (Range<u64>, Option<RangeId>)> + Clone,
    {
        let mut least = u64::MAX;
        let in_use = |(range, node): &(Range<u64>, Option<RangeId>)| match (
            node,
            self.pages.get(range.start),
        ) {
            (None, _) => 0,
            (Some(node), Some(Owner::Slab(slab))) => {
                self.slabs.in_use(slab, *node).unwrap_or(len(range))
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
                let start = self.ranges.aligned(range.start, request.align);
                let begins = start < range.end;
                let needed = if begins {
                    start.saturating_add(request.size)
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
