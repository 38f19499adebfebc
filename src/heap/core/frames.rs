//! From an offset to what lies there: one entry for each 2 KiB of the heap.
//!
//! Ranges that are blocks are no smaller than a frame, so at most one begins in each; slabs consist
//! of whole frames. Entries are not cleared, so whoever looks one up checks what it finds.

use super::ranges::NodeId;
use super::slabs::SlabId;
use crate::heap::classes::FRAME;

/// Frames in one piece of the table, which covers 1 MiB: small, so that large blocks far apart take
/// little of it.
const PIECE: usize = 512;
const SLAB: u32 = 1 << 31;

/// What an entry names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// The range that begins there.
    Range(NodeId),
    /// The slab that the frame is part of.
    Slab(SlabId),
}

#[derive(Debug, Default)]
pub(super) struct Frames {
    pieces: Vec<Option<Box<[u32; PIECE]>>>,
}

impl Frames {
    #[inline]
    pub(super) fn set(&mut self, offset: u64, owner: Owner) {
        let frame = (offset / FRAME) as usize;
        let entry = 1 + match owner {
            Owner::Range(node) => node.0,
            Owner::Slab(slab) => slab.0 | SLAB,
        };
        match self.pieces.get_mut(frame / PIECE) {
            Some(Some(piece)) => piece[frame % PIECE] = entry,
            _ => self.new_piece(frame / PIECE)[frame % PIECE] = entry,
        }
    }

    #[cold]
    fn new_piece(&mut self, index: usize) -> &mut [u32; PIECE] {
        if self.pieces.len() <= index {
            self.pieces.resize_with(index + 1, || None);
        }
        self.pieces[index].get_or_insert_with(|| Box::new([0; PIECE]))
    }

    #[inline]
    pub(super) fn get(&self, offset: u64) -> Option<Owner> {
        let frame = (offset / FRAME) as usize;
        let piece = self.pieces.get(frame / PIECE)?.as_ref()?;
        match piece[frame % PIECE].checked_sub(1)? {
            slab if slab & SLAB != 0 => Some(Owner::Slab(SlabId(slab & !SLAB))),
            node => Some(Owner::Range(NodeId(node))),
        }
    }

    /// What the table takes, in bytes.
    pub(super) fn metadata(&self) -> usize {
        self.pieces.iter().flatten().count() * size_of::<[u32; PIECE]>()
            + self.pieces.capacity() * size_of::<Option<Box<[u32; PIECE]>>>()
    }
}
