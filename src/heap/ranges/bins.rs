//! Bins of free ranges: which bin a size belongs to, and which bins are not empty.

use std::hint::select_unpredictable;

/// Bins per doubling of the size, as a power of two: a range is at most a 64th larger than the smallest of
/// its bin, and sizes below 128 granules have a bin each.
const LOG_STEPS: u32 = 6;
const STEPS: u32 = 1 << LOG_STEPS;
/// Sizes are below 2³² granules.
pub(super) const BINS: usize = ((32 - LOG_STEPS + 1) * STEPS) as usize;
/// The last bin, for ranges of any size at a growable end, behind which memory may be added: used last. (Korn
/// and Vo's "wilderness", 1985.)
pub(super) const GROWABLE_END: usize = BINS;
const _: () = assert!(
    BINS.is_multiple_of(64) && GROWABLE_END / 64 < 63,
    "it has a word of its own"
);

/// Returns the bin of a size.
#[inline]
pub(crate) const fn bin_of(size: u32) -> usize {
    // Sizes below STEPS are their own bins. A shift of 0 does that without a branch, which would be
    // unpredictable.
    let shift = (size | STEPS).ilog2() - LOG_STEPS;
    (shift * STEPS + (size >> shift)) as usize
}

/// Returns whether all ranges in the size's bin have that size.
#[cfg(test)]
pub(super) const fn is_exact(size: u32) -> bool {
    size < 2 * STEPS
}

/// Which bins have ranges: a bit for each bin, and a summary bit for each word of these that is not 0.
pub(crate) struct Occupied {
    words: [u64; 64],
    summary: u64,
}

impl Occupied {
    pub(crate) const fn new() -> Self {
        Self {
            words: [0; 64],
            summary: 0,
        }
    }

    #[inline]
    pub(crate) fn set(&mut self, bin: usize) {
        self.words[bin / 64 % 64] |= 1 << (bin % 64);
        self.summary |= 1 << (bin / 64 % 64);
    }

    /// Clears a bin's bit if `empty`, without a branch, which would be unpredictable.
    #[inline]
    pub(crate) fn reset_if(&mut self, bin: usize, empty: bool) {
        let word = &mut self.words[bin / 64 % 64];
        *word &= !(u64::from(empty) << (bin % 64));
        self.summary &= !(u64::from(*word == 0) << (bin / 64 % 64));
    }

    /// Returns the first bin from `bin` on that has ranges.
    #[inline]
    pub(crate) fn next(&self, bin: usize) -> Option<usize> {
        let at = bin / 64 % 64;
        let here = self.words[at] & (u64::MAX << (bin % 64));
        let beyond = self.summary & (u64::MAX << at << 1);
        // Without a branch, as above; 64 if there is none.
        let at = select_unpredictable(here != 0, at, beyond.trailing_zeros() as usize);
        let bits = select_unpredictable(here != 0, here, self.words[at % 64]);
        (here | beyond != 0).then(|| at * 64 + bits.trailing_zeros() as usize)
    }

    /// Returns the last bin that has ranges, except [`GROWABLE_END`].
    pub(super) fn last(&self) -> Option<usize> {
        let summary = self.summary & !(1 << (GROWABLE_END / 64));
        let word = summary.checked_ilog2()? as usize;
        Some(word * 64 + self.words[word].ilog2() as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bins_are_in_the_order_of_sizes_and_narrow() {
        let mut last = 0;
        for log in 0..32 {
            for step in 0..400_u64 {
                let size = (1_u64 << log) + (step << log) / 400;
                let bin = bin_of(size as u32);
                assert!(bin >= last && bin < BINS, "{size}");
                assert!(bin <= last + 1 || is_exact(size as u32), "{size}");
                last = bin;
            }
        }
        assert_eq!(bin_of(u32::MAX), BINS - 1);
        assert!(is_exact(127) && bin_of(127) + 1 == bin_of(128));
        assert!(!is_exact(128) && bin_of(128) == bin_of(129));
    }

    proptest! {
        #[test]
        fn occupied_bins_are_found(
            steps in proptest::collection::vec((0..=GROWABLE_END, any::<bool>()), 0..200),
            from in proptest::collection::vec(0..=GROWABLE_END, 20),
        ) {
            let (mut occupied, mut model) = (Occupied::new(), BTreeSet::new());
            for (bin, insert) in steps {
                if insert {
                    occupied.set(bin);
                    model.insert(bin);
                } else {
                    occupied.reset_if(bin, false);
                    occupied.reset_if(bin, true);
                    model.remove(&bin);
                }
                prop_assert_eq!(occupied.last(), model.range(..GROWABLE_END).last().copied());
            }
            for bin in from {
                prop_assert_eq!(occupied.next(bin), model.range(bin..).next().copied());
            }
        }
    }
}
