//! Size classes of small blocks.
//!
//! Sixteen-byte steps to 128 bytes, then eight classes to a doubling: a block wastes at most 15
//! bytes or an eighth, on average less than half of that.

/// The largest small block, in bytes. Above it a granule is at most an eighth.
pub(super) const MAX_SMALL: u64 = 2 << 10;

/// How many classes there are.
pub(super) const CLASSES: usize = 40;

/// Slabs consist of frames of so many bytes.
pub(super) const FRAME: u64 = 2 << 10;

/// The smallest and the largest slab, in bytes. The first slabs of a class are small, so that a class
/// of few blocks takes little.
const SLABS: (u64, u64) = (2 << 10, 64 << 10);

/// A size class of small blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class(u8);

impl Class {
    /// The class for `bytes` at addresses that are multiples of `align`, a power of two; none where
    /// that is no small block.
    #[inline]
    pub(super) fn of(bytes: u64, align: u64) -> Option<Self> {
        if bytes > MAX_SMALL {
            return None;
        }
        match align > 16 {
            false => Some(Self::fitting(bytes)),
            true => Self::aligned(bytes, align),
        }
    }

    /// Blocks lie at multiples of their class's size in a slab that begins at a frame: the class
    /// must be a multiple of the alignment.
    fn aligned(bytes: u64, align: u64) -> Option<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(align)?;
        if bytes > MAX_SMALL {
            return None;
        }
        let mut class = Self::fitting(bytes);
        while class.bytes() & (align - 1) != 0 {
            class.0 += 1; // the last one is a multiple of all that fit
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

    /// As a number below [`CLASSES`].
    #[inline]
    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }

    /// The class of that number, below [`CLASSES`].
    #[inline]
    pub(super) const fn from_index(index: usize) -> Self {
        debug_assert!(index < CLASSES);
        Self(index as u8)
    }

    /// All of them, smallest first.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }

    /// What a block of the class takes, in bytes.
    #[inline]
    pub(super) const fn bytes(self) -> u64 {
        SHAPES[self.index()].bytes as u64
    }

    /// How many blocks the next slab is to have where all slabs of the class have `total` bytes.
    pub(super) fn blocks_for(self, total: u64) -> u32 {
        let wished = (total / 2).clamp(SLABS.0, SLABS.1) / FRAME;
        // A frame or a few more, where blocks end nearer to the end of one then.
        let slabs = (wished..wished + 4).map(|frames| frames * FRAME);
        let best = slabs.min_by_key(|slab| (slab % self.bytes()) * 16 / slab);
        (best.unwrap_or(SLABS.1) / self.bytes()) as u32
    }

    /// The number of the block that begins at `offset` bytes into a slab, if one does there.
    #[inline]
    pub(super) const fn block_at(self, offset: u64) -> Option<u32> {
        let Shape { bytes, inverse } = SHAPES[self.index()];
        // Exact: offsets are below 2¹⁷, and the error of `inverse` is below 1.
        let index = (offset * inverse as u64) >> 32;
        match index * bytes as u64 == offset {
            true => Some(index as u32),
            false => None,
        }
    }
}

/// A class's size in bytes, and 2³² divided by it, rounded up: division as multiplication.
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
                let used = u64::from(class.blocks_for(total)) * class.bytes();
                let bytes = used.next_multiple_of(FRAME);
                assert!(SLABS.0 <= bytes && bytes < SLABS.1 + 4 * FRAME, "{class:?}");
                let sixteenths = if bytes < 8 << 10 { 3 } else { 1 };
                assert!(
                    (bytes - used) * 16 <= bytes * sixteenths,
                    "{class:?} {bytes}"
                );
                assert!(slab > 1 || bytes < SLABS.0 + 4 * FRAME);
                assert!(slab < 19 || bytes > SLABS.1 * 15 / 16);
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
                    prop_assert_eq!(class.bytes() % align.min(FRAME), 0);
                    prop_assert!(align <= FRAME);
                }
                None => prop_assert!(bytes.next_multiple_of(align) > MAX_SMALL || align > FRAME),
            }
        }

        #[test]
        fn a_block_is_found_where_it_begins(class in 0..CLASSES as u8, offset in 0..2 * SLABS.1) {
            let class = Class(class);
            let expected = offset.is_multiple_of(class.bytes()).then_some((offset / class.bytes()) as u32);
            prop_assert_eq!(class.block_at(offset), expected);
            let begins = offset / class.bytes() * class.bytes();
            prop_assert_eq!(class.block_at(begins), Some((offset / class.bytes()) as u32));
        }
    }
}
