//! Blocks, as the heap identifies them internally.

use std::num::NonZeroU64;

use super::classes::{Class, GRANULE};
use super::ranges::RangeId;

/// A block's place, size and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
// In this order: with the key first, a pair of allocating and freeing 1 KiB took 1.1 to 1.2 times as long.
#[repr(C)]
pub(super) struct Piece {
    /// Bytes from the heap's start.
    pub(super) offset: u64,
    /// The size requested.
    pub(super) bytes: u64,
    pub(super) key: Key,
}

/// A block's place and key: a range in use, or a small block. Two words, also as an `Option`, so that functions return it in
/// registers: a result in memory is written in pieces that store forwarding cannot serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Bytes from the heap's start.
    pub(crate) offset: u64,
    pub(crate) key: Key,
}

/// How the core identifies a block, in one word: a class, or a node and its granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(NonZeroU64);

/// The meaning of a [`Key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Small(Class),
    Range(RangeId),
}

impl Key {
    /// The key of no block.
    pub(super) const NONE: Self = Self(NonZeroU64::MAX);
    const SMALL: u64 = 1 << 31;

    #[inline]
    pub(super) const fn small(class: Class) -> Self {
        Self::from_number(Self::SMALL | class.index() as u64)
    }

    #[inline]
    pub(crate) const fn range(node: RangeId, granules: u32) -> Self {
        Self::from_number((granules as u64) << 32 | node.number() as u64)
    }

    /// Returns a range's size. A range that was made smaller while another thread's shard had it may take more.
    #[inline]
    pub(crate) const fn granules(self) -> u32 {
        (self.0.get() >> 32) as u32
    }

    /// Returns a range's node.
    #[inline]
    pub(crate) const fn node(self) -> RangeId {
        RangeId::from_number(self.0.get() as u32)
    }

    /// Returns the key as a plain number, for [`from_number`](Self::from_number).
    #[inline]
    pub(super) const fn number(self) -> u64 {
        self.0.get()
    }

    #[inline]
    pub(super) const fn from_number(number: u64) -> Self {
        match NonZeroU64::new(number) {
            Some(number) => Self(number),
            None => Self::NONE, // no block's: no range has node 0
        }
    }

    #[inline]
    pub(super) const fn is_small(self) -> bool {
        self.number() & Self::SMALL != 0
    }

    /// Returns what the key means. It is the key of a block.
    #[inline]
    pub(super) fn kind(self) -> Kind {
        if self.is_small() {
            Kind::Small(Class::from_index((self.number() ^ Self::SMALL) as usize))
        } else {
            Kind::Range(self.node())
        }
    }
}

impl Extent {
    #[inline]
    pub(crate) const fn range(offset: u64, node: RangeId, granules: u32) -> Self {
        let key = Key::range(node, granules);
        Self { offset, key }
    }

    #[inline]
    pub(super) const fn small(offset: u64, class: Class) -> Self {
        let key = Key::small(class);
        Self { offset, key }
    }

    #[inline]
    pub(crate) const fn node(self) -> RangeId {
        self.key.node()
    }

    #[inline]
    pub(crate) const fn granules(self) -> u32 {
        self.key.granules()
    }
}

impl Piece {
    #[inline]
    pub(super) const fn new(extent: Extent, bytes: u64) -> Self {
        let Extent { offset, key } = extent;
        Self { offset, bytes, key }
    }

    /// Returns the block without the size requested.
    #[inline]
    pub(super) const fn extent(&self) -> Extent {
        let Self { offset, key, .. } = *self;
        Extent { offset, key }
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
