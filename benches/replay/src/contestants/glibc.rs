//! The C library's malloc.

use std::alloc::Layout;
use std::ptr::NonNull;

use super::Shared;

/// malloc and free.
pub struct Glibc;

/// An address.
pub struct Block(NonNull<libc::c_void>);

// SAFETY: an address; malloc's blocks belong to no thread.
unsafe impl Send for Block {}

/// The alignment that malloc guarantees.
const NATURAL: usize = 16;

impl Shared for Glibc {
    type Block = Block;

    #[inline]
    fn allocate(&self, layout: Layout) -> Option<Block> {
        let ptr = if layout.align() <= NATURAL {
            // SAFETY: any size will do.
            unsafe { libc::malloc(layout.size()) }
        } else {
            // SAFETY: the alignment is a power of two, as a layout's is.
            unsafe { libc::memalign(layout.align(), layout.size()) }
        };
        NonNull::new(ptr).map(Block)
    }

    #[inline]
    unsafe fn free(&self, block: Block, _layout: Layout) {
        // SAFETY: from malloc or memalign, and not yet freed: blocks are not copied.
        unsafe { libc::free(block.0.as_ptr()) };
    }

    #[inline]
    fn start(&self, block: &Block) -> u64 {
        block.0.addr().get() as u64
    }

    #[inline]
    fn address(&self, block: &Block) -> Option<NonNull<u8>> {
        Some(block.0.cast())
    }
}
