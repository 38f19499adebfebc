//! Blocks that become larger or smaller where they lie.

use std::sync::atomic::Ordering::Relaxed;

use super::Block;
use super::backing::Want;
use super::cache::member;
use super::core::{Core, MAX_RANGE, NodeId};
use super::piece::{Kind, Piece};
use super::shared::Shared;
use crate::per_driver::lock;

impl Block {
    /// Makes the block one of `bytes` where it lies. Returns false, and changes nothing, where it cannot.
    ///
    /// A block can become smaller: the heap has the rest then. It can become as large as its size class, up to
    /// 2 KiB, or its granule of 256 bytes. It can take free bytes right behind it. Where the heap's memory ends
    /// behind it, the heap adds chunks there, up to its limit and its soft limit. Bytes that come to the block
    /// have any value. In a shareable heap a block stays in its chunk, and no memory is added.
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
            return self.in_core(|core| core.extend(node, new)) || self.grow_behind(node, new);
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

    /// Adds memory behind a block, for it to have `bytes` there. Returns false where other blocks lie there or
    /// the addresses end; where the memory cannot be made or is beyond the soft limit; and in a heap without a
    /// handle.
    #[cold]
    fn grow_behind(&self, node: NodeId, bytes: u64) -> bool {
        // Growth elsewhere holds the lock for as long as the driver takes: most blocks need not wait for it.
        let possible = !self.exportable
            && bytes <= MAX_RANGE
            && !self.closed.load(Relaxed)
            && self.core().end_of_memory_behind(node).is_some();
        if !possible {
            return false;
        }
        let mut guard = lock(&self.backing);
        let Some(backing) = guard.as_mut() else {
            return false;
        };
        // Nobody adds memory meanwhile. Others may still take bytes that are free behind the block.
        let Some((start, edge)) = self.core().end_of_memory_behind(node) else {
            return false;
        };
        let end = start + bytes;
        if end > edge {
            let want = Want::Behind { start, edge, end };
            let grown = match &self.soft_limit {
                None => backing.grow(want).map(Some),
                Some(soft) => backing.grow_within(want, soft.bytes),
            };
            match grown {
                Ok(Some(grown)) => return self.with_new(backing, grown).extend(node, bytes),
                Ok(None) => return false,
                Err(error) => {
                    tracing::debug!(%error, "a block does not grow where it lies");
                    return false;
                }
            }
        }
        self.core().extend(node, bytes)
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
