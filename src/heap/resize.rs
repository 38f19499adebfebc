//! Resizes blocks in place.

use std::sync::atomic::Ordering::Relaxed;

use super::Block;
use super::backing::Want;
use super::cache::Own;
use super::classes::GRANULE;
use super::inner::HeapInner;
use super::piece::{Extent, Kind, Piece};
use super::ranges::{Core, MAX_RANGE, RangeId};

impl Block {
    /// Resizes the block to `bytes` in place. Returns `false` and changes nothing if that is impossible.
    ///
    /// A block can shrink: the heap gets the rest. It can grow to its size class, up to 2 KiB, or to its granule
    /// of 256 bytes. It can take free bytes right behind it. Beyond its granule it does neither if another thread
    /// allocated it, of up to 2 MiB, while several needed much. If the heap's memory ends behind it, the heap adds chunks
    /// there, up to its limit and its soft limit. Added bytes are not initialised. In a
    /// shareable heap a block stays in its chunk, and no memory is added.
    ///
    /// Returns `false` in a heap in [debug mode](super::debug), and in a forked child.
    ///
    /// Shrinking is host-ordered, like dropping: no GPU may still use the bytes that the block loses.
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
    #[must_use = "if it is false, the block is unchanged"]
    pub fn resize_in_place(&mut self, bytes: u64) -> bool {
        let mut piece = *self.piece();
        // SAFETY: the piece belongs to this block, which is borrowed mutably, so it has no views.
        let resized = unsafe { self.heap().resize(&mut piece, bytes) };
        *self.piece_mut() = piece;
        resized
    }
}

impl HeapInner {
    /// Resizes a block to `bytes` in place; returns `true` if it did. No other function changes a block's
    /// size.
    ///
    /// # Safety
    /// The piece is a block of this heap that nothing else uses, and no GPU uses the bytes that it loses.
    pub(super) unsafe fn resize(&self, piece: &mut Piece, bytes: u64) -> bool {
        // In debug mode the bytes beside a block are its guard.
        let resized = bytes > 0
            && self.watch.is_none()
            && self.facts.born.is_current()
            && match piece.key.kind() {
                Kind::Small(class) => bytes <= class.bytes(),
                // SAFETY: the caller's promise.
                Kind::Range(_) => unsafe { self.resize_range(piece, bytes) },
            };
        if resized {
            self.count(|tally| tally.resize(piece.bytes, bytes));
            piece.bytes = bytes;
        }
        resized
    }

    /// # Safety
    /// As [`resize`](Self::resize).
    unsafe fn resize_range(&self, piece: &mut Piece, bytes: u64) -> bool {
        let (Kind::Range(node), Some(new)) = (piece.key.kind(), Core::range_bytes(bytes)) else {
            return false;
        };
        let (old, offset) = (piece.taken(), piece.offset);
        if new > old {
            if !self.extend_range(offset, node, new) {
                return false;
            }
        } else if new < old {
            // Another thread's shard cannot divide it. A block of the core remains the core's until it is free.
            let can = self.in_own_shard(offset, |own| !own.shard.needs_nodes());
            if !can.unwrap_or_else(|owner| owner == 0) {
                return false;
            }
            if self.facts.scrub {
                // SAFETY: the caller's promise.
                let zeroed = unsafe { self.zero_range(piece.offset + new, old - new) };
                if let Err(error) = zeroed {
                    tracing::warn!(%error, "a block keeps its size: the bytes to free cannot be scrubbed");
                    return false;
                }
            }
            // Without a node for it, the rest comes free with the block.
            let shrink = |own: &mut Own| {
                if !own.shard.needs_nodes() {
                    own.shard.shrink(node, new);
                }
            };
            if self.in_own_shard(offset, shrink) == Err(0) {
                self.in_core(|core| core.shrink(node, new));
            }
        }
        piece.key = Extent::new(offset, node, (new / GRANULE) as u32).key; // at most the largest range's
        true
    }

    fn extend_range(&self, offset: u64, node: RangeId, bytes: u64) -> bool {
        match self.in_own_shard(offset, |own| own.shard.extend(node, bytes)) {
            Ok(extended) => extended,
            Err(0) => {
                let extend = |core: &mut Core| {
                    let extended = core.extend(node, bytes);
                    self.grower.look(core);
                    extended
                };
                self.in_core(extend) || {
                    let grown = self.grow_behind(node, bytes);
                    self.tell();
                    grown
                }
            }
            Err(_) => false,
        }
    }

    /// Adds memory behind a block so that it can grow to `bytes`. Returns `false` if other blocks lie there
    /// or the addresses end, if the memory cannot be created or would exceed the soft limit, and in a heap
    /// without a handle.
    #[cold]
    fn grow_behind(&self, node: RangeId, bytes: u64) -> bool {
        // Growth elsewhere holds the lock while the driver works: most blocks need not wait for it.
        let possible = self.facts.joins
            && bytes <= MAX_RANGE
            && !self.closed.load(Relaxed)
            && self.core().ranges.end_of_memory_behind(node).is_some();
        if !possible {
            return false;
        }
        let mut locked = self.supply.locked();
        // No other thread adds memory meanwhile, but others may still take the free bytes behind the block.
        let Some((start, memory_end)) = self.core().ranges.end_of_memory_behind(node) else {
            return false;
        };
        let end = start + bytes;
        if end <= memory_end {
            return self.core().extend(node, bytes);
        }
        let want = Want::Behind {
            start,
            memory_end,
            end,
        };
        let soft = self.facts.soft_limit.as_ref();
        let most = soft.map_or(u64::MAX, |soft| soft.bytes);
        let grown = locked.grow(want, most);
        match (grown, locked.backing()) {
            (Ok(Some(grown)), Ok(backing)) => self.with_new(backing, grown).extend(node, bytes),
            (Ok(_), _) => false,
            (Err(error), _) => {
                self.reports.add(move || {
                    tracing::debug!(%error, "a block does not grow in place");
                });
                false
            }
        }
    }
}
