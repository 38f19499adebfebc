//! Searches the free ranges for a request that no bin answers by itself, and remembers the results of long
//! searches.
//!
//! A list has its latest range first, and [`Nodes::link`] reports each range that becomes free. So a search goes on
//! where it stopped, even if ranges changed meanwhile, and its result stays known: a request is compared only with
//! ranges that became free since.

use super::bins::{self, GROWABLE_END};
use super::nodes::{Node, NodeState, Nodes, RangeId};

/// How many ranges a thread may search before it lets others have the heap's memory: some 10 µs.
pub(super) const SLICE: usize = if cfg!(test) { 3 } else { 1024 };
/// How many results are remembered: each is compared with each range that becomes free.
const MOST_KNOWN: usize = 4;
/// A result is remembered if so many ranges were searched for it.
const WORTHWHILE: usize = if cfg!(test) { 1 } else { 64 };
/// The most ranges that a result names. If more fit, a new search ends soon.
const MOST_FITTING: usize = if cfg!(test) { 8 } else { 512 };
/// For each range searched, how many may become free before a result that no request used is forgotten.
const CHANGES_PER_LOOK: usize = 64;

/// The extent that a free range must have room for, in granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) size: u32,
    /// A power of two.
    pub(super) align: u64,
    /// The address of offset 0, which alignment applies to; less than `align`.
    pub(super) origin: u64,
}

impl Need {
    /// Returns the granules in a range before its first multiple of the alignment.
    pub(super) fn gap(&self, node: &Node) -> u64 {
        (node.start + self.origin).wrapping_neg() & (self.align - 1)
    }

    fn fits(&self, node: &Node) -> bool {
        self.gap(node) + u64::from(self.size) <= u64::from(node.size)
    }

    /// Returns whether each range that fits this also fits `other`.
    fn is_harder_than(&self, other: &Self) -> bool {
        self.size >= other.size && self.align >= other.align
    }
}

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    One(RangeId),
    Nothing,
    /// Ranges are left that were not searched.
    Unfinished,
}

/// The result of a search.
struct Known {
    need: Need,
    /// Includes each free range that fits, except those that the search has not reached yet.
    fitting: Vec<RangeId>,
    /// The bin and the range where the search goes on; `None` once it is complete.
    rest: Option<(usize, RangeId)>,
    /// How many ranges were searched.
    looks: usize,
    /// How many ranges may become free before this is forgotten.
    left: usize,
}

/// The results of the last long searches.
pub(super) struct Searches {
    /// The one used last comes last.
    known: Vec<Known>,
    /// The size of the least request among them. Smaller ranges cannot fit.
    pub(super) least: u32,
}

impl Searches {
    pub(super) const fn new() -> Self {
        Self {
            known: Vec::new(),
            least: u32::MAX,
        }
    }

    /// Takes out the result that answers a request, or that of an unfinished search for the same request.
    fn take(&mut self, need: &Need) -> Option<Known> {
        let at = self.known.iter().position(|known| {
            known.need == *need || known.rest.is_none() && need.is_harder_than(&known.need)
        })?;
        Some(self.known.remove(at))
    }

    /// Remembers a result, in the place of those that it answers too, or of the one used least lately.
    fn put(&mut self, mut known: Known) {
        known.left = known.looks * CHANGES_PER_LOOK;
        if known.rest.is_none() {
            self.known
                .retain(|other| !other.need.is_harder_than(&known.need));
        }
        if self.known.len() == MOST_KNOWN {
            self.known.remove(0);
        }
        self.known.push(known);
    }

    fn set_least(&mut self) {
        let sizes = self.known.iter().map(|known| known.need.size);
        self.least = sizes.min().unwrap_or(u32::MAX);
    }
}

impl Nodes {
    /// Returns a free range that fits. Searches at most `looks` ranges, if [`pick`](Self::pick) finds none.
    pub(super) fn find(&mut self, need: Need, looks: usize) -> Found {
        let Some(bin) = self.occupied.next(bins::bin_of(need.size)) else {
            return Found::Nothing;
        };
        // A range of this size has room for the block at the first multiple of `align`, wherever that lies.
        let ample = u32::try_from(u64::from(need.size) + need.align - 1);
        let near = self.pick(need.size).filter(|&node| self.fits(node, &need));
        match near.or_else(|| self.pick(ample.ok()?)) {
            Some(node) => Found::One(node),
            None => self.search(need, bin, looks),
        }
    }

    /// Searches at most `looks` ranges by ascending bins, from `bin` on; those at growable ends last.
    fn search(&mut self, need: Need, bin: usize, looks: usize) -> Found {
        let known = self.searches.take(&need);
        let mut known = known.unwrap_or_else(|| Known {
            need,
            fitting: Vec::new(),
            rest: Some((bin, self.heads[bin])),
            looks: 0,
            left: 0,
        });
        let most = known.looks.saturating_add(looks);
        let found = loop {
            while let Some(&node) = known.fitting.last()
                && !self.fits(node, &known.need)
            {
                known.fitting.pop();
            }
            if let Some(node) = self.choose(&known, &need) {
                break Found::One(node);
            }
            if known.rest.is_none() {
                break Found::Nothing;
            }
            if known.looks >= most {
                break Found::Unfinished;
            }
            self.look(&mut known, most);
        };
        if known.looks >= WORTHWHILE {
            self.searches.put(known);
        }
        self.searches.set_least();
        found
    }

    fn fits(&self, node: RangeId, need: &Need) -> bool {
        let node = self.get(node);
        node.state == NodeState::Free && need.fits(node)
    }

    /// Returns the range that became free last among those known to fit; at a growable end only if all were
    /// searched.
    fn choose(&self, known: &Known, need: &Need) -> Option<RangeId> {
        let latest = known.fitting.iter().rev().copied();
        let mut fitting = latest.filter(|&node| self.fits(node, need));
        let growable = fitting.clone().next().filter(|_| known.rest.is_none());
        let inside = fitting.find(|&node| !self.get(node).growable_end);
        inside.or(growable)
    }

    /// Goes on to search until a range fits that is not at a growable end, or `most` were searched.
    fn look(&self, known: &mut Known, most: usize) {
        while let Some((bin, at)) = known.rest
            && known.looks < most
        {
            let mut at = at;
            // If the range has left the list or the list's front, those that were not searched are still behind
            // the front.
            let node = self.get(at);
            if at != self.none && (node.state != NodeState::Free || usize::from(node.bin) != bin) {
                at = self.heads[bin];
            }
            if at == self.none {
                let next = self.occupied.next(bin + 1);
                known.rest = next.map(|bin| (bin, self.heads[bin]));
                continue;
            }
            let node = self.get(at);
            known.rest = Some((bin, node.after));
            known.looks += 1;
            if known.need.fits(node) {
                known.fitting.push(at);
                // One at a growable end is no result yet: to return for each of many would take quadratic time.
                if !node.growable_end {
                    return;
                }
            }
        }
    }

    /// Notes a range that has become free and is not smaller than the least request that was searched for.
    #[cold]
    #[inline(never)]
    pub(super) fn note(&mut self, node: RangeId) {
        let mut all = std::mem::take(&mut self.searches.known);
        all.retain_mut(|known| {
            known.left = known.left.saturating_sub(1);
            let new = known.need.fits(self.get(node)) && known.fitting.last() != Some(&node);
            if new && known.fitting.len() >= MOST_FITTING {
                known.fitting.sort_unstable_by_key(|node| node.number());
                known.fitting.dedup();
                known.fitting.retain(|&node| self.fits(node, &known.need));
                if known.fitting.len() > MOST_FITTING / 2 {
                    return false;
                }
            }
            if new {
                known.fitting.push(node);
            }
            known.left > 0
        });
        self.searches.known = all;
        self.searches.set_least();
    }

    /// Forgets the nodes that are not free: another list may get them.
    pub(super) fn forget_used(&mut self) {
        let mut all = std::mem::take(&mut self.searches.known);
        for known in &mut all {
            let is_free = |node: RangeId| self.get(node).state == NodeState::Free;
            known.fitting.retain(|&node| is_free(node));
            known.rest = known
                .rest
                .map(|(bin, node)| match node == self.none || is_free(node) {
                    true => (bin, node),
                    false => (bin, self.heads[bin]),
                });
        }
        self.searches.known = all;
    }

    /// Iterates over the nodes of a bin.
    fn list(&self, bin: usize) -> impl Iterator<Item = RangeId> {
        let mut node = self.heads[bin];
        std::iter::from_fn(move || {
            let this = node;
            node = self.get(this).after;
            (this != self.none).then_some(this)
        })
    }

    /// Iterates over the free nodes of at least `size` granules, by ascending bins.
    pub(super) fn at_least(&self, size: u32) -> impl Iterator<Item = RangeId> {
        let mut from = bins::bin_of(size);
        let bins = std::iter::from_fn(move || {
            let bin = self.occupied.next(from)?;
            from = bin + 1;
            Some(bin)
        });
        bins.flat_map(|bin| self.list(bin))
            .filter(move |&node| self.get(node).size >= size)
    }

    /// Returns the size of the largest among the first `looks` nodes of the last bin and as many at growable
    /// ends.
    pub(super) fn largest(&self, looks: usize) -> u32 {
        let bins = self.occupied.last().into_iter().chain([GROWABLE_END]);
        let nodes = bins.flat_map(|bin| self.list(bin).take(looks));
        nodes.map(|node| self.get(node).size).max().unwrap_or(0)
    }
}

#[cfg(test)]
impl Nodes {
    /// Checks that the remembered results miss no free range that fits.
    pub(super) fn check_searches(&self) {
        for known in &self.searches.known {
            assert!(self.searches.least <= known.need.size && known.left > 0);
            let mut rest = Known {
                need: known.need,
                fitting: known.fitting.clone(),
                ..*known
            };
            while rest.rest.is_some() {
                self.look(&mut rest, usize::MAX);
            }
            for node in self
                .at_least(1)
                .filter(|&node| self.fits(node, &known.need))
            {
                assert!(rest.fitting.contains(&node), "{:?}", known.need);
            }
        }
    }
}

#[cfg(test)]
mod tests;
