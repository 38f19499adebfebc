//! Blocks that become larger or smaller where they lie.

use super::Block;
use super::cache::member;
use super::core::Core;
use super::piece::{Kind, Piece};
use super::shared::Shared;

impl Block {
    /// Makes the block one of `bytes`, where it lies; whether that went. Otherwise nothing has changed.
    ///
    /// It goes if the block takes as much anyway, up to 2 KiB or a granule of 256 bytes; if it becomes
    /// smaller, whose rest is free then; and if what lies right behind it is free, which often is so of
    /// the block that was allocated last. Bytes that come to it are whatever they were. No
    /// memory is added to the heap for it, and a block stays in its chunk where the heap is shareable.
    ///
    /// Never in a heap in [debug mode](super::debug).
    ///
    /// What it loses is given up host-ordered, as by dropping: no GPU may work on it any more.
    ///
    /// ```
    /// # use std::alloc::Layout;
    /// # use egmem::{Driver, Heap, Machine, driver::NodeId};
    /// # let driver = Driver::simulated(Machine::gh200())?;
    /// # let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver)?;
    /// let mut block = heap.allocate(Layout::new::<[u8; 1 << 20]>())?;
    /// let address = block.device_ptr();
    /// assert!(block.resize_in_place(3 << 20)); // nothing else is in this heap
    /// assert_eq!((block.device_ptr(), block.len()), (address, 3 << 20));
    /// assert!(!block.resize_in_place(0));
    /// # Ok::<(), egmem::Error>(())
    /// ```
    #[must_use = "where it is false, the block is as it was"]
    pub fn resize_in_place(&mut self, bytes: u64) -> bool {
        let mut piece = *self.piece();
        // SAFETY: the piece is this block's, which nobody else has a view of.
        let resized = unsafe { self.heap().resize(&mut piece, bytes) };
        *self.piece_mut() = piece;
        resized
    }
}

impl Shared {
    /// Makes a block one of `bytes` where it lies; whether that went. The one place where blocks change
    /// their size.
    ///
    /// # Safety
    /// The piece is a block's of this heap, which nobody else uses; of what it loses no GPU either.
    pub(super) unsafe fn resize(&self, piece: &mut Piece, bytes: u64) -> bool {
        // What lies beside a block in debug mode is its guard.
        let resized = bytes > 0
            && self.watch.is_none()
            && match piece.key.kind() {
                Kind::Small(class) => bytes <= class.bytes(),
                // SAFETY: the caller's promise.
                Kind::Range(_) => unsafe { self.resize_range(piece, bytes) },
            };
        if resized {
            self.count_resized(piece.bytes, bytes);
            piece.bytes = bytes;
        }
        resized
    }

    /// # Safety
    /// As [`resize`](Self::resize).
    unsafe fn resize_range(&self, piece: &Piece, bytes: u64) -> bool {
        let (Kind::Range(node), Some(new)) = (piece.key.kind(), Core::range_bytes(bytes)) else {
            return false;
        };
        let old = piece.taken();
        if new > old {
            return self.in_core(|core| core.extend(node, new));
        }
        if new < old {
            if self.scrub {
                // SAFETY: the caller's promise.
                let zeroed = unsafe { self.zero_range(piece.offset + new, old - new) };
                if let Err(error) = zeroed {
                    tracing::warn!(%error, "a block keeps its size: what it would lose cannot be scrubbed");
                    return false;
                }
            }
            self.in_core(|core| core.shrink(node, new));
        }
        true
    }

    fn count_resized(&self, old: u64, new: u64) {
        let counted = member::with(self, |local| {
            local.tally.resize(old, new);
            Some(())
        });
        if counted.is_none() {
            self.note_without_member(|tally| tally.resize(old, new));
        }
    }
}
