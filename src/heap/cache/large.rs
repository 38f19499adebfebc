//! The few blocks that a thread caches although its budget has no room for them.
//!
//! A block that is larger than the thread's budget goes straight back to the core. That is fast for a thread
//! that has the core's lock reserved, and slow if threads contend for it. In that case a thread caches such
//! blocks here.

use super::kept::Kept;
use crate::core::{Extent, RangeId};

/// The most blocks that a thread caches here.
const BLOCKS: usize = 4;

/// At most [`BLOCKS`] blocks, found by exact size.
#[derive(Debug, Default)]
pub(crate) struct Large {
    /// Sizes in granules, the oldest block first.
    blocks: Vec<(u32, Extent)>,
    granules: u64,
}

impl Large {
    /// Removes and returns a block of exactly `size` granules.
    #[inline]
    pub(crate) fn pop(&mut self, size: u32) -> Option<Extent> {
        let at = self.blocks.iter().rposition(|&(kept, _)| kept == size)?;
        self.granules -= u64::from(size);
        Some(self.blocks.remove(at).1)
    }

    /// Caches a block of at most `most` granules. Evicts the oldest blocks until at most `most` granules
    /// remain. Returns `false` and changes nothing if the block is here already, which means a double free.
    #[must_use]
    #[inline]
    pub(crate) fn put(
        &mut self,
        size: u32,
        extent: Extent,
        most: u64,
        kept: &Kept,
        mut leaves: impl FnMut(u32, RangeId),
    ) -> bool {
        let is_this = |&(_, kept): &(u32, Extent)| kept.node == extent.node;
        if self.blocks.iter().any(is_this) {
            return false;
        }
        if self.blocks.is_empty() {
            kept.note_large();
        }
        self.blocks.push((size, extent));
        self.granules += u64::from(size);
        while self.granules > most || self.blocks.len() > BLOCKS {
            let (size, extent) = self.blocks.remove(0);
            self.granules -= u64::from(size);
            leaves(size, extent.node);
        }
        true
    }

    /// Removes all blocks.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = RangeId> {
        self.granules = 0;
        self.blocks.drain(..).map(|(_, extent)| extent.node)
    }

    /// Calls `name` with the offset and bytes of each block.
    pub(super) fn each(&self, mut name: impl FnMut(u64, u64)) {
        for &(size, extent) in &self.blocks {
            name(extent.offset, u64::from(size) * crate::core::GRANULE);
        }
    }

    /// Returns the bytes of the blocks.
    pub(super) const fn bytes(&self) -> u64 {
        self.granules * crate::core::GRANULE
    }

    /// Returns whether there are no blocks.
    pub(super) const fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_returns_blocks_of_the_exact_size_and_loses_none(
            steps in proptest::collection::vec((any::<bool>(), 1_u32..6), 0..300),
            most in 5_u64..20,
        ) {
            let (mut large, kept) = (Large::default(), Kept::default());
            let mut there: Vec<(u32, u32)> = Vec::new();
            for (number, (put, size)) in (0..).zip(steps) {
                if put {
                    let node = RangeId::from_number(number);
                    let extent = Extent { offset: number.into(), node };
                    there.push((size, number));
                    let mut left = Vec::new();
                    let put = large.put(size, extent, most, &kept, |size, node| {
                        left.push((size, node.number()));
                    });
                    let again = large.put(size, extent, most, &kept, |_, _| ());
                    prop_assert_eq!((put, again), (true, false));
                    prop_assert!(kept.bytes(0, 1) == 1);
                    prop_assert!(left.iter().eq(&there[..left.len()]), "the oldest leave");
                    there.drain(..left.len());
                } else {
                    let newest = there.iter().rposition(|&(kept, _)| kept == size);
                    let expected = newest.map(|at| there.remove(at).1);
                    prop_assert_eq!(large.pop(size).map(|extent| extent.node.number()), expected);
                }
                let granules: u64 = there.iter().map(|&(size, _)| u64::from(size)).sum();
                prop_assert!(granules <= most && there.len() <= BLOCKS);
                prop_assert_eq!(large.bytes(), granules * crate::core::GRANULE);
            }
            let left: Vec<u32> = large.take_all().map(|node| node.number()).collect();
            let expected: Vec<u32> = there.iter().map(|&(_, number)| number).collect();
            prop_assert_eq!(left, expected);
            prop_assert!(large.is_empty() && large.bytes() == 0);
        }
    }
}
