//! Blocks, as the heap identifies them internally.

use std::num::NonZeroU64;

use super::classes::{Class, GRANULE};
use super::ranges::RangeId;

/// A block's place, size and key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Bytes from the heap's start.
    pub(super) offset: u64,
    /// The size requested.
    pub(super) bytes: u64,
    pub(super) key: Key,
}

/// A block without the size requested. Two words, also as an `Option`, so that functions return it in registers: a
/// result in memory is written in pieces that store forwarding cannot serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// Bytes from the heap's start.
    pub(super) offset: u64,
    pub(super) key: Key,
}

/// How the core identifies a block, in one word: a class, or a node and its granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(NonZeroU64);

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

    /// Returns the key with this [number](Self::number).
    #[inline]
    pub(super) const fn from_number(number: u64) -> Self {
        // Not 0: no range has node 0.
        match NonZeroU64::new(number) {
            Some(number) => Self(number),
            None => Self::NONE,
        }
    }

    /// Returns the key as a plain number.
    #[inline]
    pub(super) const fn number(self) -> u64 {
        self.0.get()
    }

    /// Returns the size of a range. One that was made smaller while another thread's shard had it may take more.
    #[inline]
    pub(super) const fn granules(self) -> u32 {
        (self.number() >> 32) as u32
    }

    #[inline]
    pub(super) const fn is_small(self) -> bool {
        self.number() & Self::SMALL != 0
    }

    /// Returns a small block's class.
    #[inline]
    pub(super) const fn class(self) -> Class {
        Class::from_index((self.number() ^ Self::SMALL) as usize)
    }

    /// Returns what the key means. It is the key of a block.
    #[inline]
    pub(super) const fn kind(self) -> Kind {
        if self.is_small() {
            Kind::Small(self.class())
        } else {
            Kind::Range(RangeId::from_number(self.number() as u32))
        }
    }
}

impl Extent {
    /// Returns a range in use.
    #[inline]
    pub(super) const fn new(offset: u64, node: RangeId, granules: u32) -> Self {
        let key = Key::from_number((granules as u64) << 32 | node.number() as u64);
        Self { offset, key }
    }

    #[inline]
    pub(super) const fn small(offset: u64, class: Class) -> Self {
        let key = Key::from_number(Key::SMALL | class.index() as u64);
        Self { offset, key }
    }

    /// Returns the node of a range.
    #[inline]
    pub(super) const fn node(self) -> RangeId {
        RangeId::from_number(self.key.number() as u32)
    }

    /// Returns the size of a range.
    #[inline]
    pub(super) const fn granules(self) -> u32 {
        self.key.granules()
    }

    /// Returns the block for a request of `bytes`.
    #[inline]
    pub(super) const fn with(self, bytes: u64) -> Piece {
        let Self { offset, key } = self;
        Piece { offset, bytes, key }
    }
}

impl Piece {
    #[inline]
    pub(super) const fn extent(&self) -> Extent {
        let &Self { offset, key, .. } = self;
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
