//! mimalloc, with its own memory.

use std::alloc::Layout;
use std::ptr::NonNull;

use libmimalloc_sys::{mi_free, mi_malloc, mi_malloc_aligned};

use super::Shared;

/// mi_malloc and mi_free.
pub struct Mimalloc;

/// An address.
pub struct Block(NonNull<libc::c_void>);

// SAFETY: an address; mimalloc's blocks may be freed by any thread.
unsafe impl Send for Block {}

/// The alignment that mi_malloc guarantees.
const NATURAL: usize = 16;

impl Shared for Mimalloc {
    type Block = Block;

    #[inline]
    fn allocate(&self, layout: Layout) -> Option<Block> {
        let ptr = if layout.align() <= NATURAL {
            // SAFETY: any size will do.
            unsafe { mi_malloc(layout.size()) }
        } else {
            // SAFETY: the alignment is a power of two, as a layout's is.
            unsafe { mi_malloc_aligned(layout.size(), layout.align()) }
        };
        NonNull::new(ptr.cast()).map(Block)
    }

    #[inline]
    unsafe fn free(&self, block: Block, _layout: Layout) {
        // SAFETY: from mimalloc, and not yet freed: blocks are not copied.
        unsafe { mi_free(block.0.as_ptr().cast()) };
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
