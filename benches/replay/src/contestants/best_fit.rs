//! A simple best fit: free ranges by offset and by size, in two B-trees.

use std::alloc::Layout;
use std::collections::{BTreeMap, BTreeSet};

use super::Contestant;

/// Ranges start and end at multiples of this.
const UNIT: u64 = 16;

/// Takes the smallest free range that fits; merges neighbours at once.
pub struct BestFit {
    /// From a free range's offset to its length.
    by_offset: BTreeMap<u64, u64>,
    /// Free ranges: length, offset.
    by_size: BTreeSet<(u64, u64)>,
}

impl BestFit {
    /// All of `capacity` bytes, rounded down to 16, is free.
    pub fn new(capacity: u64) -> Self {
        let mut this = Self {
            by_offset: BTreeMap::new(),
            by_size: BTreeSet::new(),
        };
        this.insert(0, capacity / UNIT * UNIT);
        this
    }

    fn insert(&mut self, offset: u64, len: u64) {
        if len > 0 {
            self.by_offset.insert(offset, len);
            self.by_size.insert((len, offset));
        }
    }

    fn remove(&mut self, offset: u64, len: u64) {
        self.by_offset.remove(&offset);
        self.by_size.remove(&(len, offset));
    }
}

/// The bytes that a block takes.
fn bytes(layout: Layout) -> u64 {
    (layout.size() as u64).next_multiple_of(UNIT)
}

impl Contestant for BestFit {
    /// The offset.
    type Block = u64;

    #[inline]
    fn allocate(&mut self, layout: Layout) -> Option<u64> {
        let (bytes, align) = (bytes(layout), layout.align() as u64);
        let (len, offset) = self
            .by_size
            .range((bytes, 0)..)
            .find(|&&(len, offset)| offset.next_multiple_of(align) - offset + bytes <= len)
            .copied()?;
        self.remove(offset, len);
        let start = offset.next_multiple_of(align);
        self.insert(offset, start - offset);
        self.insert(start + bytes, offset + len - start - bytes);
        Some(start)
    }

    #[inline]
    unsafe fn free(&mut self, mut offset: u64, layout: Layout) {
        let mut len = bytes(layout);
        if let Some((&before, &its)) = self.by_offset.range(..offset).next_back()
            && before + its == offset
        {
            self.remove(before, its);
            (offset, len) = (before, its + len);
        }
        if let Some(&after) = self.by_offset.get(&(offset + len)) {
            self.remove(offset + len, after);
            len += after;
        }
        self.insert(offset, len);
    }

    #[inline]
    fn start(&self, block: &u64) -> u64 {
        *block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_smallest_that_fits_and_merges() {
        let mut fit = BestFit::new(1024);
        let layout = |size| Layout::from_size_align(size, 16).expect("a layout");
        let blocks: Vec<u64> = (0..8).filter_map(|_| fit.allocate(layout(128))).collect();
        assert_eq!(blocks, [0, 128, 256, 384, 512, 640, 768, 896]);
        assert_eq!(fit.allocate(layout(1)), None, "full");
        for index in [1, 2, 5] {
            // SAFETY: best fit touches no memory; each is freed once with its layout.
            unsafe { fit.free(blocks[index], layout(128)) };
        }
        assert_eq!(fit.allocate(layout(100)), Some(640), "the tighter hole");
        assert_eq!(fit.allocate(layout(256)), Some(128), "merged");
        assert_eq!(
            fit.allocate(layout(1)),
            Some(752),
            "the rest of the tighter hole"
        );
        assert_eq!(fit.allocate(layout(1)), None, "full again");
    }

    #[test]
    fn aligns() {
        let mut fit = BestFit::new(4096);
        let first = fit.allocate(Layout::from_size_align(1, 16).expect("a layout"));
        assert_eq!(first, Some(0));
        let aligned = fit.allocate(Layout::from_size_align(1, 1024).expect("a layout"));
        assert_eq!(aligned, Some(1024));
        let between = fit.allocate(Layout::from_size_align(1008, 16).expect("a layout"));
        assert_eq!(between, Some(16));
    }
}
