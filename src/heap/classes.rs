//! Size classes of small blocks.
//!
//! Classes are 16 bytes apart up to 128 bytes; above that, each doubling has eight classes. A block wastes at
//! most 15 bytes or an eighth, on average less than half of that.

/// The unit of larger blocks' sizes and offsets, in bytes.
pub(super) const GRANULE: u64 = 256;

/// The largest small block, in bytes. For larger blocks one granule is at most an eighth of the size.
pub(super) const MAX_SMALL: u64 = 2 << 10;

/// The number of classes.
pub(super) const CLASSES: usize = 40;

/// The size of the heap's page, in bytes. It does not depend on the kernel's page size. Slabs consist of whole pages.
pub(super) const PAGE: u64 = 2 << 10;

/// The largest slab in bytes, give or take a few pages. The first slabs of a class are small, so that a
/// class with few blocks takes little memory.
pub(super) const SLAB: u64 = 64 << 10;

/// A size class of small blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class(u8);

impl Class {
    /// Returns the class for `bytes` at addresses that are multiples of `align`, a power of two, or `None` if
    /// that is not a small block.
    #[inline]
    pub(super) fn of(bytes: u64, align: u64) -> Option<Self> {
        if bytes > MAX_SMALL {
            return None;
        }
        if align > 16 {
            Self::aligned(bytes, align)
        } else {
            Some(Self::fitting(bytes))
        }
    }

    /// Returns the class whose blocks all have the alignment. Blocks lie at multiples of the class's size in
    /// a slab that begins at a page, so that size must be a multiple of the alignment.
    fn aligned(bytes: u64, align: u64) -> Option<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(align)?;
        if bytes > MAX_SMALL {
            return None;
        }
        let mut class = Self::fitting(bytes);
        while class.bytes() & (align - 1) != 0 {
            class.0 += 1; // the largest class is a multiple of every valid alignment
        }
        Some(class)
    }

    #[inline]
    fn fitting(bytes: u64) -> Self {
        let last = bytes.max(1) - 1;
        if last < 128 {
            return Self((last >> 4) as u8);
        }
        let exponent = last.ilog2();
        Self(((exponent - 6) * 8 + ((last >> (exponent - 3)) & 7) as u32) as u8)
    }

    /// Returns the class as a number below [`CLASSES`].
    #[inline]
    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the class with this number, which is below [`CLASSES`].
    #[inline]
    pub(super) const fn from_index(index: usize) -> Self {
        debug_assert!(index < CLASSES);
        Self(index as u8)
    }

    /// Returns all classes, smallest first.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }

    /// Returns the size of the class's blocks, in bytes.
    #[inline]
    pub(super) const fn bytes(self) -> u64 {
        SHAPES[self.index()].bytes as u64
    }

    /// Returns the block counts to try for the next slab if the class's slabs have `total` bytes: the full
    /// size first, then half as many each time for when memory has no such range, and at last one page.
    pub(super) fn slabs(self, total: u64) -> impl Iterator<Item = u32> {
        let wished = (total / 2).clamp(PAGE, SLAB) / PAGE;
        let halves = std::iter::successors(Some(wished), |&pages| (pages > 1).then_some(pages / 2));
        let last = self.blocks_in_page();
        let larger = halves.map(move |pages| self.blocks_in(pages));
        larger
            .take_while(move |&blocks| blocks > last)
            .chain(std::iter::once(last))
    }

    /// Returns the number of blocks in a slab of one page: at least 1.
    pub(super) const fn blocks_in_page(self) -> u32 {
        (PAGE / self.bytes()) as u32
    }

    /// Returns whether no page has room for two blocks.
    pub(super) const fn takes_page(self) -> bool {
        self.blocks_in_page() == 1
    }

    /// Returns whether a block at a multiple of `align` may also be a range, which takes a page too and may begin at any granule.
    pub(super) const fn may_be_range(self, align: u64) -> bool {
        self.takes_page() && align <= GRANULE
    }

    /// Returns the fewest blocks that end where a pair of cache lines does, if they begin there. A new slab gives out such
    /// parts, so that two threads that write to their blocks do not take lines from each other; of sizes that do not
    /// divide a page, the end of a slab may put later parts across lines.
    pub(super) fn blocks_in_lines(self) -> usize {
        const LINES: usize = 128;
        LINES >> self.bytes().trailing_zeros().min(LINES.ilog2())
    }

    /// Returns the number of blocks in `pages` pages, or in a few more if the blocks then leave less unused
    /// at the end.
    fn blocks_in(self, pages: u64) -> u32 {
        let slabs = (pages..pages + 4).map(|pages| pages * PAGE);
        let best = slabs.min_by_key(|slab| (slab % self.bytes()) * 16 / slab);
        (best.unwrap_or(SLAB) / self.bytes()) as u32
    }

    /// Returns the size of a slab with this many blocks, in bytes.
    pub(super) const fn slab_bytes(self, blocks: u32) -> u64 {
        (blocks as u64 * self.bytes()).next_multiple_of(PAGE)
    }

    /// Returns the number of the block that begins `offset` bytes into a slab, if one begins there.
    #[inline]
    pub(super) const fn block_at(self, offset: u64) -> Option<u32> {
        let Shape { bytes, inverse } = SHAPES[self.index()];
        // Exact: offsets are below 2¹⁷, and the error of `inverse` is below 1.
        let index = (offset * inverse as u64) >> 32;
        if index * bytes as u64 == offset {
            Some(index as u32)
        } else {
            None
        }
    }
}

/// A class's size in bytes, and 2³² divided by it and rounded up: division becomes multiplication.
#[derive(Clone, Copy, Debug)]
struct Shape {
    bytes: u32,
    inverse: u32,
}

const SHAPES: [Shape; CLASSES] = shapes();

const fn shapes() -> [Shape; CLASSES] {
    let mut shapes = [Shape {
        bytes: 0,
        inverse: 0,
    }; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        let bytes = if class < 8 {
            16 * (class as u32 + 1)
        } else {
            (9 + class as u32 % 8) << (class / 8 + 3)
        };
        let inverse = u32::MAX / bytes + 1;
        shapes[class] = Shape { bytes, inverse };
        class += 1;
    }
    shapes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_size_gets_the_smallest_class_that_holds_it() {
        for bytes in 0..=MAX_SMALL {
            let class = Class::of(bytes, 1).unwrap();
            let smallest = Class::all().find(|class| class.bytes() >= bytes).unwrap();
            assert_eq!(class, smallest, "{bytes}");
            let waste = class.bytes() - bytes.max(1);
            assert!(waste < 16 || waste * 8 <= class.bytes(), "{bytes}");
        }
        assert_eq!(Class::of(MAX_SMALL + 1, 1), None);
        assert_eq!(Class::all().last().unwrap().bytes(), MAX_SMALL);
    }

    #[test]
    fn slabs_begin_small_and_waste_little() {
        for class in Class::all() {
            let mut total = 0;
            for slab in 0..20 {
                let mut sizes = class.slabs(total);
                let blocks = sizes.next().unwrap();
                let (used, bytes) = (u64::from(blocks) * class.bytes(), class.slab_bytes(blocks));
                assert!((PAGE..SLAB + 4 * PAGE).contains(&bytes), "{class:?}");
                let sixteenths = if bytes < 8 << 10 { 3 } else { 1 };
                assert!(
                    (bytes - used) * 16 <= bytes * sixteenths,
                    "{class:?} {bytes}"
                );
                assert!(slab > 1 || bytes < 5 * PAGE);
                assert!(slab < 19 || bytes > SLAB * 15 / 16);
                let mut smaller = bytes;
                for blocks in sizes {
                    assert!(
                        blocks > 0 && class.slab_bytes(blocks) <= smaller,
                        "{class:?}"
                    );
                    smaller = class.slab_bytes(blocks);
                }
                assert_eq!(smaller, PAGE);
                total += bytes;
            }
        }
    }

    proptest! {
        #[test]
        fn aligned_classes_are_multiples_of_the_alignment(bytes in 0..3 * MAX_SMALL, log in 0_u32..16) {
            let align = 1_u64 << log;
            match Class::of(bytes, align) {
                Some(class) => {
                    prop_assert!(class.bytes() >= bytes);
                    prop_assert_eq!(class.bytes() % align.min(PAGE), 0);
                    prop_assert!(align <= PAGE);
                }
                None => prop_assert!(bytes.next_multiple_of(align) > MAX_SMALL || align > PAGE),
            }
        }

        #[test]
        fn a_block_is_found_where_it_begins(class in 0..CLASSES as u8, offset in 0..2 * SLAB) {
            let class = Class(class);
            let expected = offset.is_multiple_of(class.bytes()).then_some((offset / class.bytes()) as u32);
            prop_assert_eq!(class.block_at(offset), expected);
            let begins = offset / class.bytes() * class.bytes();
            prop_assert_eq!(class.block_at(begins), Some((offset / class.bytes()) as u32));
        }
    }
}
