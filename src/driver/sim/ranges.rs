//! Free ranges of a chunk or file: taken first fit, merged when given back. Pure.

use std::collections::BTreeMap;

/// Free ranges, by start, never adjacent to each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FreeRanges(BTreeMap<u64, u64>);

impl FreeRanges {
    /// All of `start..start + len`.
    pub(super) fn whole(start: u64, len: u64) -> Self {
        Self(BTreeMap::from([(start, len)]))
    }

    /// Takes `len` bytes from the first range that has them, and tells where they start.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        let (&start, &have) = self.0.iter().find(|&(_, &have)| have >= len)?;
        self.0.remove(&start);
        if have > len {
            self.0.insert(start + len, have - len);
        }
        Some(start)
    }

    /// Gives a range back. It must not be free in any part.
    pub(super) fn give(&mut self, mut start: u64, mut len: u64) {
        if let Some((&before, &have)) = self.0.range(..start).next_back() {
            debug_assert!(before + have <= start, "given back twice");
            if before + have == start {
                self.0.remove(&before);
                (start, len) = (before, have + len);
            }
        }
        if let Some(after) = self.0.remove(&(start + len)) {
            len += after;
        }
        self.0.insert(start, len);
    }

    /// Whether all of `start..start + len` is free.
    pub(super) fn is_whole(&self, start: u64, len: u64) -> bool {
        self.0.get(&start).is_some_and(|&have| have >= len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_a_map_of_single_units(
            steps in prop::collection::vec((any::<bool>(), 1_u64..20), 0..80),
        ) {
            const UNITS: u64 = 64;
            let mut ranges = FreeRanges::whole(0, UNITS);
            let mut model = vec![true; UNITS as usize];
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (give, len) in steps {
                if give && !taken.is_empty() {
                    let (start, len) = taken.swap_remove(len as usize % taken.len());
                    ranges.give(start, len);
                    model[start as usize..(start + len) as usize].fill(true);
                } else {
                    let fits = model.windows(len as usize).position(|units| units.iter().all(|&u| u));
                    let start = ranges.take(len);
                    prop_assert_eq!(start, fits.map(|at| at as u64));
                    if let Some(start) = start {
                        model[start as usize..(start + len) as usize].fill(false);
                        taken.push((start, len));
                    }
                }
                prop_assert_eq!(ranges.is_whole(0, UNITS), model.iter().all(|&free| free));
            }
        }
    }
}
