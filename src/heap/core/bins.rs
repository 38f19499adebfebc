//! Sizes of free ranges in bins: which bin a size belongs to, and which bins have ranges.

use std::hint::select_unpredictable;

/// Bins to a doubling of the size, as a power of two: a range is at most a 64th larger than the
/// smallest of its bin, and sizes below 128 granules have a bin each.
const LOG_STEPS: u32 = 6;
const STEPS: u32 = 1 << LOG_STEPS;
/// Sizes are below 2³² granules.
pub(super) const BINS: usize = ((32 - LOG_STEPS + 1) * STEPS) as usize;
/// The bin after all, of ranges at an edge where memory may come, whatever their sizes: taken last. (Korn and
/// Vo's "wilderness", 1985.)
pub(super) const EDGE: usize = BINS;
const _: () = assert!(
    BINS.is_multiple_of(64) && EDGE / 64 < 63,
    "it has a word of its own"
);

/// Which bin a size belongs to.
#[inline]
pub(super) fn bin_of(size: u32) -> usize {
    // Sizes below STEPS are their own bins: by the shift of 0, for a branch could not be foreseen.
    let shift = (size | STEPS).ilog2() - LOG_STEPS;
    (shift * STEPS + (size >> shift)) as usize
}

/// Whether all of a size's bin is of that size.
#[cfg(test)]
pub(super) const fn is_exact(size: u32) -> bool {
    size < 2 * STEPS
}

/// Which bins have ranges: a bit for each, and one for each word of these bits that has some.
#[derive(Debug)]
pub(super) struct Occupied {
    words: [u64; 64],
    summary: u64,
}

impl Occupied {
    pub(super) const fn new() -> Self {
        Self {
            words: [0; 64],
            summary: 0,
        }
    }

    #[inline]
    pub(super) fn set(&mut self, bin: usize) {
        self.words[bin / 64 % 64] |= 1 << (bin % 64);
        self.summary |= 1 << (bin / 64 % 64);
    }

    /// Resets a bin's bit if it is `empty` now. Without a branch: whether it is cannot be foreseen.
    #[inline]
    pub(super) fn reset_if(&mut self, bin: usize, empty: bool) {
        let word = &mut self.words[bin / 64 % 64];
        *word &= !(u64::from(empty) << (bin % 64));
        self.summary &= !(u64::from(*word == 0) << (bin / 64 % 64));
    }

    /// The first bin from `bin` on that has ranges.
    #[inline]
    pub(super) fn next(&self, bin: usize) -> Option<usize> {
        let at = bin / 64 % 64;
        let here = self.words[at] & (u64::MAX << (bin % 64));
        let beyond = self.summary & (u64::MAX << at << 1);
        // Without a branch, as above; 64 where there is none.
        let at = select_unpredictable(here != 0, at, beyond.trailing_zeros() as usize);
        let bits = select_unpredictable(here != 0, here, self.words[at % 64]);
        (here | beyond != 0).then(|| at * 64 + bits.trailing_zeros() as usize)
    }

    /// The last bin that has ranges, but for [`EDGE`].
    pub(super) fn last(&self) -> Option<usize> {
        let summary = self.summary & !(1 << (EDGE / 64));
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
            steps in proptest::collection::vec((0..=EDGE, any::<bool>()), 0..200),
            from in proptest::collection::vec(0..=EDGE, 20),
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
                prop_assert_eq!(occupied.last(), model.range(..EDGE).last().copied());
            }
            for bin in from {
                prop_assert_eq!(occupied.next(bin), model.range(bin..).next().copied());
            }
        }
    }
}
