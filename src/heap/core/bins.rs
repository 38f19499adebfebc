//! Free ranges by size: the smallest that fits, or nearly, in constant time.

use super::ranges::NodeId;

/// Bins to a doubling of the size, as a power of two: a range is at most a 32nd larger than the
/// smallest of its bin.
const LOG_STEPS: u32 = 5;
const STEPS: u32 = 1 << LOG_STEPS;
/// Sizes are below 2³² granules.
const BINS: usize = ((32 - LOG_STEPS + 1) * STEPS) as usize;
/// How many ranges of the request's own bin are looked at in the first try. More make the fit better
/// and the search longer; eight are as good as all of them, by measurement, on random sizes.
const LOOK: usize = 8;

/// A free range: its node, and its size in granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Free {
    pub(super) node: NodeId,
    pub(super) size: u32,
}

/// Which bin a size belongs to. Sizes below 64 granules have a bin each.
#[inline]
fn bin_of(size: u32) -> usize {
    if size < STEPS {
        return size as usize;
    }
    let exponent = size.ilog2();
    let step = size >> (exponent - LOG_STEPS); // STEPS to 2·STEPS − 1
    ((exponent - LOG_STEPS) * STEPS + step) as usize
}

/// Free ranges, each with a place in its bin that its node is told.
#[derive(Debug)]
pub(super) struct Bins {
    bins: Box<[Vec<Free>]>,
    /// A bit for each bin that has ranges, and for each word of these bits that has some.
    words: [u64; BINS.div_ceil(64)],
    summary: u64,
}

impl Bins {
    pub(super) fn new() -> Self {
        Self {
            bins: (0..BINS).map(|_| Vec::new()).collect(),
            words: [0; BINS.div_ceil(64)],
            summary: 0,
        }
    }

    /// Adds a range and tells its place.
    #[inline]
    pub(super) fn insert(&mut self, free: Free) -> u32 {
        let bin = bin_of(free.size);
        let list = &mut self.bins[bin];
        list.push(free);
        let place = list.len() - 1;
        if place == 0 {
            self.words[bin / 64] |= 1 << (bin % 64);
            self.summary |= 1 << (bin / 64);
        }
        place as u32
    }

    /// Takes the range of `size` at `place` away; the node that is at this place from now on, if any.
    #[inline]
    pub(super) fn remove(&mut self, size: u32, place: u32) -> Option<NodeId> {
        let bin = bin_of(size);
        let list = &mut self.bins[bin];
        list.swap_remove(place as usize);
        if list.is_empty() {
            self.words[bin / 64] &= !(1 << (bin % 64));
            if self.words[bin / 64] == 0 {
                self.summary &= !(1 << (bin / 64));
            }
        }
        list.get(place as usize).map(|free| free.node)
    }

    /// A range of at least `size` granules: the smallest of some of its own bin, else one of the next
    /// bin that has any, else the smallest of all in its own.
    #[inline]
    pub(super) fn find(&self, size: u32) -> Option<Free> {
        let bin = bin_of(size);
        let own = &self.bins[bin];
        let near = &own[own.len().saturating_sub(LOOK)..];
        if let Some(free) = smallest(near, size) {
            return Some(free);
        }
        if let Some(next) = self.next(bin + 1) {
            return self.bins[next].last().copied();
        }
        smallest(&own[..own.len() - near.len()], size)
    }

    /// Every range that may be of at least `size` granules, and some that are smaller, by bins
    /// upwards.
    pub(super) fn at_least(&self, size: u32) -> impl Iterator<Item = Free> {
        let mut bin = self.next(bin_of(size));
        std::iter::from_fn(move || {
            let list = &self.bins[bin?];
            bin = bin.and_then(|bin| self.next(bin + 1));
            Some(list)
        })
        .flatten()
        .copied()
    }

    /// The size of the largest range, in granules.
    pub(super) fn largest(&self) -> u32 {
        let Some(word) = self.summary.checked_ilog2() else {
            return 0;
        };
        let bin = word * 64 + self.words[word as usize].ilog2();
        let sizes = self.bins[bin as usize].iter().map(|free| free.size);
        sizes.max().unwrap_or(0)
    }

    /// The range at a place of the bin for `size`.
    #[cfg(test)]
    pub(super) fn at(&self, size: u32, place: u32) -> Option<Free> {
        self.bins[bin_of(size)].get(place as usize).copied()
    }

    /// What the lists take, in bytes.
    pub(super) fn metadata(&self) -> usize {
        let entries: usize = self.bins.iter().map(Vec::capacity).sum();
        entries * size_of::<Free>() + size_of_val(&*self.bins)
    }

    /// The first bin from `bin` on that has ranges.
    #[inline]
    fn next(&self, bin: usize) -> Option<usize> {
        if bin >= BINS {
            return None;
        }
        let here = self.words[bin / 64] & (u64::MAX << (bin % 64));
        if here != 0 {
            return Some(bin / 64 * 64 + here.trailing_zeros() as usize);
        }
        let words = self.summary & (u64::MAX << (bin / 64) << 1);
        if words == 0 {
            return None;
        }
        let word = words.trailing_zeros() as usize;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }
}

/// The smallest of `list` that has `size` granules, the last such.
#[inline]
fn smallest(list: &[Free], size: u32) -> Option<Free> {
    let mut best: Option<Free> = None;
    for &free in list.iter().rev() {
        if free.size >= size && best.is_none_or(|best| free.size < best.size) {
            best = Some(free);
            if free.size == size {
                break;
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bins_are_in_the_order_of_sizes_and_narrow() {
        let mut last = 0;
        for log in 0..32 {
            for step in 0..200_u64 {
                let size = (1_u64 << log) + (step << log) / 200;
                let bin = bin_of(size as u32);
                assert!(bin >= last && bin < BINS, "{size}");
                assert!(bin <= last + 1 || size < 64, "{size}");
                last = bin;
            }
        }
        assert_eq!(bin_of(u32::MAX), BINS - 1);
        assert_eq!(bin_of(63) + 1, bin_of(64));
        assert_eq!(bin_of(64), bin_of(65));
    }

    proptest! {
        #[test]
        fn what_fits_is_found(sizes in proptest::collection::vec(1_u32..5000, 0..60), wanted in 1_u32..5000) {
            let mut bins = Bins::new();
            for (node, &size) in sizes.iter().enumerate() {
                bins.insert(Free { node: NodeId(node as u32), size });
            }
            prop_assert_eq!(bins.largest(), sizes.iter().copied().max().unwrap_or(0));
            let best = sizes.iter().copied().filter(|&size| size >= wanted).min();
            let found = bins.find(wanted);
            prop_assert_eq!(found.is_some(), best.is_some());
            if let (Some(found), Some(best)) = (found, best) {
                prop_assert!(found.size >= best);
                // The next bin is searched before all of a crowded own one.
                let own = sizes.iter().filter(|&&size| bin_of(size) == bin_of(wanted)).count();
                prop_assert!(own > LOOK || bin_of(found.size) == bin_of(best), "{} for {best}", found.size);
            }
            let mut all: Vec<u32> = bins.at_least(wanted).map(|free| free.size).filter(|&size| size >= wanted).collect();
            all.sort_unstable();
            let mut expected: Vec<u32> = sizes.iter().copied().filter(|&size| size >= wanted).collect();
            expected.sort_unstable();
            prop_assert_eq!(all, expected);
        }
    }
}
