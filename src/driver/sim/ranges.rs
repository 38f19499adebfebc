//! Free ranges of a chunk or file: taken first fit, merged when given back. Pure.

use std::collections::BTreeMap;

/// Free ranges, by start, never adjacent to each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FreeRanges(BTreeMap<u64, u64>);

impl FreeRanges {
    /// Returns the set that contains `start..start + len`.
    pub(super) fn whole(start: u64, len: u64) -> Self {
        Self(BTreeMap::from([(start, len)]))
    }

    /// Takes `len` bytes from the first range that has them; returns their start.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        self.take_aligned(len, 1, 0)
    }

    /// Iterates over the free ranges of at least `len` bytes: start and length.
    pub(super) fn fitting(&self, len: u64) -> impl Iterator<Item = (u64, u64)> {
        self.0
            .iter()
            .map(|(&start, &have)| (start, have))
            .filter(move |&(_, have)| have >= len)
    }

    /// Takes `len` bytes at the lowest free multiple of `alignment` from `from` on.
    pub(super) fn take_aligned(&mut self, len: u64, alignment: u64, from: u64) -> Option<u64> {
        let start = self.0.iter().find_map(|(&start, &have)| {
            let at = start.max(from).checked_next_multiple_of(alignment)?;
            (have.checked_sub(at - start)? >= len).then_some(at)
        })?;
        self.take_at(start, len).then_some(start)
    }

    /// Takes `start..start + len` if all of it is free.
    pub(super) fn take_at(&mut self, start: u64, len: u64) -> bool {
        let Some((&at, &have)) = self.0.range(..=start).next_back() else {
            return false;
        };
        let before = start - at;
        let Some(after) = have.checked_sub(before).and_then(|n| n.checked_sub(len)) else {
            return false;
        };
        self.0.remove(&at);
        if before > 0 {
            self.0.insert(at, before);
        }
        if after > 0 {
            self.0.insert(start + len, after);
        }
        true
    }

    /// Frees a range. No part of it may be free already.
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

    /// Returns whether all of `start..start + len` is free.
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
            steps in prop::collection::vec((any::<bool>(), 1_u64..20, 0_u32..5, 0_u64..40), 0..80),
        ) {
            const UNITS: u64 = 64;
            let mut ranges = FreeRanges::whole(0, UNITS);
            let mut model = vec![true; UNITS as usize];
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (give, len, shift, from) in steps {
                if give && !taken.is_empty() {
                    let (start, len) = taken.swap_remove(len as usize % taken.len());
                    ranges.give(start, len);
                    model[start as usize..(start + len) as usize].fill(true);
                } else {
                    // 4: no alignment requested.
                    let alignment = 1_u64 << (shift % 4);
                    let fits = (0..)
                        .step_by(alignment as usize)
                        .take_while(|at| at + len <= UNITS)
                        .filter(|&at| shift == 4 || at >= from)
                        .find(|&at| model[at as usize..(at + len) as usize].iter().all(|&u| u));
                    let start = match shift {
                        4 => ranges.take(len),
                        _ => ranges.take_aligned(len, alignment, from),
                    };
                    prop_assert_eq!(start, fits);
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
