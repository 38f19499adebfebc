//! Blocks, as the heap identifies them internally.

use super::classes::Class;
use super::ranges::{Extent, GRANULE, RangeId};

/// A block's place, size and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Bytes from the heap's start.
    pub(super) offset: u64,
    /// The size requested.
    pub(super) bytes: u64,
    pub(super) key: Key,
}

/// How the core identifies a block, in one word: a class, or a node and its granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u64);

/// The meaning of a [`Key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Small(Class),
    Range(RangeId),
}

impl Key {
    /// The key of no block.
    pub(super) const NONE: Self = Self(u64::MAX);
    const SMALL: u64 = 1 << 31;

    #[inline]
    pub(super) fn small(class: Class) -> Self {
        Self(Self::SMALL | class.index() as u64)
    }

    #[inline]
    pub(super) fn range(node: RangeId, granules: u32) -> Self {
        Self(u64::from(granules) << 32 | u64::from(node.number()))
    }

    /// Returns a range's size.
    #[inline]
    pub(super) const fn granules(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Returns the key as a plain number, for [`from_number`](Self::from_number).
    #[inline]
    pub(super) const fn number(self) -> u64 {
        self.0
    }

    #[inline]
    pub(super) const fn from_number(number: u64) -> Self {
        Self(number)
    }

    #[inline]
    pub(super) const fn is_small(self) -> bool {
        self.0 & Self::SMALL != 0
    }

    /// Returns what the key means. It is the key of a block.
    #[inline]
    pub(super) fn kind(self) -> Kind {
        if self.is_small() {
            Kind::Small(Class::from_index((self.0 ^ Self::SMALL) as usize))
        } else {
            Kind::Range(RangeId::from_number(self.0 as u32))
        }
    }
}

impl Piece {
    #[inline]
    pub(super) fn small(offset: u64, bytes: u64, class: Class) -> Self {
        let key = Key::small(class);
        Self { offset, bytes, key }
    }

    /// The core's range for `bytes`.
    #[inline]
    pub(super) fn range(extent: Extent, bytes: u64) -> Self {
        Self {
            offset: extent.offset,
            bytes,
            key: Key::range(extent.node(), extent.granules()),
        }
    }

    /// Returns the range that the block takes, from the heap's start.
    pub(super) fn range_taken(&self) -> std::ops::Range<u64> {
        self.offset..self.offset + self.taken()
    }

    /// Returns the bytes that the block takes.
    pub(super) fn taken(&self) -> u64 {
        match self.key.kind() {
            Kind::Small(class) => class.bytes(),
            Kind::Range(_) => u64::from(self.key.granules()) * GRANULE,
        }
    }
}
