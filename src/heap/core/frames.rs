//! Maps an offset to the block or slab there: one entry for each 2 KiB of the heap, read and written without
//! a lock.
//!
//! Ranges that are blocks are at least as large as a frame, so at most one begins in each; slabs consist of
//! whole frames. A slab names all of its frames; a range is named only if it will be looked up by its offset
//! alone. Entries are not cleared: an entry is valid only while the caller owns a block in that frame.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use super::nodes::NodeId;
use super::slabs::SlabId;
use crate::classes::FRAME;

/// Frames in one piece of the table, which covers 1 MiB: small, so that large blocks far apart need few bytes
/// of it.
const PIECE: usize = 512;
/// Pieces in one part, which covers 1 GiB.
const PART: usize = 1024;
const SLAB: u32 = 1 << 31;

type Piece = [AtomicU32; PIECE];
type Part = [OnceLock<Box<Piece>>; PART];

/// The owner of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The range that begins there.
    Range(NodeId),
    /// The slab that contains the frame.
    Slab(SlabId),
}

/// The table.
#[derive(Debug)]
pub(crate) struct Frames {
    parts: Box<[OnceLock<Box<Part>>]>,
    /// The table's size, in bytes.
    metadata: AtomicUsize,
}

impl Frames {
    /// Creates a table for offsets below `limit`, in bytes.
    pub(super) fn new(limit: u64) -> Self {
        let parts = limit.div_ceil(FRAME * (PIECE * PART) as u64);
        let parts: Box<[_]> = (0..parts).map(|_| OnceLock::new()).collect();
        let metadata = AtomicUsize::new(size_of_val(&*parts));
        Self { parts, metadata }
    }

    /// Names the owner of `offset`; the caller owns the memory there.
    #[inline]
    pub(crate) fn set(&self, offset: u64, owner: Owner) {
        let entry = 1 + match owner {
            Owner::Range(node) => node.number(),
            Owner::Slab(slab) => slab.0 | SLAB,
        };
        let frame = (offset / FRAME) as usize;
        let piece = match self.piece(frame) {
            Some(piece) => piece,
            None => match self.new_piece(frame) {
                Some(piece) => piece,
                None => return, // not below the limit
            },
        };
        piece[frame % PIECE].store(entry, Relaxed);
    }

    /// Returns the owner that was named at `offset` last.
    #[inline]
    pub(crate) fn get(&self, offset: u64) -> Option<Owner> {
        let frame = (offset / FRAME) as usize;
        match self.piece(frame)?[frame % PIECE]
            .load(Relaxed)
            .checked_sub(1)?
        {
            slab if slab & SLAB != 0 => Some(Owner::Slab(SlabId(slab & !SLAB))),
            node => Some(Owner::Range(NodeId::from_number(node))),
        }
    }

    #[inline]
    fn piece(&self, frame: usize) -> Option<&Piece> {
        let part = self.parts.get(frame / (PIECE * PART))?.get()?;
        Some(part[frame / PIECE % PART].get()?)
    }

    #[cold]
    fn new_piece(&self, frame: usize) -> Option<&Piece> {
        let part = self.parts.get(frame / (PIECE * PART))?.get_or_init(|| {
            self.metadata.fetch_add(size_of::<Part>(), Relaxed);
            Box::new([const { OnceLock::new() }; PART])
        });
        Some(part[frame / PIECE % PART].get_or_init(|| {
            self.metadata.fetch_add(size_of::<Piece>(), Relaxed);
            Box::new([const { AtomicU32::new(0) }; PIECE])
        }))
    }

    /// Returns the table's size, in bytes.
    pub(super) fn metadata(&self) -> usize {
        self.metadata.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_named_last_is_found() {
        let frames = Frames::new((1 << 30) + 1);
        let before = frames.metadata();
        let range = Owner::Range(NodeId::from_number(7));
        for offset in [0, FRAME, (1 << 20) - 1, 1 << 20, (1 << 30) - 1, 1 << 30] {
            assert_eq!(frames.get(offset), None);
            frames.set(offset, Owner::Slab(SlabId(3)));
            assert_eq!(frames.get(offset), Some(Owner::Slab(SlabId(3))));
            frames.set(offset, range);
            assert_eq!(frames.get(offset / FRAME * FRAME), Some(range));
        }
        // Two parts and four pieces.
        let taken = 2 * size_of::<Part>() + 4 * size_of::<Piece>();
        assert_eq!(frames.metadata() - before, taken);
    }

    #[test]
    fn beyond_the_limit_there_is_nothing() {
        let frames = Frames::new(1);
        frames.set(1 << 30, Owner::Slab(SlabId(0)));
        assert_eq!(frames.get(1 << 30), None);
    }
}
