//! Blocks as plain numbers, for code that keeps blocks without an owner of this crate's: interfaces to other languages.

use std::alloc::Layout;

use super::classes::{Class, PAGE};
use super::piece::{Key, Piece};
use super::ranges::Core;
use super::{Block, Heap};

/// A block without its owner: [`Block::into_raw`] returns one, and [`Block::from_raw`] turns it back.
///
/// It frees nothing when it is dropped. The heap of a block that is never turned back is never released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawBlock {
    /// The block's offset in bytes from the heap's first address.
    pub offset: u64,
    /// The number of bytes requested.
    pub bytes: u64,
    /// How the heap finds the block. The value has no meaning outside the heap.
    pub key: u64,
}

impl RawBlock {
    /// Pages of this many bytes, counted from the heap's first address, tell blocks apart: of the large blocks in use at
    /// most one begins in each page, and of the small ones all that begin in one page have the same key and the same
    /// [usable size](Heap::usable_size). No page has both. In [debug mode](crate::debug) this does not hold.
    pub const PAGE: u64 = PAGE;

    /// The alignment of every block in bytes.
    pub const MIN_ALIGN: u64 = 16;

    /// Returns whether the block is small: other blocks may begin in its [page](Self::PAGE). Those of up to
    /// 1 KiB at an alignment of up to 256 bytes are, and some of up to 2 KiB.
    #[inline]
    pub fn is_small(&self) -> bool {
        Key::from_number(self.key).is_small()
    }
}

impl Heap {
    /// Returns the least bytes that a block of `layout` takes from the heap, without the guards of the [debug
    /// mode](crate::debug): as many may be requested at the same cost. `u64::MAX` if there is no such block.
    #[inline]
    pub fn usable_size(layout: Layout) -> u64 {
        let bytes = layout.size() as u64;
        match Class::of(bytes, layout.align() as u64) {
            Some(class) => class.bytes(),
            None => Core::range_bytes(bytes).unwrap_or(u64::MAX),
        }
    }
}

impl Block {
    /// Returns the block without its owner. It stays in use until it is [turned back](Self::from_raw) and dropped.
    #[inline]
    pub fn into_raw(self) -> RawBlock {
        let Piece { offset, bytes, key } = self.into_piece();
        RawBlock {
            offset,
            bytes,
            key: key.number(),
        }
    }

    /// Returns the owner of a block.
    ///
    /// # Safety
    /// [`into_raw`](Self::into_raw) returned these numbers for a block of this heap, and it was not turned back since. For
    /// a [small](RawBlock::is_small) block, `bytes` is the size requested.
    #[inline]
    pub unsafe fn from_raw(heap: &Heap, raw: RawBlock) -> Self {
        let RawBlock { offset, bytes, key } = raw;
        let key = Key::from_number(key);
        // SAFETY: the caller promises that the piece is a block of this heap, which is counted and has no other owner.
        unsafe { Self::new(heap.inner(), Piece { offset, bytes, key }) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::driver::NodeId;
    use crate::{Driver, Machine};

    fn heap() -> Heap {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap()
    }

    #[test]
    fn a_block_without_an_owner_stays_in_use_until_it_has_one_again() {
        let heap = heap();
        for bytes in [1, 100, 2048, 2049, 1 << 20] {
            let layout = Layout::from_size_align(bytes, 1).unwrap();
            let raw = heap.allocate(layout).unwrap().into_raw();
            assert_eq!((raw.bytes, raw.is_small()), (bytes as u64, bytes <= 1024));
            assert_eq!(heap.stats().live_blocks, 1);
            // SAFETY: `into_raw` has just returned it.
            let block = unsafe { Block::from_raw(&heap, raw) };
            assert_eq!((block.offset(), block.len()), (raw.offset, raw.bytes));
            drop(block);
            assert_eq!((heap.stats().live_blocks, heap.stats().live), (0, 0));
        }
    }

    #[test]
    fn all_usable_bytes_can_be_requested_at_the_same_cost() {
        for (bytes, align, usable) in [
            (1, 1, 16),
            (17, 16, 32),
            (129, 1, 144),
            (100, 64, 128),
            (2048, 16, 2048),
            (2049, 16, 2304),
            (4096, 4096, 4096),
        ] {
            let of = |bytes| Heap::usable_size(Layout::from_size_align(bytes, align).unwrap());
            assert_eq!(of(bytes), usable, "{bytes} {align}");
            assert_eq!(of(usable as usize), usable, "{bytes} {align}");
        }
    }

    #[test]
    fn pages_tell_blocks_apart() {
        let heap = heap();
        let mut random = numbers(7);
        let mut live: Vec<RawBlock> = Vec::new();
        for step in 0..4000 {
            if live.len() > 300 {
                let at = random() as usize % live.len();
                let raw = live.swap_remove(at);
                // SAFETY: it was in use and leaves the list.
                drop(unsafe { Block::from_raw(&heap, raw) });
            }
            let bytes = 1 + random() as usize % 6000;
            let layout = Layout::from_size_align(bytes, 16 << (random() % 4)).unwrap();
            live.push(heap.allocate(layout).unwrap().into_raw());
            if step % 8 != 0 {
                continue;
            }
            let mut pages: HashMap<u64, RawBlock> = HashMap::new();
            for &raw in &live {
                if let Some(other) = pages.insert(raw.offset / RawBlock::PAGE, raw) {
                    assert!(raw.is_small() && other.is_small() && raw.key == other.key);
                }
            }
        }
        for raw in live {
            // SAFETY: it was in use and leaves the list.
            drop(unsafe { Block::from_raw(&heap, raw) });
        }
        assert_eq!(heap.stats().live_blocks, 0);
    }

    /// Returns a generator of numbers (xorshift).
    fn numbers(mut state: u64) -> impl FnMut() -> u64 {
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state >> 8
        }
    }
}
